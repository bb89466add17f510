"""How many replicas the generator has: the policy by itself, and under Serve from none to two and back."""

import asyncio
import json
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from ray_app.cluster.processes import free_ports
from ray_app.generator import scaling
from ray_app.generator.deployment import RemoteGenerator, generator_app
from ray_app.generator.scaling import ChosenBounds, check_scale
from ray_app.generator.settings import GeneratorSettings
from serving.deployment import DEPLOYMENT_FILE, Autoscaling, DeployRequest
from serving.errors import RequestError, install_error_handlers
from serving.models.names import ModelNames
from serving.routes.generate import generate_router
from serving.routes.openai import openai_router
from tests.unit.serving.served import finish_job


def context(replicas: int, requests: float) -> AutoscalingContext:
    """What Serve tells a policy."""
    return AutoscalingContext(
        deployment_id=None,
        app_name=None,
        total_queued_requests=None,
        aggregated_metrics=None,
        raw_metrics=None,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        deployment_name="generator",
        current_num_replicas=replicas,
        target_num_replicas=replicas,
        running_replicas=[],
        total_num_requests=requests,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        config=AutoscalingConfig(min_replicas=0, max_replicas=8, target_ongoing_requests=4),
    )


@pytest.mark.parametrize(
    ("chosen", "busy", "idle"),
    [
        (None, 3, 1),
        ({}, 3, 1),
        ({"replicas": 2}, 2, 2),
        ({"autoscaling": {"min_replicas": 0, "max_replicas": 5}}, 5, 0),
    ],
)
def test_replicas_follow_the_load_between_the_bounds_asked_for(tmp_path, chosen, busy, idle):
    file = tmp_path / DEPLOYMENT_FILE
    policy = ChosenBounds(str(file), low=1, high=3)
    if chosen is not None:
        file.write_text(json.dumps({"model": "job:x"} | chosen))
    assert policy(context(replicas=2, requests=100))[0] == busy
    assert policy(context(replicas=1, requests=0))[0] == idle


def test_a_broken_file_leaves_the_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "LOOK_S", -1.0)
    file = tmp_path / DEPLOYMENT_FILE
    policy = ChosenBounds(str(file), low=1, high=3)
    file.write_text('{"model": "job:x", "replicas": 2}')
    assert policy(context(1, 0))[0] == 2
    file.write_text("{")
    assert policy(context(1, 0))[0] == 2


@pytest.mark.parametrize(
    ("request_", "settings", "field"),
    [
        (DeployRequest(model="x", replicas=3), GeneratorSettings(max_replicas=2), "replicas"),
        (DeployRequest(model="x", autoscaling=Autoscaling(max_replicas=3)), GeneratorSettings(), "autoscaling"),
        (DeployRequest(model="x", replicas=1), GeneratorSettings(num_gpus=1, min_replicas=0), "replicas"),
    ],
)
def test_more_than_there_may_be_is_refused(request_, settings, field):
    with pytest.raises(RequestError) as caught:
        check_scale(request_, settings)
    assert caught.value.field == field
    assert "POLYTHINK_GENERATOR__M" in caught.value.hint
    check_scale(DeployRequest(model="x"), settings)


@serve.deployment
@serve.ingress()
class Api:
    def __init__(self, generator, settings: GeneratorSettings, state_file: Path):
        self.generator = RemoteGenerator(generator, settings, state_file)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = FastAPI()
        install_error_handlers(app)
        app.include_router(generate_router(self.generator))
        app.include_router(openai_router(self.generator))
        return app


@pytest.fixture
def client(ray_cluster, home: Path, random_base: Path):
    finish_job(home, "one", random_base)
    settings = GeneratorSettings(min_replicas=0, max_replicas=2, idle_s=3)
    names = ModelNames(home, (home,), f"sqlite:///{home}/mlflow.db")
    [port] = free_ports(1)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    generator = generator_app(names, settings, {"num_cpus": 0})
    serve.run(Api.bind(generator, settings, home / DEPLOYMENT_FILE), name="scaling")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        yield client
    serve.delete("scaling")
    serve.shutdown()


class NoReplicas(RemoteGenerator):
    """Of which none runs; asking one fails, as its handle is none."""

    def _replica_states(self):
        return {}


def test_asking_for_models_starts_no_replica(home, random_base):
    finish_job(home, "one", random_base)
    generator = NoReplicas(Mock(spec=["options"]), GeneratorSettings(), home / DEPLOYMENT_FILE)
    assert asyncio.run(generator.models()) == ["job:one", "adapter:one"]


def wait_for(client: httpx.Client, replicas: int, timeout_s: float = 150) -> dict:
    deadline = time.monotonic() + timeout_s
    while (deployment := client.get("/deployment").json())["replicas"] != replicas:
        assert time.monotonic() < deadline, deployment
        time.sleep(0.2)
    return deployment


def timing_ms(response: httpx.Response) -> dict[str, float]:
    assert response.status_code == 200, response.text
    parts = (part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    return {name: float(value) for name, value in parts}


@pytest.mark.slow  # 90 s: Serve looks back 30 s before it lets a replica go
def test_from_none_to_two_and_back(client, home):
    """A cold start shows in the response's headers; asking how the generator is starts none."""
    body = {"prompt": "Hi", "max_new_tokens": 4}
    for _ in range(3):
        assert client.get("/deployment").json()["replicas"] == 0
        assert {"id": "job:one"}.items() <= client.get("/v1/models").json()["data"][1].items()
    cold = timing_ms(client.post("/generate", json=body))
    warm = timing_ms(client.post("/generate", json=body))
    assert cold["replica"] > 500 > warm["replica"]
    assert cold["load"] > 50 > warm["load"]
    assert client.get("/deployment").json()["state"] == "ready"

    refused = client.put("/deployment", json={"model": "job:one", "replicas": 3})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "replicas")
    assert client.put("/deployment", json={"model": "job:one", "replicas": 2}).status_code == 202
    deployment = wait_for(client, 2)
    assert deployment["autoscaling"] == {"min_replicas": 2, "max_replicas": 2}
    for _ in range(8):  # both replicas answer
        assert client.post("/generate", json=body).status_code == 200
    scaled = {"model": "job:one", "autoscaling": {"min_replicas": 0, "max_replicas": 1}}
    assert client.put("/deployment", json=scaled).status_code == 202
    idle = wait_for(client, 0)
    assert (idle["state"], idle["model"]) == ("idle", "job:one")
