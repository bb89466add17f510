"""The dispatcher, stepped round by round: a real store and real run directories, a fake Ray, a clock of ours."""

import fcntl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ray_app.queue.admission import Cluster, Limits
from ray_app.queue.dispatcher import EXIT_AFTER_S, KEPT_IN_RAY, LOST_AFTER_S, Dispatcher
from ray_app.queue.ray_jobs import RayJob, RayStatus
from ray_app.queue.store import SqlStore
from serving.deployment import DEPLOYMENT_FILE, DeployRequest, read_choice, write_choice
from serving.jobs import JobFilter, JobRecord, JobStatus, NewJob
from training.config import TrainConfig, parse_config
from training.run_dir import Phase, RunDir


@dataclass
class FakeRay:
    """A job table whose drivers do nothing by themselves."""

    cpus: float = 4
    table: dict[str, RayJob] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    log: str = ""
    broken: Exception | None = None

    def submit(self, ray_job_id: str, command: list[str], job_id: str) -> None:
        if self.broken:
            raise self.broken
        if self.commands.setdefault(ray_job_id, command) is command:  # Ray takes an id only once
            self.table[ray_job_id] = RayJob(ray_job_id, " ".join(command), RayStatus.RUNNING, job_id=job_id)

    def jobs(self) -> dict[str, RayJob]:
        return dict(self.table)

    def stop(self, ray_job_id: str) -> None:
        self.stopped.append(ray_job_id)

    def forget(self, ray_job_id: str) -> None:
        assert self.table.pop(ray_job_id).ended

    def logs(self, ray_job_id: str) -> str:
        return self.log

    def cluster(self) -> Cluster:
        return Cluster(({"CPU": self.cpus},), {"CPU": self.cpus})

    def end(self, ray_job_id: str, status: RayStatus = RayStatus.FAILED, exit_code: int | None = None) -> None:
        self.table[ray_job_id] = replace(
            self.table[ray_job_id], status=status, exit_code=exit_code, message="last words"
        )


@dataclass
class Bench:
    """A dispatcher and what stands around it."""

    store: SqlStore
    ray: FakeRay
    dispatcher: Dispatcher
    now: float = 1_000_000.0

    def submit(self, config: TrainConfig, **options: Any) -> str:
        return self.store.submit(NewJob("demo", config, **options)).id

    def job(self, job_id: str) -> JobRecord:
        job = self.store.get(job_id)
        assert job is not None
        return job

    def run_dir(self, job_id: str) -> RunDir:
        return RunDir(Path(self.job(job_id).run_dir))

    def step(self, seconds: float = 0) -> None:
        self.now += seconds
        self.dispatcher.step()

    def lose(self, job_id: str) -> None:
        """Rounds in which the driver of `job_id` is found gone for good."""
        self.step()
        self.step(LOST_AFTER_S + 1)


@pytest.fixture
def bench(home: Path, database_url: str) -> Iterator[Bench]:
    store = SqlStore(database_url, str(home / "runs"))
    ray = FakeRay()
    dispatcher = Dispatcher(store, ray, home / "runs", Limits(None, 8))
    bench = Bench(store, ray, dispatcher)
    dispatcher.clock = lambda: bench.now
    yield bench
    store.close()


@pytest.fixture
def config() -> TrainConfig:
    scaling = {"device": "cpu", "workers": 2}
    return parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}, "scaling": scaling}).resolved()


