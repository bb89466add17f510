"""Faults of real training: two workers on two Ray nodes train, merge, prove and evaluate a small model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.drivers import write_job
from tests.integration.faults.invariants import Outcome
from tests.integration.faults.kinds import TRAINING, Fault, parameters
from tests.integration.faults.play import Kind, play
from tests.integration.service import Service, running
from training.run_dir import RunDir

STEPS = 40


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("training")
    with running(home, POLYTHINK_DATA_ROOTS=str(home.parent), RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5") as service:
        service.add_node()
        yield service


@pytest.fixture(scope="module")
def kind(service: Service, tmp_path_factory: pytest.TempPathFactory, random_base: Path) -> Kind:
    directory = tmp_path_factory.mktemp("job")
    job = write_job(
        directory,
        random_base,
        data={"path": str(directory / "rows.jsonl"), "held_out_path": str(directory / "held_out.jsonl")},
        optim={"max_steps": STEPS},
        scaling={"placement": "SPREAD", "max_failures": 3},
        evaluation={"prompts": 2, "languages": ["de"], "max_new_tokens": 8},
    )

    def faulty(run_dir: RunDir, job: dict[str, Any]) -> tuple[int, int]:
        result = run_dir.result() or {}
        steps = {line["step"] for line in run_dir.metrics()}
        client = MlflowClient(service.cluster.mlflow_url)
        versions = client.search_model_versions(f"run_id = '{result.get('mlflow_run_id')}'")
        assert versions or job["status"] != "SUCCEEDED"
        return STEPS - len(steps), max(0, len(versions) - 1)

    return Kind({"config": json.loads(job.read_text()), "max_preemptions": 5}, faulty, '"registration"', end_s=420)


@pytest.mark.parametrize("fault", parameters(TRAINING))
@pytest.mark.timeout(900)
def test_training_survives(fault: Fault, service: Service, kind: Kind, outcomes: list[Outcome]) -> None:
    play(fault, service, outcomes, kind)
