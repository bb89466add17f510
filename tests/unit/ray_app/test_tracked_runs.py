"""Runs in a real MLflow store: ended for drivers that could not, and found again in the registry."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from ray_app.queue.store import SqlStore
from ray_app.queue.tracked_runs import TrackedRuns
from serving.jobs import JobRecord, JobStatus, NewJob
from training.config import parse_config
from training.tracking.run import JOB_TAG

CONFIG = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}}).resolved()


@pytest.fixture
def store(home: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{home / 'jobs.db'}", str(home / "runs"))
    yield store
    store.close()


def cancelled(store: SqlStore) -> JobRecord:
    """A job whose driver was killed."""
    job = store.submit(NewJob("demo", CONFIG))
    claimed = store.claim(job, stale_result_at=None)
    assert claimed
    assert store.move(claimed, JobStatus.CANCELLED, tracking_due="KILLED")
    return claimed


def due(store: SqlStore) -> list[str]:
    return [job.id for job in store.tracking_due()]


def test_runs_that_were_left_running_are_ended_and_no_others(store: SqlStore, home: Path) -> None:
    uri = f"sqlite:///{home / 'mlflow.db'}"
    client = MlflowClient(uri)
    experiment = client.create_experiment(CONFIG.tracking.experiment)
    job = cancelled(store)
    left, ended = (client.create_run(experiment, tags={JOB_TAG: job.id}).info.run_id for _ in range(2))
    client.set_terminated(ended, "FAILED")
    others = client.create_run(experiment, tags={JOB_TAG: "job-other"}).info.run_id
    runs = TrackedRuns(store, uri)
    runs.settle()
    assert [client.get_run(run_id).info.status for run_id in (left, ended, others)] == ["KILLED", "FAILED", "RUNNING"]
    assert due(store) == []
    assert not runs.is_registered(job)
    client.create_registered_model("demo")
    client.create_model_version("demo", str(home), left)
    assert runs.is_registered(job)


def test_a_run_that_a_resumed_attempt_has_reopened_goes_on(
    store: SqlStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{home / 'mlflow.db'}"
    client = MlflowClient(uri)
    job = cancelled(store)
    run = client.create_run(client.create_experiment(CONFIG.tracking.experiment), tags={JOB_TAG: job.id})
    listed = store.tracking_due()
    store.resume(job.id)
    monkeypatch.setattr(store, "tracking_due", lambda: listed)  # by a round that was slow
    TrackedRuns(store, uri).settle()
    assert client.get_run(run.info.run_id).info.status == "RUNNING"


def test_a_store_that_is_away_is_asked_again(store: SqlStore, home: Path) -> None:
    job = cancelled(store)
    TrackedRuns(store, "http://127.0.0.1:9").settle()  # nobody listens on the discard port
    assert due(store) == [job.id]
    TrackedRuns(store, f"sqlite:///{home / 'mlflow.db'}").settle()  # no driver ever made it
    assert due(store) == []