def test_a_job_goes_from_the_queue_to_its_result(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    job = bench.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.STARTING, 1)
    assert bench.ray.commands[job_id][1:] == ["-m", "training", job.run_dir]
    run_dir = bench.run_dir(job_id)
    assert run_dir.config() == config
    bench.ray.log = "loading\n"
    run_dir.write_progress(Phase.RUNNING, step=3, total_steps=10, loss=2.5)
    bench.step()
    job = bench.job(job_id)
    assert (job.status, job.progress["step"]) == (JobStatus.RUNNING, 3)
    assert run_dir.log_path.read_text() == "loading\n"
    run_dir.write_progress(Phase.MERGING)
    bench.step()
    assert bench.job(job_id).status is JobStatus.MERGING
    run_dir.write_result(Phase.SUCCEEDED, model="/m", adapter="/a")
    bench.step()
    assert bench.job(job_id).status is JobStatus.MERGING  # its driver has not left yet
    bench.ray.log = "loading\ndone"
    bench.ray.end(job_id, RayStatus.SUCCEEDED, 0)
    bench.step()
    job = bench.job(job_id)
    assert job.status is JobStatus.SUCCEEDED
    assert job.result == {"model": "/m", "adapter": "/a"}
    assert job.ended_at == (run_dir.result() or {})["ended_at"]
    assert run_dir.log_path.read_text() == "loading\ndone"
    assert job.tracking_due == "FINISHED"


