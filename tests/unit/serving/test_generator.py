"""Which model answers, and what happens while models come and go."""

import asyncio
import dataclasses
import gc
import json
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving.answers.generation import GenerateAnswer, GenerateRequest, Started, TextDelta
from serving.deployment import Deployment, DeployRequest
from serving.engines.engine import EngineError, OverloadedError
from serving.errors import NotFoundError, RequestError, UnavailableError
from serving.generator import LOOK_S, Generator, RequestTimeoutError
from serving.models.loading import load_served_model
from serving.models.names import ModelNames, ModelSource, names_of_jobs
from serving.models.pool import ModelPool
from serving.models.served import ServedModel
from tests.unit.serving.served import SETTINGS, finish_job, make_generator
from training.errors import ModelError


async def ask(generator, text: str = "Hello", **values) -> GenerateAnswer:
    values = {"max_new_tokens": 8, "temperature": 0} | values
    start, answer = [event async for event in generator.generate(GenerateRequest(prompt=text, **values))]
    assert isinstance(start, Started)
    return answer


@pytest.fixture
def generator(home: Path):
    generator = make_generator(home)
    yield generator
    generator.close()


async def ready(generator) -> Deployment:
    """Waits until no model is being loaded; returns what is deployed."""
    return await deployed(generator, lambda deployment: deployment.loading is None)


async def deployed(generator, is_so: Callable[[Deployment], bool]) -> Deployment:
    """Waits until what is deployed is so."""
    for _ in range(600):
        deployment = await generator.deployment()
        if is_so(deployment):
            return deployment
        await asyncio.sleep(0.05)
    raise AssertionError(deployment)


async def test_without_a_model_it_says_how_to_get_one(generator):
    with pytest.raises(UnavailableError, match="no job has made a model") as caught:
        await ask(generator)
    assert "POST /jobs" in caught.value.hint
    deployment = await generator.deployment()
    assert (deployment.state, deployment.model) == ("empty", None)


async def test_the_newest_job_answers_and_a_newer_one_takes_over(generator, home, random_base, tmp_path):
    finish_job(home, "old", random_base, ended_at=1)
    finish_job(home, "broken", random_base, status="FAILED", ended_at=9)
    assert (await generator.deployment()).state == "idle"
    assert (await ask(generator)).model == "job:old"
    assert (await generator.deployment()).state == "ready"

    finish_job(home, "new", shutil.copytree(random_base, tmp_path / "new"), ended_at=2)
    await asyncio.sleep(LOOK_S)
    assert (await ask(generator)).model == "job:old", "the old one answers while the new one is loaded"
    await deployed(generator, lambda deployment: deployment.model == "job:new")
    assert (await ask(generator)).model == "job:new"


async def test_a_request_names_its_model(generator, home, random_base):
    finish_job(home, "one", random_base)
    for name in ("job:one", "latest"):
        assert (await ask(generator, model=name)).model == "job:one"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("job:none", NotFoundError),
        ("job:../../etc", NotFoundError),
        ("job:failed", NotFoundError),
        ("gpt-4", NotFoundError),
        ("models:/", NotFoundError),
        ("/etc", RequestError),
        ("/../etc/passwd", RequestError),
        ("models:/nothing@champion", NotFoundError),
    ],
)
async def test_names_that_mean_nothing(generator, home, random_base, name, error):
    finish_job(home, "failed", random_base, status="FAILED")
    with pytest.raises(error) as caught:
        await ask(generator, model=name)
    assert caught.value.field == "model"


def test_results_that_are_broken_or_just_deleted_are_no_models(home, random_base, monkeypatch):
    kept = finish_job(home, "kept", random_base)
    for job in ("broken", "deleted"):
        finish_job(home, job, random_base)
    (home / "runs/broken/result.json").write_text("{")
    glob = Path.glob

    def and_delete(path, pattern):
        found = list(glob(path, pattern))
        (home / "runs/deleted/result.json").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", and_delete)
    assert names_of_jobs(home) == [kept, "adapter:kept"]


