"""The job store on a real database: what clients ask of it, and what only one of two callers may win."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_app.queue.store import SqlStore
from serving.errors import ConflictError
from serving.jobs import JobFilter, JobStatus, NewJob
from training.config import TrainConfig, parse_config


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(database_url, str(tmp_path / "runs"))
    yield store
    store.close()


@pytest.fixture
def config() -> TrainConfig:
    values = {"model": {"path": "acme/base"}, "data": {"path": "acme/rows"}, "scaling": {"device": "cpu"}}
    return parse_config(values).resolved()


def test_a_job_comes_back_as_it_was_submitted(store: SqlStore, config: TrainConfig) -> None:
    job = store.submit(NewJob("demo", config, plan={"gpu_gib": 1}, priority=3, queue_timeout_s=60, max_preemptions=1))
    assert store.get(job.id) == job
    assert (job.status, job.attempt, job.priority, job.queue_timeout_s) == (JobStatus.QUEUED, 0, 3, 60)
    assert job.train_config == config
    assert job.plan == {"gpu_gib": 1}
    assert Path(job.run_dir).name == job.id
    assert store.get("job-unknown") is None


def test_pages_follow_each_other_newest_first(store: SqlStore, config: TrainConfig) -> None:
    ids = [store.submit(NewJob(f"n{i % 2}", config)).id for i in range(5)][::-1]
    first = store.list_jobs(JobFilter(limit=2))
    rest = store.list_jobs(JobFilter(limit=10, before=first[-1].seq))
    assert [job.id for job in first + rest] == ids
    assert [job.id for job in store.list_jobs(JobFilter(name="n1"))] == [ids[1], ids[3]]
    store.request_cancel(ids[0])
    assert [job.id for job in store.list_jobs(JobFilter(statuses=(JobStatus.CANCELLED,)))] == [ids[0]]


def test_one_key_makes_one_job_however_many_send_it_at_once(store: SqlStore, config: TrainConfig) -> None:
    barrier = threading.Barrier(16)
    ids: list[str] = []

    def submit() -> None:
        barrier.wait()
        ids.append(store.submit(NewJob("demo", config), "key-1", "hash").id)

    threads = [threading.Thread(target=submit) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 16
    assert len(set(ids)) == 1
    assert len(store.list_jobs(JobFilter())) == 1
    with pytest.raises(ConflictError, match="another body"):
        store.submit(NewJob("demo", config), "key-1", "other hash")


def test_of_many_claims_one_wins(store: SqlStore, config: TrainConfig) -> None:
    job = store.submit(NewJob("demo", config))
    barrier = threading.Barrier(8)
    won: list[object] = []

    def claim() -> None:
        barrier.wait()
        won.append(store.claim(job, stale_result_at=None))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 8
    assert sum(claimed is not None for claimed in won) == 1
    claimed = store.get(job.id)
    assert claimed is not None
    assert (claimed.status, claimed.attempt, claimed.ray_job_id) == (JobStatus.STARTING, 1, job.id)


def test_a_change_on_old_knowledge_is_refused(store: SqlStore, config: TrainConfig) -> None:
    queued = store.submit(NewJob("demo", config))
    claimed = store.claim(queued, stale_result_at=None)
    assert claimed is not None
    assert not store.note(queued, status_reason="late")
    assert not store.move(queued, JobStatus.CANCELLED)
    assert store.get(queued.id) == claimed
    assert store.move(claimed, JobStatus.SUCCEEDED)
    done = store.get(queued.id)
    assert done is not None
    with pytest.raises(AssertionError, match="SUCCEEDED -> QUEUED"):
        store.requeue(done, "again")


def test_cancel_ends_what_waits_marks_what_runs_and_leaves_what_ended(store: SqlStore, config: TrainConfig) -> None:
    waiting, running, ended = (store.submit(NewJob("demo", config)) for _ in range(3))
    for job in (running, ended):
        store.claim(job, stale_result_at=None)
    ended_now = store.get(ended.id)
    assert ended_now
    store.move(ended_now, JobStatus.SUCCEEDED)
    for _ in range(2):
        cancelled = store.request_cancel(waiting.id)
        assert cancelled is not None
        assert cancelled.status is JobStatus.CANCELLED
        marked = store.request_cancel(running.id)
        assert marked is not None
        assert marked.status is JobStatus.STARTING
        assert marked.cancel_requested_at is not None
        kept = store.request_cancel(ended.id)
        assert kept is not None
        assert (kept.status, kept.cancel_requested_at) == (JobStatus.SUCCEEDED, None)
    assert store.request_cancel("job-unknown") is None


def test_a_cancel_between_two_attempts_leaves_a_run_to_be_ended(store: SqlStore, config: TrainConfig) -> None:
    never, lost = (store.submit(NewJob("demo", config)) for _ in range(2))
    claimed = store.claim(lost, stale_result_at=None)
    assert claimed
    assert store.requeue(claimed, "lost its driver", preemptions=1)
    for job in (never, lost):
        store.request_cancel(job.id)
    assert [(job.id, job.tracking_due) for job in store.tracking_due()] == [(lost.id, "KILLED")]


def test_resume_queues_a_new_attempt_under_the_same_id(store: SqlStore, config: TrainConfig) -> None:
    job = store.submit(NewJob("demo", config))
    with pytest.raises(ConflictError, match="QUEUED"):
        store.resume(job.id)
    claimed = store.claim(job, stale_result_at=None)
    assert claimed is not None
    store.move(claimed, JobStatus.FAILED, error={"message": "lost too often"}, preemptions=3)
    resumed = store.resume(job.id)
    assert resumed is not None
    assert (resumed.status, resumed.error, resumed.ended_at) == (JobStatus.QUEUED, None, None)
    assert resumed.preemptions == 0  # it may lose its driver as often as a new one
    again = store.claim(resumed, stale_result_at=12.5)
    assert again is not None
    assert (again.attempt, again.ray_job_id, again.stale_result_at) == (2, f"{job.id}-2", 12.5)


def test_jobs_outlive_the_store(database_url: str, tmp_path: Path, config: TrainConfig) -> None:
    store = SqlStore(database_url, str(tmp_path))
    job = store.submit(NewJob("demo", config), "key", "hash")
    store.close()
    reopened = SqlStore(database_url, str(tmp_path))
    assert reopened.get(job.id) == job
    assert reopened.submit(NewJob("demo", config), "key", "hash") == job
    reopened.close()


def test_the_queue_is_by_priority_then_age(store: SqlStore, config: TrainConfig) -> None:
    low, old, new, high = (store.submit(NewJob("demo", config, priority=p)).id for p in (-1, 0, 0, 5))
    assert [job.id for job in store.queue()] == [high, old, new, low]