@pytest.mark.parametrize(
    ("asked", "registration", "then"),
    [
        (True, "registered", "job:"),
        (True, "skipped", "job:"),
        (True, "gated", "job:before"),
        (True, "failed", "job:before"),
        (False, "registered", "job:before"),
    ],
)
def test_a_job_that_asks_for_it_is_deployed_once_it_is_registered(
    bench: Bench, config: TrainConfig, home: Path, asked: bool, registration: str, then: str
) -> None:
    file = home / DEPLOYMENT_FILE
    write_choice(file, DeployRequest(model="job:before", replicas=2))
    job_id = bench.submit(config.model_copy(update={"deploy": asked}))
    bench.step()
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m", registration=registration)
    bench.ray.end(job_id, RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED
    assert read_choice(file) == DeployRequest(model=f"job:{job_id}" if then == "job:" else then, replicas=2)


def test_a_failure_keeps_the_drivers_own_reason(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    error = {"type": "DataError", "message": "row 7 has no answer", "hint": "Mend it.", "field": "data.path"}
    bench.run_dir(job_id).write_result(Phase.FAILED, error=error)
    bench.ray.end(job_id, exit_code=1)
    bench.step()
    assert (bench.job(job_id).status, bench.job(job_id).error) == (JobStatus.FAILED, error)


def test_a_driver_that_ends_without_a_result_fails_with_its_last_words(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.end(job_id, exit_code=2)
    bench.step()
    job = bench.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert (job.error["type"], job.error["message"]) == ("DriverError", "last words")


@pytest.mark.parametrize("gone", ["killed", "forgotten"])
def test_a_lost_driver_goes_on_as_a_new_attempt_within_its_budget(bench: Bench, config: TrainConfig, gone: str) -> None:
    job_id = bench.submit(config, max_preemptions=1)
    bench.step()
    bench.run_dir(job_id).write_progress(Phase.RUNNING, step=3)
    bench.step()
    if gone == "killed":
        bench.ray.end(job_id, exit_code=-9)
    else:
        bench.ray.table.clear()  # as after a restart of the head
    bench.step()
    assert bench.job(job_id).status is JobStatus.RUNNING  # a result may still turn up
    bench.step(LOST_AFTER_S + 1)
    job = bench.job(job_id)
    assert (job.status, job.attempt, job.preemptions) == (JobStatus.STARTING, 2, 1)
    assert list(bench.ray.commands) == [job_id, f"{job_id}-2"]
    bench.ray.end(f"{job_id}-2", exit_code=137)
    bench.lose(job_id)
    job = bench.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["type"] == "DriverLostError"
    assert job.tracking_due == "FAILED"


def test_a_result_that_turns_up_late_counts(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.table.clear()
    bench.step()
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.step(LOST_AFTER_S + 1)
    assert bench.job(job_id).status is JobStatus.SUCCEEDED


def test_the_result_of_an_earlier_attempt_is_not_taken_for_this_ones(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.run_dir(job_id).write_result(Phase.FAILED, error={"message": "first"})
    bench.ray.log = "first"
    bench.ray.end(job_id, exit_code=1)
    bench.step()
    bench.ray.log = "sec"
    bench.store.resume(job_id)
    bench.step()
    bench.step()
    assert bench.job(job_id).status is JobStatus.STARTING
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.ray.log = "second\n"
    bench.ray.end(f"{job_id}-2", RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED
    assert bench.run_dir(job_id).log_path.read_text() == "first\n===== attempt 2 =====\nsecond\n"


def test_cancelling_stops_the_driver_first(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.store.request_cancel(job_id)
    bench.step()
    assert bench.ray.stopped == [job_id]
    assert bench.job(job_id).status is JobStatus.STARTING  # the truth: a process is left
    bench.run_dir(job_id).write_result(Phase.FAILED, error={"message": "SIGTERM"})
    bench.ray.end(job_id, RayStatus.STOPPED)
    bench.step()
    assert bench.job(job_id).status is JobStatus.CANCELLED
    assert bench.job(job_id).tracking_due == "KILLED"


def test_a_job_that_succeeded_before_the_stop_came_has_succeeded(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.store.request_cancel(job_id)
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.ray.end(job_id, RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED


def test_stopping_it_through_ray_cancels_it(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.end(job_id, RayStatus.STOPPED)
    bench.step()
    assert (bench.job(job_id).status, bench.job(job_id).status_reason) == (JobStatus.CANCELLED, "stopped through Ray")


def test_a_claim_whose_dispatcher_died_is_submitted_by_the_next(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.ray.broken = ConnectionError("the head is away")
    with pytest.raises(ConnectionError):
        bench.step()
    assert (bench.job(job_id).status, bench.job(job_id).submitted_at) == (JobStatus.STARTING, None)
    bench.ray.broken = None
    bench.step()
    assert list(bench.ray.commands) == [job_id]
    assert bench.job(job_id).submitted_at is not None


def test_a_driver_of_ours_that_belongs_to_nothing_is_stopped(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.store.request_cancel(job_id)
    bench.ray.table["job-x"] = RayJob("job-x", "python -m training /x", RayStatus.RUNNING, job_id=job_id)
    bench.ray.table["job-y"] = RayJob("job-y", "python -m training /y", RayStatus.RUNNING, job_id="another-home's")
    bench.step()
    assert bench.ray.stopped == ["job-x"]


def test_a_driver_that_does_not_leave_after_its_result_is_stopped(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.now = (bench.run_dir(job_id).result() or {})["ended_at"]
    bench.step()
    assert bench.ray.stopped == []
    bench.step(EXIT_AFTER_S + 1)
    assert bench.ray.stopped == [job_id]


def test_drivers_that_people_started_are_adopted(bench: Bench, config: TrainConfig, home: Path) -> None:
    bench.ray.table = {
        "raysubmit_1": RayJob("raysubmit_1", "python -m training configs/tiny.yaml", RayStatus.RUNNING, started_at=5.0),
        "raysubmit_2": RayJob("raysubmit_2", "python other.py", RayStatus.RUNNING),
        "raysubmit_3": RayJob("raysubmit_3", "python -m training bad.yaml", RayStatus.FAILED),
    }
    bench.step()
    assert bench.store.list_jobs(JobFilter()) == []  # it has not made its directory yet
    run_dir = RunDir.create(home / "runs" / "raysubmit_1", config)
    bench.step()
    [job] = bench.store.list_jobs(JobFilter())
    assert (job.id, job.status, job.started_at) == ("raysubmit_1", JobStatus.STARTING, 5.0)
    run_dir.write_progress(Phase.RUNNING, step=1)
    bench.step()
    assert bench.job("raysubmit_1").status is JobStatus.RUNNING
    run_dir.write_result(Phase.SUCCEEDED, model="/m")
    bench.ray.end("raysubmit_1", RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job("raysubmit_1").status is JobStatus.SUCCEEDED
    assert bench.ray.stopped == []


@pytest.mark.parametrize("argument", ["{tmp_path}/hf", "/" + "x" * 300])
def test_a_ray_job_that_cannot_be_adopted_holds_nobody_up(
    bench: Bench, config: TrainConfig, tmp_path: Path, argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories of models hold a config.json as well, and paths may be of any length."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt_oss"}')
    command = f"python -m training {argument.format(tmp_path=tmp_path)}"
    bench.ray.table["raysubmit_1"] = RayJob("raysubmit_1", command, RayStatus.FAILED)
    job_id = bench.submit(config)
    bench.step()
    bench.step()
    assert bench.job(job_id).status is JobStatus.STARTING
    assert [job.id for job in bench.store.list_jobs(JobFilter())] == [job_id]
    assert [record.message for record in caplog.records if "adopted" in record.message] == [
        "Ray job raysubmit_1 cannot be adopted; each round tries again"
    ]


def test_what_ray_refuses_for_one_job_holds_nobody_up(bench: Bench, config: TrainConfig) -> None:
    def refuse(ray_job_id: str) -> None:
        raise RuntimeError(f"500: {ray_job_id}")

    bench.ray.stop = bench.ray.forget = refuse  # type: ignore[method-assign]
    over = bench.submit(config)
    bench.store.request_cancel(over)
    bench.ray.table["stray"] = RayJob("stray", "", RayStatus.RUNNING, job_id=over)
    for index in range(KEPT_IN_RAY + 1):
        bench.ray.table[f"old-{index}"] = RayJob(f"old-{index}", "", RayStatus.FAILED, job_id=over)
    job_id = bench.submit(config)
    bench.step()
    assert bench.job(job_id).status is JobStatus.STARTING


def test_a_stored_configuration_of_another_version_fails_its_own_job_alone(bench: Bench, config: TrainConfig) -> None:
    running, waiting = (bench.submit(config) for _ in range(2))
    bench.ray.cpus = 2
    bench.step()
    renamed = {**config.model_dump(mode="json"), "optimizer": {}}
    for job_id in (running, waiting):
        assert bench.store.note(bench.job(job_id), config=renamed)
    bench.ray.cpus = 4
    fine = bench.submit(config)
    bench.step()
    job = bench.job(waiting)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert (job.error["type"], job.error["field"]) == ("ConfigError", "optimizer")
    assert [bench.job(job_id).status for job_id in (running, fine)] == ["STARTING", "STARTING"]


def test_a_run_directory_that_cannot_be_read_keeps_only_its_own_job_waiting(bench: Bench, config: TrainConfig) -> None:
    broken, fine = bench.submit(config), bench.submit(config)
    bench.run_dir(broken).result_path.mkdir(parents=True)
    bench.step()
    assert [bench.job(job_id).status for job_id in (broken, fine)] == ["QUEUED", "STARTING"]
    bench.run_dir(broken).result_path.rmdir()
    bench.step()
    assert bench.job(broken).status is JobStatus.STARTING


def test_a_job_waits_with_its_reason_and_fails_when_it_waited_too_long(bench: Bench, config: TrainConfig) -> None:
    big = parse_config(config.model_dump() | {"scaling": {"workers": 16, "device": "cpu"}})
    job_id = bench.submit(big, queue_timeout_s=100)
    bench.now = bench.job(job_id).queued_at
    bench.step(99)
    assert bench.job(job_id).status_reason == "needs 16 CPU, cluster has 4"
    bench.step(2)
    job = bench.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["type"] == "QueueTimeoutError"
    assert "needs 16 CPU, cluster has 4" in job.error["message"]


def test_only_as_many_start_as_fit(bench: Bench, config: TrainConfig) -> None:
    ids = [bench.submit(config) for _ in range(3)]  # two workers each, on four CPUs
    bench.step()
    assert [bench.job(job_id).status for job_id in ids] == ["STARTING", "STARTING", "QUEUED"]
    assert bench.job(ids[2]).status_reason == "needs 2 CPU, 0 free"


def test_two_dispatchers_racing_start_each_job_once(bench: Bench, config: TrainConfig, home: Path) -> None:
    ids = [bench.submit(config) for _ in range(12)]
    bench.ray.cpus = 100
    barrier = threading.Barrier(2)
    failures: list[Exception] = []

    def race() -> None:
        mine = Dispatcher(bench.store, bench.ray, home / "runs", Limits(None, 8), clock=lambda: bench.now)
        for _ in range(3):
            barrier.wait(30)
            try:
                mine.step()
            except Exception as error:
                failures.append(error)

    racers = [threading.Thread(target=race) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert failures == []
    assert sorted(bench.ray.commands) == sorted(ids)  # one Ray Job each, named by the first attempt
    assert {(job.status, job.attempt) for job in map(bench.job, ids)} == {(JobStatus.STARTING, 1)}
    assert bench.ray.stopped == []


def test_trouble_with_one_job_does_not_stop_the_others(bench: Bench, config: TrainConfig) -> None:
    first, second = bench.submit(config), bench.submit(config)
    bench.step()
    bench.run_dir(first).result_path.mkdir()  # OSError on reading, as from a disk in trouble
    bench.run_dir(second).write_result(Phase.SUCCEEDED, model="/m")
    for job_id in (first, second):
        bench.ray.end(job_id, RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(first).status is JobStatus.STARTING
    assert bench.job(second).status is JobStatus.SUCCEEDED


def test_a_driver_that_ray_lost_sight_of_is_left_alone_while_it_lives(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.table.clear()
    with bench.run_dir(job_id).lock_path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        bench.lose(job_id)
        bench.lose(job_id)
        assert list(bench.ray.commands) == [job_id]
        assert "still runs" in bench.job(job_id).status_reason
    bench.lose(job_id)
    assert list(bench.ray.commands) == [job_id, f"{job_id}-2"]


def test_a_cancel_during_the_loss_of_a_driver_is_not_forgotten(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    before = bench.job(job_id)
    bench.store.request_cancel(job_id)
    assert bench.store.requeue(before, "lost", preemptions=1)  # by a dispatcher that has not seen the cancel
    bench.step()
    assert bench.job(job_id).status is JobStatus.CANCELLED
    assert bench.store.resume(job_id)
    bench.step()
    assert bench.job(job_id).status is JobStatus.STARTING


def test_a_job_that_expires_between_two_attempts_leaves_a_run_to_be_ended(bench: Bench, config: TrainConfig) -> None:
    never, lost = (bench.submit(config, queue_timeout_s=100) for _ in range(2))
    bench.now = bench.job(lost).queued_at
    assert bench.store.claim(bench.job(lost), stale_result_at=None)
    assert bench.store.requeue(bench.job(lost), "lost its driver", preemptions=1)
    bench.ray.cpus = 0
    bench.step(200)
    assert [bench.job(job_id).status for job_id in (never, lost)] == ["FAILED", "FAILED"]
    assert [(job.id, job.tracking_due) for job in bench.store.tracking_due()] == [(lost, "FAILED")]


def test_a_run_that_somebody_starts_again_by_hand_is_its_jobs_next_attempt(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.run_dir(job_id).write_result(Phase.FAILED, error={"message": "first"})
    bench.ray.end(job_id, exit_code=1)
    bench.step()
    command = f"python -m training {bench.job(job_id).run_dir}"
    bench.ray.table["raysubmit_1"] = RayJob("raysubmit_1", command, RayStatus.RUNNING)
    bench.step()
    job = bench.job(job_id)
    assert (job.status, job.attempt, job.ray_job_id, job.error) == (JobStatus.STARTING, 2, "raysubmit_1", None)
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.ray.end("raysubmit_1", RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED
    bench.step()
    assert bench.job(job_id).attempt == 2


def test_a_run_started_again_by_hand_is_not_judged_by_what_lay_there(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.store.request_cancel(job_id)
    bench.run_dir(job_id).write_result(Phase.FAILED, error={"message": "first"})
    bench.ray.end(job_id, RayStatus.STOPPED)
    bench.step()  # CANCELLED, at another time than the result says
    command = f"python -m training {bench.job(job_id).run_dir}"
    bench.ray.table["raysubmit_1"] = RayJob("raysubmit_1", command, RayStatus.RUNNING, started_at=time.time() + 1)
    bench.now = time.time() + EXIT_AFTER_S + 1
    bench.step()
    bench.step()
    assert bench.ray.stopped == []
    bench.ray.end("raysubmit_1", exit_code=1)
    bench.step()
    job = bench.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["type"] == "DriverError"


def test_rays_table_is_kept_short(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    for index in range(KEPT_IN_RAY + 5):
        ended = RayJob(f"old-{index}", "python -m training /x", RayStatus.SUCCEEDED, started_at=index, job_id=job_id)
        bench.ray.table[ended.id] = ended
    bench.ray.table["theirs"] = RayJob("theirs", "python other.py", RayStatus.SUCCEEDED)
    bench.step()
    kept = {f"old-{index}" for index in range(5, KEPT_IN_RAY + 5)}
    assert set(bench.ray.table) == {job_id, "theirs"} | kept


def test_the_log_of_a_job_that_ended_has_a_copy_at_the_storage_url(
    bench: Bench, config: TrainConfig, tmp_path: Path
) -> None:
    bench.dispatcher.storage = (tmp_path / "bucket").as_uri()
    job_id = bench.submit(config)
    bench.step()
    bench.ray.log = "all of it\n"
    bench.ray.end(job_id, RayStatus.FAILED, exit_code=1)
    bench.step()
    assert (tmp_path / "bucket" / "runs" / job_id / "driver.log").read_text() == "all of it\n"


def test_a_log_that_ray_has_lost_keeps_no_job_from_ending(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.log = "so far\n"
    bench.step()

    def lost(ray_job_id: str) -> str:
        raise RuntimeError("404: no such file")

    bench.ray.logs = lost  # type: ignore[method-assign]
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.ray.end(job_id, RayStatus.SUCCEEDED, 0)
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED
    assert bench.run_dir(job_id).log_path.read_text() == "so far\n"


def test_the_end_of_a_log_is_kept_of_a_driver_that_outlived_its_head(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.log = "so far\n"
    bench.step()
    del bench.ray.table[job_id]  # a new head knows nothing of it
    bench.ray.log += "the end\n"
    bench.run_dir(job_id).write_result(Phase.SUCCEEDED, model="/m")
    bench.step()
    assert bench.job(job_id).status is JobStatus.SUCCEEDED
    assert bench.run_dir(job_id).log_path.read_text() == "so far\nthe end\n"


def test_a_log_that_cannot_be_copied_holds_up_neither_cancel_nor_end(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()
    bench.ray.log = "so far\n"
    bench.run_dir(job_id).log_path.mkdir()  # OSError on writing, as from a full disk
    bench.run_dir(job_id).write_progress(Phase.RUNNING, step=1)
    bench.store.request_cancel(job_id)
    bench.step()
    assert bench.ray.stopped == [job_id]
    bench.ray.end(job_id, RayStatus.STOPPED)
    bench.step()
    assert bench.job(job_id).status is JobStatus.CANCELLED


def test_the_end_of_a_log_waits_for_a_ray_that_is_away(bench: Bench, config: TrainConfig) -> None:
    job_id = bench.submit(config)
    bench.step()

    def away(ray_job_id: str) -> str:
        raise ConnectionError("the head is away")

    there = bench.ray.logs
    bench.ray.logs = away  # type: ignore[method-assign]
    bench.ray.end(job_id, exit_code=1)
    bench.step()
    assert bench.job(job_id).status is JobStatus.STARTING
    bench.ray.log, bench.ray.logs = "all of it\n", there  # type: ignore[method-assign]
    bench.step()
    assert bench.job(job_id).status is JobStatus.FAILED
    assert bench.run_dir(job_id).log_path.read_text() == "all of it\n"
