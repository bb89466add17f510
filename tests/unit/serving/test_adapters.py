"""Many adapters on one base: each answers as its merged model would, together in one batch."""

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from serving.deployment import DeployRequest
from serving.engines.adapters import AdapterBank
from serving.engines.engine import OverloadedError, Sampling
from serving.engines.transformers_engine import TransformersEngine
from serving.errors import NotFoundError
from serving.models.loading import EngineSettings, read_adapter
from tests.unit.serving.served import finish_job, make_generator
from tests.unit.serving.test_generator import ask, ready
from tests.unit.training.adapters import make_adapter
from training.config import parse_config
from training.errors import ModelError
from training.model import load as models
from training.run_dir import RunDir

PROMPT = [5, 17, 90, 200, 33]


@pytest.fixture(scope="module")
def adapters(random_base: Path, tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(random_base, directory / f"a{seed}", seed=seed) for seed in range(3)]


@pytest.fixture
def engine(random_base: Path):
    model = models.load(random_base)
    bank = AdapterBank(model, lambda adapter: read_adapter(adapter, random_base), capacity=2, max_rank=8)
    engine = TransformersEngine(model, adapters=bank)
    yield engine
    engine.close()


async def scored(engine, adapter: Path | None, tokens: int = 8) -> tuple[list[int], list[float]]:
    ids, logprobs = [], []
    settings = Sampling(max_new_tokens=tokens, stop_ids=frozenset(), top_logprobs=1)
    async for chunk in engine.generate(PROMPT, settings, adapter):
        ids += chunk.ids
        logprobs += [score.logprob for score in chunk.logprobs]
    return ids, logprobs


def merged_model(base: Path, adapter: Path):
    """The base with W + scale * B A in fp32: what a merge is before it is rounded to bf16."""
    model = models.load(base)
    with torch.no_grad():
        for name, (a, b) in read_adapter(adapter, base).items():
            model.get_submodule(name).weight += b @ a
    return model


async def test_rows_of_one_batch_go_through_their_own_adapters(engine, random_base, adapters):
    chosen = [adapters[0], None, adapters[1], adapters[0]]
    together = await asyncio.gather(*(scored(engine, adapter) for adapter in chosen))
    for (ids, logprobs), adapter in zip(together, chosen, strict=True):
        model = models.load(random_base) if adapter is None else merged_model(random_base, adapter)
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        assert ids == logits.argmax(-1).tolist()
        assert logprobs == pytest.approx(logits.max(-1).values.tolist(), abs=1e-3)
    assert len({tuple(ids) for ids, _ in together}) == 3


async def test_the_least_recently_used_adapter_leaves_and_comes_back(engine, adapters):
    first = [await scored(engine, adapter) for adapter in adapters]
    assert [await scored(engine, adapter) for adapter in adapters] == first


async def test_an_adapter_that_answers_is_not_pushed_out(engine, adapters):
    alone = await scored(engine, adapters[0], tokens=120)
    long = asyncio.create_task(scored(engine, adapters[0], tokens=120))
    other = asyncio.create_task(scored(engine, adapters[1], tokens=120))
    await asyncio.sleep(0.05)
    with pytest.raises(OverloadedError, match="all 2 places"):
        await scored(engine, adapters[2])
    assert (await long)[0] == alone[0]
    await other
    assert await scored(engine, adapters[2])


async def test_who_leaves_while_an_adapter_is_read_leaves_no_place_taken(random_base, adapters):
    model = models.load(random_base)
    begun, go_on = threading.Event(), threading.Event()

    def read(adapter: Path):
        begun.set()
        assert go_on.wait(10)
        return read_adapter(adapter, random_base)

    bank = AdapterBank(model, read, capacity=1, max_rank=8)
    engine = TransformersEngine(model, adapters=bank)
    leaving = asyncio.create_task(scored(engine, adapters[0]))
    await asyncio.to_thread(begun.wait, 10)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    go_on.set()
    async with asyncio.timeout(60):
        while not bank._slots or any(bank._users):
            await asyncio.sleep(0.01)
    assert await scored(engine, adapters[1]), "the one place is free again"
    engine.close()


async def test_adapters_that_cannot_be_served_unmerged(engine, random_base, tmp_path):
    experts = make_adapter(random_base, tmp_path / "experts", experts=True)
    with pytest.raises(ModelError, match="only be served merged"):
        await scored(engine, experts)
    wide = make_adapter(random_base, tmp_path / "wide", r=16)
    with pytest.raises(ModelError, match="rank of 16"):
        await scored(engine, wide)
    with pytest.raises(ModelError):
        await scored(engine, tmp_path / "none")


def finish_adapter_job(home: Path, job_id: str, base: Path, adapter: Path, status: str = "SUCCEEDED") -> str:
    finish_job(home, job_id, base, status=status)
    run = RunDir(home / "runs" / job_id)
    config = parse_config({"model": {"path": str(base)}, "data": {"path": "/rows.jsonl"}})
    run.config_path.write_text(config.model_dump_json())
    shutil.copytree(adapter, run.adapter)
    run.result_path.write_text(json.dumps(run.result() | {"adapter": str(run.adapter)}))
    return f"adapter:{job_id}"


async def test_a_service_without_places_for_adapters_says_so(home, random_base, adapters):
    generator = make_generator(home, settings=EngineSettings(device="cpu", max_adapters=0))
    name = finish_adapter_job(home, "job", random_base, adapters[0])
    with pytest.raises(ModelError, match="serves no adapters") as caught:
        await ask(generator, model=name)
    assert "generator.max_adapters" in caught.value.hint


async def test_adapters_of_jobs_share_their_base(home, random_base, adapters):
    generator = make_generator(home, settings=EngineSettings(device="cpu", max_adapters=2))
    names = [finish_adapter_job(home, f"job{n}", random_base, adapter) for n, adapter in enumerate(adapters)]
    failed = finish_adapter_job(home, "unmerged", random_base, adapters[0], status="FAILED")
    draw = {"temperature": 1.2, "seed": 5, "max_new_tokens": 24}
    answers = await asyncio.gather(*(ask(generator, model=name, **draw) for name in names[:2]))
    answers += [await ask(generator, model=name, **draw) for name in (names[2], failed)]
    assert [answer.model for answer in answers] == [*names, failed]
    assert answers[3].answer == answers[0].answer
    assert len({answer.answer + answer.reasoning for answer in answers}) == 3
    assert len((await generator.deployment()).loaded) == 1, "one base for all"

    await generator.deploy(DeployRequest(model=names[1]))
    assert (await ready(generator)).model == names[1]
    assert (await ask(generator)).model == names[1]
    with pytest.raises(NotFoundError):
        await ask(generator, model="adapter:none")
    generator.close()


async def test_a_broken_adapter_is_not_deployed(home, random_base, adapters):
    generator = make_generator(home)
    good = finish_adapter_job(home, "good", random_base, adapters[0])
    bad = finish_adapter_job(home, "bad", random_base, adapters[1])
    (home / "runs" / "bad" / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    await generator.deploy(DeployRequest(model=good))
    await ready(generator)
    await generator.deploy(DeployRequest(model=bad))
    deployment = await ready(generator)
    assert (deployment.state, deployment.model) == ("ready", good)
    assert "bad" in deployment.reason
    generator.close()
