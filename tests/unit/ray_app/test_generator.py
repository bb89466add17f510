"""The generator under Ray Serve: one small application, and everything that crosses its handle."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from ray import serve

from ray_app.cluster.processes import free_ports
from ray_app.generator.deployment import GeneratorReplica, RemoteGenerator, generator_app
from ray_app.generator.settings import GeneratorSettings
from serving.deployment import DEPLOYMENT_FILE
from serving.engines.engine import EngineError
from serving.errors import install_error_handlers
from serving.models.names import ModelNames
from serving.routes.generate import generate_router
from serving.routes.openai import openai_router
from tests.unit.serving.served import events_of, finish_job


@serve.deployment
@serve.ingress()
class Api:
    def __init__(self, generator, home: Path):
        self.generator = RemoteGenerator(generator, GeneratorSettings(), home / DEPLOYMENT_FILE)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI()
        install_error_handlers(app)
        app.include_router(generate_router(self.generator))
        app.include_router(openai_router(self.generator))
        return app


@pytest.fixture(scope="module")
def service(ray_cluster, random_base: Path, tmp_path_factory):
    """URL of the service, and its home with a finished job `one`."""
    home = tmp_path_factory.mktemp("home")
    finish_job(home, "one", random_base)
    names = ModelNames(home, (home,), f"sqlite:///{home}/mlflow.db")
    [port] = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Api.bind(generator_app(names, GeneratorSettings(), {"num_cpus": 0}), home), name="test-generator")
    yield f"http://127.0.0.1:{port}", home
    serve.delete("test-generator")
    serve.shutdown()


@pytest.fixture
def client(service):
    with httpx.Client(base_url=service[0], timeout=60, trust_env=False) as client:
        yield client


def generate(client, **body) -> httpx.Response:
    return client.post("/generate", json={"prompt": "Hi", "temperature": 1.2, "seed": 3, "max_new_tokens": 40} | body)


def test_serve_hears_that_a_replica_answers_no_more():
    class Sick:
        def check_health(self):
            raise EngineError("it failed")

    with pytest.raises(EngineError):
        asyncio.run(GeneratorReplica.func_or_class.check_health(SimpleNamespace(generator=Sick())))


def test_whole_and_streamed_answers_are_the_same(client):
    whole = generate(client, reasoning_language="de")
    assert whole.status_code == 200, whole.text
    assert whole.json()["model"] == "job:one"
    events = events_of(generate(client, reasoning_language="de", stream=True).text)
    assert events[-1] == ("done", whole.json())
    deployment = client.get("/deployment").json()
    assert (deployment["state"], deployment["model"]) == ("ready", "job:one")


def test_errors_keep_their_status_and_fields(client):
    for body, status, field in (
        ({"model": "job:none"}, 404, "model"),
        ({"model": "/etc"}, 422, "model"),
        ({"max_new_tokens": 900_000}, 422, "max_new_tokens"),
        ({"reasoning_language": "Germn"}, 422, "reasoning_language"),
    ):
        response = generate(client, **body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["field"] == field
    chat = client.post("/v1/chat/completions", json={"model": "x", "messages": [{"role": "user", "content": "Hi"}]})
    assert chat.status_code == 404
    assert chat.json()["error"]["param"] == "model"
    assert client.put("/deployment", json={"model": "job:none"}).status_code == 404


def test_the_service_answers_while_a_model_generates(client):
    thread = threading.Thread(target=generate, args=(client,), kwargs={"max_new_tokens": 600})
    thread.start()
    worst = 0.0
    while thread.is_alive():
        started = time.monotonic()
        assert client.get("/deployment").status_code == 200
        worst = max(worst, time.monotonic() - started)
    assert worst < 1


def test_generation_ends_within_2_s_of_the_client(client, service):
    body = {"prompt": "Hi", "temperature": 0, "max_new_tokens": 3500, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    gone = time.monotonic()
    while client.get("/deployment").json()["running"]:
        assert time.monotonic() - gone < 2
        time.sleep(0.05)


def test_figures_are_exported(client):
    import ray

    [node] = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    assert generate(client, reasoning_language="de").status_code == 200
    wanted = (
        "requests_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "reasoning_language_total",
    )
    for _ in range(60):
        text = httpx.get(url, timeout=10, trust_env=False).text
        if all(f"ray_polythink_{name}" in text for name in wanted):
            return
        time.sleep(0.5)
    raise AssertionError([line for line in text.splitlines() if "polythink" in line])


def test_a_deployment_survives_its_replica(client, service):
    _, home = service
    assert client.put("/deployment", json={"model": "job:one"}).status_code == 202
    while client.get("/deployment").json()["loading"]:
        time.sleep(0.05)
    assert json.loads((home / "deployment.json").read_text()) == {"model": "job:one"}


def test_swaps_under_load_fail_no_request(client, service):
    """Clients that never pause, streaming and not, while what answers is swapped; the last choice does not load."""
    _, home = service
    for name in ("two", "bad"):
        finish_job(home, name, shutil.copytree(finished_model(home, "one"), home / name))
    next((home / "bad").glob("*.safetensors")).write_bytes(b"no tensors")
    over = threading.Event()
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        while not over.is_set():
            answers.append(generate(client, stream=stream))

    clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for name, then in (("job:two", "job:two"), ("job:one", "job:one"), ("job:two", "job:two"), ("job:bad", "job:two")):
        assert client.put("/deployment", json={"model": name}).status_code == 202
        while (deployment := client.get("/deployment").json())["loading"]:
            time.sleep(0.1)
        assert deployment["model"] == then
    over.set()
    for thread in clients:
        thread.join()
    assert "job:bad" in deployment["reason"]
    assert [answer.text for answer in answers if answer.status_code != 200 or "event: error" in answer.text] == []
    assert {"job:one", "job:two"} <= {name for name in ("job:one", "job:two") for a in answers if name in a.text}


def finished_model(home: Path, job_id: str) -> str:
    return json.loads((home / "runs" / job_id / "result.json").read_text())["model"]