async def test_a_path_must_lie_under_a_root(home, random_base, tmp_path):
    generator = make_generator(home, random_base)
    assert (await ask(generator, model=str(random_base))).model == str(random_base)
    link = home / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(RequestError, match="outside"):
        await ask(generator, model=str(link))
    generator.close()


async def test_a_registered_model_is_found_by_version_and_by_alias(generator, home, registered):
    from mlflow import MlflowClient

    version = registered.rpartition("/")[2]
    MlflowClient(f"sqlite:///{home}/mlflow.db").set_registered_model_alias("german", "champion", version)
    for name in (registered, "models:/german@champion"):
        assert (await ask(generator, model=name)).model == registered
    for name in (
        "models:/german/99",
        f"models:/german/{10**20}",
        f"models:/german/{2**31}",
        "models:/german@none",
        "models:/none/1",
        "models:/german/x",
    ):
        with pytest.raises(NotFoundError):
            await ask(generator, model=name)


@pytest.fixture
def registered(home: Path, random_base: Path) -> str:
    """The name of a version in MLflow's registry."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    client.create_registered_model("german")
    return f"models:/german/{client.create_model_version('german', source=str(random_base)).version}"


async def test_a_registry_that_hangs_holds_nothing_up(generator, home, random_base, registered, monkeypatch):
    finish_job(home, "one", random_base)
    await generator.deploy(DeployRequest(model=registered))
    await ready(generator)
    hangs = threading.Event()

    def hang(names, name):
        hangs.wait(30)
        raise UnavailableError("MLflow does not answer")

    monkeypatch.setattr(ModelNames, "_registered", hang)
    await asyncio.sleep(LOOK_S)
    named = [asyncio.create_task(ask(generator, model=registered)) for _ in range(40)]  # more than there are threads
    async with asyncio.timeout(25):
        for _ in range(3):
            assert (await ask(generator)).model == registered
            assert (await ask(generator, model="job:one")).model == "job:one"
    hangs.set()
    failures = await asyncio.gather(*named, return_exceptions=True)
    assert {type(failure) for failure in failures} == {UnavailableError}
    assert "MLflow" in (await deployed(generator, lambda deployment: deployment.reason is not None)).reason


async def test_a_registry_that_is_away_is_no_missing_model(home, monkeypatch):
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # set again by what is tested, and undone by monkeypatch
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    names = ModelNames(home, (home,), f"http://127.0.0.1:{port}")
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match="models:/german/1"):
        names.resolve("models:/german/1")
    assert time.monotonic() - begin < 20


async def test_deploying_switches_when_the_model_has_answered(generator, home, random_base, tmp_path):
    finish_job(home, "one", random_base, ended_at=1)
    finish_job(home, "two", shutil.copytree(random_base, tmp_path / "two"), ended_at=2)
    started = await generator.deploy(DeployRequest(model="job:one"))
    assert started.loading == "job:one"
    assert (await ready(generator)).model == "job:one"
    assert (await ask(generator)).model == "job:one", "chosen, though job:two is newer"
    assert json.loads((home / "deployment.json").read_text()) == {"model": "job:one"}

    again = make_generator(home)
    await again.start()
    assert (await ready(again)).model == "job:one"
    await again.deploy(DeployRequest(model="job:two"))
    await ready(again)
    again.close()
    await asyncio.sleep(LOOK_S)
    await ask(generator)
    await deployed(generator, lambda deployment: deployment.model == "job:two")  # what one was told, the others follow
    await generator.deploy(DeployRequest(model="job:one"))
    await ready(generator)

    await generator.deploy(DeployRequest(model="latest"))
    assert (await ready(generator)).model == "job:two"


async def test_a_request_during_the_first_deployment_does_not_undo_it(generator, home, random_base, tmp_path):
    finish_job(home, "older", random_base, ended_at=1)
    finish_job(home, "newer", shutil.copytree(random_base, tmp_path / "newer"), ended_at=2)
    await generator.deploy(DeployRequest(model="job:older"))
    assert (await ask(generator)).model == "job:older"
    assert (await ready(generator)).model == "job:older"
    assert json.loads((home / "deployment.json").read_text()) == {"model": "job:older"}


async def test_a_model_that_does_not_load_leaves_the_old_one(generator, home, random_base, tmp_path):
    finish_job(home, "good", random_base)
    await ask(generator)
    broken = shutil.copytree(random_base, tmp_path / "broken")
    for shard in broken.glob("*.safetensors"):
        shard.write_bytes(b"not a tensor")
    finish_job(home, "broken", broken, ended_at=2)
    await generator.deploy(DeployRequest(model="job:broken"))
    deployment = await ready(generator)
    assert (deployment.state, deployment.model) == ("ready", "job:good")
    assert "job:broken" in deployment.reason
    assert (await ask(generator)).model == "job:good"
    with pytest.raises(ModelError, match="cannot be loaded"):
        await ask(generator, model="job:broken")


async def test_a_model_that_computes_no_numbers_does_not_pass_its_probe(generator, home, random_base, tmp_path):
    """What a broken merge or a bad disk leaves: it loads, and every logit is NaN."""
    finish_job(home, "good", random_base)
    await ask(generator)
    broken = shutil.copytree(random_base, tmp_path / "broken")
    for path in broken.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
            save_file(tensors, path, metadata={"format": "pt"})
    finish_job(home, "broken", broken, ended_at=2)
    await generator.deploy(DeployRequest(model="job:broken"))
    deployment = await ready(generator)
    assert deployment.model == "job:good"
    assert "no numbers" in deployment.reason
    assert deployment.loaded == ["job:good"]
    assert not (home / "deployment.json").exists()
    assert (await ask(generator)).model == "job:good"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": 5}', '{"model": "job:x", "modle": 1}', "\x00"])
async def test_a_broken_choice_is_told_and_the_newest_does_not_stand_in(home, random_base, content):
    finish_job(home, "one", random_base)
    (home / "deployment.json").write_text(content)
    generator = make_generator(home)
    await generator.start()
    deployment = await generator.deployment()
    assert (deployment.state, deployment.model) == ("empty", None)
    assert "deployment.json is broken" in deployment.reason
    assert (await ask(generator, model="job:one")).model == "job:one"
    with pytest.raises(UnavailableError, match="broken"):
        await ask(generator)
    await generator.deploy(DeployRequest(model="job:one"))
    assert (await ready(generator)).reason is None
    assert (await ask(generator)).model == "job:one"
    generator.close()


async def test_a_choice_that_is_gone_leaves_what_answers(generator, home, random_base):
    finish_job(home, "one", random_base)
    await ask(generator)
    (home / "deployment.json").write_text('{"model": "job:gone"}')
    await asyncio.sleep(LOOK_S)
    assert (await ask(generator)).model == "job:one"
    assert "job" in (await deployed(generator, lambda deployment: deployment.reason is not None)).reason
    again = make_generator(home)
    await again.start()  # a replica that cannot be told what to load lives all the same
    with pytest.raises(UnavailableError, match="gone"):
        await ask(again)
    again.close()


async def test_a_busy_model_can_be_deployed_on_more_replicas(home, random_base):
    """Its probe finds the queue full, which is why more are asked for."""
    settings = dataclasses.replace(SETTINGS, max_sequences=1, max_waiting=1)
    generator = make_generator(home, settings=settings)
    finish_job(home, "one", random_base)
    await ask(generator)
    [model] = generator._pool._loaded.values()
    model.engine._batch.step = lambda: time.sleep(0.01)  # no answer ends
    busy = []
    async with asyncio.timeout(60):
        for is_there in (lambda: model.engine._batch.size, model.engine._waiting.qsize):  # one is answered, one waits
            busy.append(asyncio.create_task(ask(generator, max_new_tokens=3000)))
            while not is_there():
                await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError):
        await ask(generator, max_new_tokens=1)
    await generator.deploy(DeployRequest(model="job:one", replicas=4))
    deployment = await ready(generator)
    assert not any(task.done() for task in busy)
    assert (deployment.reason, deployment.autoscaling.max_replicas) == (None, 4)
    assert json.loads((home / "deployment.json").read_text()) == {"model": "job:one", "replicas": 4}
    generator.close()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_an_engine_that_is_not_there_leaves_what_answers(generator, home, random_base):
    finish_job(home, "one", random_base)
    await ask(generator)
    asked = await generator.deploy(DeployRequest(model="job:one", engine="vllm"))
    assert asked.loading == "job:one"
    deployment = await ready(generator)
    assert (deployment.model, deployment.engine) == ("job:one", None)
    assert "vLLM" in deployment.reason
    await generator.deploy(DeployRequest(model="job:one", engine="transformers", replicas=1))
    deployment = await ready(generator)
    assert (deployment.engine, deployment.autoscaling.max_replicas) == ("transformers", 1)
    assert json.loads((home / "deployment.json").read_text())["engine"] == "transformers"
    await ask(generator, model="job:one")
    assert len((await generator.deployment()).loaded) == 2, "the deployed one answers to its name: no third is loaded"


async def test_without_memory_for_two_the_old_one_leaves_first_and_no_request_fails(home, random_base, tmp_path):
    alive: set[str] = set()
    most = 0

    def load(source: ModelSource):
        nonlocal most
        model = load_served_model(source, SETTINGS)
        alive.add(source.name)
        most = max(most, len(alive))
        close, model.close = model.close, lambda: (alive.discard(source.name), close())
        return model

    names = ModelNames(home, (home,), f"sqlite:///{home}/mlflow.db")
    generator = Generator(names, load, fits=lambda source: not alive, state_file=home / "deployment.json")
    finish_job(home, "one", random_base)
    finish_job(home, "two", shutil.copytree(random_base, tmp_path / "two"))
    finish_job(home, "bad", shutil.copytree(random_base, tmp_path / "bad"))
    next((tmp_path / "bad").glob("*.safetensors")).write_bytes(b"")
    await generator.deploy(DeployRequest(model="job:one"))
    await ready(generator)
    answered: list[str] = []
    over = False

    async def client() -> None:
        while not over:
            answered.append((await ask(generator, max_new_tokens=20)).model)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    for model, then in (("job:two", "job:two"), ("job:bad", "job:two"), ("job:one", "job:one")):
        await asyncio.sleep(0.3)
        await generator.deploy(DeployRequest(model=model))
        assert (await ready(generator)).model == then
    over = True
    await asyncio.wait_for(asyncio.gather(*clients), timeout=60)
    assert set(answered) == {"job:one", "job:two"}
    assert most == 1
    generator.close()


async def test_a_choice_that_cannot_be_kept_is_told(generator, home, random_base):
    finish_job(home, "one", random_base)
    await ask(generator)
    (home / "deployment.json").mkdir()  # no file can take its place
    await generator.deploy(DeployRequest(model="job:one"))
    deployment = await ready(generator)
    assert (deployment.state, deployment.model) == ("ready", "job:one")
    assert "IsADirectoryError" in deployment.reason
    (home / "deployment.json").rmdir()
    await generator.deploy(DeployRequest(model="job:one"))
    assert (await ready(generator)).reason is None
    assert (await ask(generator)).model == "job:one"


async def test_a_probe_that_fails_in_any_way_is_told(generator, home, random_base, monkeypatch):
    finish_job(home, "one", random_base)

    async def probe(model, adapter=None):
        raise RuntimeError("CUDA error: device-side assert triggered")

    await ask(generator)
    monkeypatch.setattr(ServedModel, "probe", probe)
    await generator.deploy(DeployRequest(model="job:one", replicas=1))
    deployment = await ready(generator)
    assert (deployment.state, deployment.model) == ("ready", "job:one")
    assert "device-side assert" in deployment.reason


async def test_a_closed_model_is_gone_when_memory_is_measured_next(random_base, tmp_path):
    held: list[weakref.ref] = []

    def load(source: ModelSource):
        model = load_served_model(source, SETTINGS)
        held.append(weakref.ref(model.engine._batch._model))
        return model

    def fits(source: ModelSource) -> bool:
        gc.collect()
        return sum(model() is not None for model in held) < 2

    pool = ModelPool(load, fits=fits, capacity=3)
    one, two, three = (ModelSource(name, shutil.copytree(random_base, tmp_path / name)) for name in "abc")

    async def use(source: ModelSource) -> None:
        async with pool.lease(source):
            pass

    async with pool.lease(one):
        await use(two)
        third = asyncio.create_task(use(three))
        await asyncio.sleep(0.2)
    await third
    assert pool.names == ["c", "b"], "one had to leave, and no more"
    pool.close()


async def test_a_first_model_that_does_not_load_is_unavailable(generator, home, random_base, tmp_path):
    broken = shutil.copytree(random_base, tmp_path / "broken")
    next(broken.glob("*.safetensors")).unlink()
    finish_job(home, "broken", broken)
    with pytest.raises(UnavailableError, match="job:broken"):
        await ask(generator)
    assert (await generator.deployment()).state == "failed"


async def test_a_swap_fails_no_request(home, random_base, tmp_path):
    generator = make_generator(home, max_models=1)
    finish_job(home, "one", random_base)
    finish_job(home, "two", shutil.copytree(random_base, tmp_path / "two"))
    await generator.deploy(DeployRequest(model="job:one"))
    await ready(generator)
    answered: list[str] = []

    async def client() -> None:
        while "job:two" not in answered:
            answered.append((await ask(generator, max_new_tokens=40)).model)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(0.2)
    await generator.deploy(DeployRequest(model="job:two"))
    await asyncio.wait_for(asyncio.gather(*clients), timeout=60)
    assert set(answered) == {"job:one", "job:two"}
    assert (await generator.deployment()).loaded == ["job:two"]
    generator.close()


async def test_the_least_recently_used_model_leaves_and_comes_back(home, random_base, tmp_path):
    generator = make_generator(home, max_models=2)
    for name in ("a", "b", "c"):
        finish_job(home, name, shutil.copytree(random_base, tmp_path / name))
    for name in ("a", "b", "a", "c"):
        assert (await ask(generator, model=f"job:{name}")).model == f"job:{name}"
    assert (await generator.deployment()).loaded == ["job:c", "job:a"]
    assert (await ask(generator, model="job:b")).model == "job:b"
    generator.close()


async def test_a_model_is_loaded_once_for_all_who_wait(home, random_base):
    loads = []

    def load(source: ModelSource):
        loads.append(source)
        return load_served_model(source, SETTINGS)

    pool = ModelPool(load)
    source = ModelSource("job:x", random_base)

    async def use() -> str:
        async with pool.lease(source) as model:
            return model.name

    assert await asyncio.gather(*(use() for _ in range(5))) == ["job:x"] * 5
    assert len(loads) == 1
    pool.close()


async def test_a_model_in_use_is_closed_after_its_last_answer(home, random_base, tmp_path):
    generator = make_generator(home, max_models=1)
    finish_job(home, "one", random_base)
    finish_job(home, "two", shutil.copytree(random_base, tmp_path / "two"))
    request = GenerateRequest(prompt="Hi", model="job:one", max_new_tokens=200, temperature=1, seed=3, stream=True)
    stream = generator.generate(request)
    await anext(stream)
    assert (await ask(generator, model="job:two")).model == "job:two"
    last = [event async for event in stream][-1]
    assert last.model == "job:one"
    assert isinstance(last, GenerateAnswer)
    generator.close()


async def test_a_load_that_takes_too_long_is_unavailable_and_goes_on(home, random_base):
    def slow(source: ModelSource):
        time.sleep(0.5)
        return load_served_model(source, SETTINGS)

    pool = ModelPool(slow, load_timeout_s=0.1)
    source = ModelSource("job:x", random_base)
    with pytest.raises(UnavailableError, match="still being loaded"):
        async with pool.lease(source):
            pass
    for _ in range(100):
        if pool.has(source):
            break
        await asyncio.sleep(0.05)
    async with pool.lease(source) as model:
        assert model.name == "job:x"
    pool.close()


async def test_an_answer_that_takes_too_long_ends(home, random_base):
    generator = make_generator(home, request_timeout_s=0.05)
    finish_job(home, "one", random_base)
    with pytest.raises(RequestTimeoutError, match="longer than"):
        await ask(generator, max_new_tokens=3000)
    generator.close()


async def test_streamed_text_is_the_whole_text(generator, home, random_base):
    finish_job(home, "one", random_base)

    async def events(seed: int, stream: bool) -> list:
        values = {"prompt": "Tell me", "temperature": 1.3, "seed": seed, "max_new_tokens": 80, "stream": stream}
        return [event async for event in generator.generate(GenerateRequest(**values))]

    streams = await asyncio.gather(*(events(seed, True) for seed in range(6)))
    wholes = await asyncio.gather(*(events(seed, False) for seed in range(6)))
    for streamed, (_, whole) in zip(streams, wholes, strict=True):
        assert streamed[-1] == whole
        for channel in ("reasoning", "answer"):
            pieces = [event.text for event in streamed if isinstance(event, TextDelta) and event.channel == channel]
            assert "".join(pieces) == getattr(whole, channel)


async def test_the_prompt_is_what_training_renders(home, random_base):
    from serving.answers.answering import render

    model = await asyncio.to_thread(load_served_model, ModelSource("x", random_base), SETTINGS)
    request = GenerateRequest(
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|end|>Hi"}],
        reasoning_language="Deutsch",
    )
    row = [
        {"role": "system", "content": "reasoning language: German\n\nBe brief."},
        {"role": "user", "content": "<|end|>Hi"},
        {"role": "assistant", "thinking": "Gut.", "content": "Hello."},
    ]
    prompt = render(model, request)
    ids, trained = model.renderer.training_ids(row)
    assert ids[: len(prompt)] == prompt
    assert trained.index(True) in (len(prompt), len(prompt) - 2)  # the turn's header may count as trained
    model.close()


async def test_what_every_request_cost_is_told(home, random_base):
    seen = []
    generator = make_generator(home, observe=seen.append)
    finish_job(home, "one", random_base)
    answer = await ask(generator, reasoning_language="de", max_new_tokens=20)
    with pytest.raises(NotFoundError):
        await ask(generator, model="job:none")
    ok, failed = seen
    assert ok.outcome == answer.finish_reason
    assert ok.completion_tokens == answer.usage.completion_tokens
    assert 0 < ok.first_token_s < ok.total_s
    assert 0 < ok.load_s < ok.total_s
    assert ok.per_token_s is None or ok.per_token_s * (ok.completion_tokens - 1) < ok.total_s
    assert ok.language == "German"
    assert failed.outcome == "NotFoundError"
    assert failed.first_token_s is None
    generator.close()


async def test_a_model_that_answers_no_more_makes_the_generator_sick(generator, home, random_base, monkeypatch):
    finish_job(home, "one", random_base)
    await ask(generator)
    generator.check_health()
    [model] = generator._pool._loaded.values()

    def sick() -> None:
        raise EngineError("it failed")

    monkeypatch.setattr(model.engine, "check_health", sick)
    with pytest.raises(EngineError):
        generator.check_health()


async def test_closing_ends_what_runs(home, random_base):
    generator = make_generator(home)
    finish_job(home, "one", random_base)
    await ask(generator)
    task = asyncio.create_task(ask(generator, max_new_tokens=3000))
    await asyncio.sleep(0.2)
    generator.close()
    with pytest.raises(EngineError):
        await task
