"""The generator steps back for a job that needs its GPUs, and answers again afterwards."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from ray_app.generator.settings import GeneratorSettings
from ray_app.generator.yielding import YieldingGenerator, gpus_of, yielding
from ray_app.queue.admission import GENERATOR_YIELDS
from ray_app.queue.store import SqlStore
from serving.answers.generation import Event, GenerateRequest, TextDelta
from serving.deployment import Deployment, DeployRequest
from serving.errors import UnavailableError
from serving.jobs import NewJob
from training.config import parse_config

CONFIG = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}}).resolved()


class Echo:
    """Answers with the prompt, and deploys what it is asked to."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        yield TextDelta(channel="answer", text=request.prompt or "")

    async def deploy(self, request: DeployRequest) -> Deployment:
        return Deployment(state="loading", model=request.model)


def ask(generator: YieldingGenerator) -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in generator.generate(GenerateRequest(prompt="hi"))]

    return asyncio.run(collect())


def test_it_answers_but_while_a_job_waits_for_its_gpus(home: Path) -> None:
    store = SqlStore(f"sqlite:///{home / 'jobs.db'}", str(home / "runs"))
    generator = YieldingGenerator(Echo(), store)  # type: ignore[arg-type]
    job = store.submit(NewJob("demo", CONFIG))
    store.note(job, status_reason="needs 16 GPU, cluster has 8")
    assert len(ask(generator)) == 1
    store.note(job, status_reason=f"needs 8 GPU, 7 free; {GENERATOR_YIELDS}")
    with pytest.raises(UnavailableError, match=job.id):
        ask(generator)
    with pytest.raises(UnavailableError, match=job.id):
        asyncio.run(generator.deploy(DeployRequest(model="job:x")))
    assert store.claim(job, stale_result_at=None)
    assert len(ask(generator)) == 1
    assert asyncio.run(generator.deploy(DeployRequest(model="job:x"))).model == "job:x"
    store.close()


def test_replicas_with_gpus_can_all_go_unless_some_are_to_stay() -> None:
    assert yielding(GeneratorSettings()).min_replicas == 1
    assert gpus_of(GeneratorSettings(num_gpus=0)) == 0
    assert yielding(GeneratorSettings(num_gpus=2)).min_replicas == 0
    assert gpus_of(GeneratorSettings(num_gpus=2)) == 2
    assert gpus_of(GeneratorSettings(num_gpus=2, min_replicas=1, max_replicas=3)) == 4
