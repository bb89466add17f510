"""What is forgotten, and what never is."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_app.queue.retention import Retention
from ray_app.queue.store import SqlStore
from serving.errors import RequestError, UnavailableError
from serving.jobs import JobFilter, JobRecord, JobStatus, NewJob
from serving.models.names import ModelNames
from training.config import parse_config
from training.durable.run_mirror import RunMirror
from training.run_dir import Phase, RunDir

CONFIG = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}}).resolved()


@pytest.fixture
def store(database_url: str, home: Path) -> Iterator[SqlStore]:
    store = SqlStore(database_url, str(home / "runs"))
    yield store
    store.close()


@pytest.fixture
def ended(store: SqlStore, home: Path) -> Callable[..., str]:
    """Makes a job that has ended, with a run directory and a model."""

    def make(status: JobStatus = JobStatus.SUCCEEDED, ended_at: float | None = None) -> str:
        job = store.submit(NewJob("demo", CONFIG), key=f"key-{store.count()}", body_hash="h")
        claimed = store.claim(job, stale_result_at=None)
        assert claimed
        run_dir = RunDir.create(job.run_dir, CONFIG)
        model = home / "models" / job.id
        model.mkdir(parents=True)
        if status is JobStatus.SUCCEEDED:
            run_dir.write_result(Phase.SUCCEEDED, model=str(model))
        when = {} if ended_at is None else {"ended_at": ended_at}
        assert store.move(claimed, status, result={"model": str(model)}, **when)
        return job.id

    return make


def sweep(store: SqlStore, home: Path, keep: int = 100, registered: tuple[str, ...] = ()) -> list[str]:
    names = ModelNames(home, (home,), "")
    return Retention(store, names, keep, 30, lambda job: job.id in registered).sweep()


def test_the_newest_are_kept_with_all_they_left(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    ids = [ended(JobStatus.FAILED) for _ in range(4)]
    waiting = store.submit(NewJob("demo", CONFIG)).id
    assert sweep(store, home, keep=2) == ids[:2]
    assert [job.id for job in store.list_jobs(JobFilter())] == [waiting, ids[3], ids[2]]
    assert {path.name for path in (home / "runs").iterdir()} == {path.name for path in (home / "models").iterdir()}
    assert {path.name for path in (home / "models").iterdir()} == set(ids[2:])
    assert store.recall("jobs", "key-0", "h") is None
    assert store.recall("jobs", "key-3", "h") == {"id": ids[3]}


def test_the_old_are_forgotten(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    old, new = ended(JobStatus.CANCELLED, ended_at=1000.0), ended(JobStatus.CANCELLED)
    assert sweep(store, home) == [old]
    assert store.get(new)


def test_copies_go_with_their_runs(store: SqlStore, home: Path, tmp_path: Path, ended: Callable[..., str]) -> None:
    ids = [ended(JobStatus.FAILED) for _ in range(2)]
    url = (tmp_path / "bucket").as_uri()
    for job_id in ids:
        RunMirror(RunDir(home / "runs" / job_id), url).push_outcome()
    Retention(store, ModelNames(home, (home,), ""), 1, 30, lambda job: False, url).sweep()
    assert [path.name for path in (tmp_path / "bucket" / "runs").iterdir()] == [ids[1]]


def test_a_registered_model_is_kept_for_ever(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    first, second, _ = (ended() for _ in range(3))
    assert sweep(store, home, keep=1, registered=(first,)) == [second]
    assert (home / "models" / first).is_dir()


@pytest.mark.parametrize("chosen", ["job:{}", "path", "latest"])
def test_a_deployed_model_is_kept(store: SqlStore, home: Path, ended: Callable[..., str], chosen: str) -> None:
    first, second = ended(), ended()
    ended(JobStatus.FAILED)
    deployed = second if chosen == "latest" else first
    name = str(home / "models" / first) if chosen == "path" else chosen.format(first)
    (home / "deployment.json").write_text(json.dumps({"model": name}))
    for model in (home / "models").iterdir():
        (model / "config.json").write_text("{}")
    assert sweep(store, home, keep=1) == [first if deployed == second else second]
    assert (home / "models" / deployed).is_dir()


def test_the_job_of_a_deployed_adapter_is_kept(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    """Its directory is the base's, which is not here: the name must do."""
    first, second, _ = (ended() for _ in range(3))
    (home / "deployment.json").write_text(json.dumps({"model": f"adapter:{first}"}))
    assert sweep(store, home, keep=1) == [second]
    assert (home / "runs" / first).is_dir()


def test_the_base_of_a_deployed_adapter_is_kept(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    first, second = ended(), ended()
    on_first = {"model": {"path": str(home / "models" / first)}, "data": {"path": "a/c"}}
    job = store.submit(NewJob("demo", parse_config(on_first)))
    assert store.move(job, JobStatus.CANCELLED)
    (home / "deployment.json").write_text(json.dumps({"model": f"adapter:{job.id}"}))
    assert sweep(store, home, keep=1) == [second]
    assert (home / "models" / first).is_dir()


@pytest.mark.parametrize(
    ("chosen", "error"), [("models:/german@champion", UnavailableError), ("/elsewhere", RequestError)]
)
def test_while_it_cannot_be_told_what_is_deployed_all_is_kept(
    store: SqlStore,
    home: Path,
    ended: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    error: type[Exception],
) -> None:
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    ids = {ended() for _ in range(3)}
    (home / "deployment.json").write_text(json.dumps({"model": chosen}))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        names = ModelNames(home, (home,), f"http://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(error):
        Retention(store, names, 1, 30, lambda job: False).sweep()
    assert {job.id for job in store.list_jobs(JobFilter())} == ids
    assert {path.name for path in (home / "models").iterdir()} == ids


def test_a_model_that_is_gone_keeps_nothing(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    first, _ = ended(), ended()
    (home / "deployment.json").write_text(json.dumps({"model": "job:none"}))
    assert sweep(store, home, keep=1) == [first]


def test_a_model_deployed_during_the_sweep_is_kept(store: SqlStore, home: Path, ended: Callable[..., str]) -> None:
    first, second, _ = (ended() for _ in range(3))

    def slow(job: JobRecord) -> bool:
        (home / "deployment.json").write_text(json.dumps({"model": f"job:{first}"}))
        return False

    assert Retention(store, ModelNames(home, (home,), ""), 1, 30, slow).sweep() == [second]


def test_a_job_whose_registry_does_not_answer_is_kept_and_holds_up_no_other(
    store: SqlStore, home: Path, ended: Callable[..., str]
) -> None:
    first, second, _ = (ended() for _ in range(3))

    def away(job: JobRecord) -> bool:
        if job.id == first:
            raise ConnectionError("no registry")
        return False

    assert Retention(store, ModelNames(home, (home,), ""), 1, 30, away).sweep() == [second]
    assert (home / "models" / first).is_dir()


def test_what_lies_outside_of_the_home_is_not_ours_to_delete(store: SqlStore, home: Path, tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "theirs" / "run", CONFIG)
    model = tmp_path / "theirs" / "model"
    model.mkdir()
    job = store.adopt("raysubmit_1", str(run_dir.root), CONFIG, 1000.0)
    assert job
    assert store.move(job, JobStatus.SUCCEEDED, result={"model": str(model)}, ended_at=1000.0)
    assert sweep(store, home) == [job.id]
    assert run_dir.config_path.exists()
    assert model.exists()
