"""Brings store, Ray Jobs and run directories into agreement, round by round, and starts what may start.

A round looks first at what is there (adopt, watch, finish), then at what waits. It keeps nothing in memory that a new
dispatcher would miss, and every change of a status is a compare-and-set: two dispatchers at once do no harm.
"""

import fcntl
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ray_app.queue.admission import Cluster, Limits, admit
from ray_app.queue.adoption import run_dir_of
from ray_app.queue.driver_log import LogCopies
from ray_app.queue.ray_jobs import RayJob, RayStatus
from ray_app.queue.store import SqlStore
from serving.deployment import DEPLOYMENT_FILE, choose_model
from serving.errors import error_body
from serving.jobs import TRANSITIONS, JobRecord, JobStatus
from training.durable.run_mirror import RunMirror
from training.errors import ConfigError, StorageError
from training.run_dir import Phase, RunDir

log = logging.getLogger(__name__)

LOST_AFTER_S = 5.0
"""A driver that is gone without a result is given up after this: a shared file system may show the result late, and
Ray's watcher needs a second or two to kill an orphan."""
EXIT_AFTER_S = 60.0
"""A driver that wrote its result and does not exit is stopped after this."""
EXPLAINED = 100
"""Waiting jobs, from the front of the queue, whose reason is kept up to date."""
KEPT_IN_RAY = 100
"""Ended jobs that Ray's dashboard goes on showing: its table degrades with hundreds (ray#41241, #35202)."""


class JobRunner(Protocol):
    """Where drivers run: `ray_jobs.RayJobs`, or a fake of it."""

    def submit(self, ray_job_id: str, command: list[str], job_id: str) -> None: ...
    def jobs(self) -> dict[str, RayJob]: ...
    def stop(self, ray_job_id: str) -> None: ...
    def forget(self, ray_job_id: str) -> None: ...
    def logs(self, ray_job_id: str) -> str: ...
    def cluster(self) -> Cluster: ...


def training_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "training")


@dataclass
class Dispatcher:
    """One dispatcher. `step` does one round and may be called for ever.

    Args:
        runs: directory of the run directories.
        limits: how many jobs run, and how they may pass each other.
        command: the driver's argument list, but for the run directory, which comes last.
        storage: URL under which runs have a copy; empty without.
    """

    store: SqlStore
    runner: JobRunner
    runs: Path
    limits: Limits
    command: tuple[str, ...] = field(default_factory=training_command)
    storage: str = ""
    clock: Callable[[], float] = time.time
    log_copies: LogCopies = field(default_factory=LogCopies)
    _troubles: dict[str, str] = field(default_factory=dict, init=False)
    """What was logged last of each part that is in trouble."""

    def step(self) -> None:
        """One round.

        Raises:
            Exception: Ray or the database does not answer; the next round may find it better.
        """
        ray_jobs = self.runner.jobs()
        self._adopt(ray_jobs)
        self._stop_strays(ray_jobs)
        self._forget(ray_jobs)
        for job in self.store.active():
            with self._apart(f"job {job.id} cannot be looked after"):
                self._watch(job, ray_jobs.get(job.ray_job_id or ""))
        self._expire()
        self._start()

    @contextmanager
    def _apart(self, trouble: str) -> Iterator[None]:
        """Keeps one job's trouble, such as a full disk under its run directory, from being the others'.

        It is logged when it changes, not in each of the rounds that try again.
        """
        try:
            yield
        except Exception as error:
            if self._troubles.get(trouble) != repr(error):
                log.exception("%s; each round tries again", trouble)
            self._troubles[trouble] = repr(error)
        else:
            self._troubles.pop(trouble, None)

    # what is there

    def _adopt(self, ray_jobs: dict[str, RayJob]) -> None:
        """Takes in drivers that somebody started with `ray job submit -- python -m training …`."""
        theirs = {id_: ray_job for id_, ray_job in ray_jobs.items() if ray_job.job_id is None}
        for id_ in theirs.keys() - self.store.of_ray_jobs(theirs).keys():
            with self._apart(f"Ray job {id_} cannot be adopted"):  # its argument may be any path, and no run of ours
                if run_dir := run_dir_of(theirs[id_], self.runs):
                    self._take_in(theirs[id_], run_dir)

    def _take_in(self, ray_job: RayJob, run_dir: RunDir) -> None:
        job = self.store.get(run_dir.id)
        if job is None:
            if self.store.adopt(ray_job.id, str(run_dir.root), run_dir.config(), ray_job.started_at):
                log.info("job %s was adopted from Ray", run_dir.id)
        elif job.status in {JobStatus.FAILED, JobStatus.CANCELLED} and not ray_job.ended:
            ended_at = (run_dir.result() or {}).get("ended_at", math.inf)
            stale = ended_at if ended_at < ray_job.started_at else None
            self.store.claim(job, stale_result_at=stale, ray_job_id=ray_job.id)  # run again by hand

    def _stop_strays(self, ray_jobs: dict[str, RayJob]) -> None:
        """Stops drivers of ours whose attempt is over in the store: it was cancelled while they were submitted."""
        for ray_job in ray_jobs.values():
            if not ray_job.ended and self._is_over(ray_job):
                log.warning("Ray job %s belongs to no attempt any more and is stopped", ray_job.id)
                with self._apart(f"Ray job {ray_job.id} cannot be stopped"):
                    self.runner.stop(ray_job.id)

    def _forget(self, ray_jobs: dict[str, RayJob]) -> None:
        """Keeps Ray's table short; the store and the run directories hold all that it says of ended jobs."""
        ended = sorted((job for job in ray_jobs.values() if job.job_id and job.ended), key=lambda job: job.started_at)
        for ray_job in filter(self._is_over, ended[:-KEPT_IN_RAY]):
            with self._apart(f"Ray job {ray_job.id} cannot be taken out of Ray's table"):
                self.runner.forget(ray_job.id)

    def _is_over(self, ray_job: RayJob) -> bool:
        """Whether it ran an attempt that has ended. Jobs of other installations on the same Ray are not ours to judge."""
        job = self.store.get(ray_job.job_id) if ray_job.job_id else None
        return job is not None and not (job.status.is_active() and job.ray_job_id == ray_job.id)

    def _watch(self, job: JobRecord, ray_job: RayJob | None) -> None:
        if ray_job and not ray_job.ended:
            self._follow(job)  # before the log: trouble with it must not hold up a cancel
            with self._apart(f"the log of job {job.id} cannot be copied"):
                self.log_copies.copy(job, self.runner.logs)
        elif ray_job:
            self._copy_whole_log(job)
            self._finish(job, ray_job)
        elif job.submitted_at is None:  # its dispatcher died between claim and submit, or is there now
            self._launch(job)
        elif driver_lives(RunDir(Path(job.run_dir))):
            self.store.note(job, status_reason="Ray has lost sight of its driver, which still runs")
        else:
            self._copy_whole_log(job)
            self._finish(job, None)

    def _copy_whole_log(self, job: JobRecord) -> None:
        try:
            self.log_copies.copy(job, self.runner.logs, last=True)
        except (RuntimeError, StorageError) as error:  # Ray has lost it, or the disk is full: what is there must do
            log.warning("the end of the log of job %s is not copied: %s", job.id, error)
        if self.storage:
            RunMirror(RunDir(Path(job.run_dir)), self.storage).push_log()

    def _launch(self, job: JobRecord) -> None:
        """Submits the claimed attempt; safe to repeat, as Ray takes an id only once."""
        if job.cancel_requested_at:
            self._end(job, JobStatus.CANCELLED, "KILLED", status_reason="cancelled before its driver started")
            return
        root = Path(job.run_dir)
        if not RunDir(root).config_path.exists():
            RunDir.create(root, job.train_config)
        assert job.ray_job_id is not None  # set by the claim
        self.runner.submit(job.ray_job_id, [*self.command, str(root)], job.id)
        if not self.store.note(job, submitted_at=self.clock()):  # cancelled meanwhile
            self.runner.stop(job.ray_job_id)

    def _follow(self, job: JobRecord) -> None:
        """Brings a living driver's progress into the store, and a wish to cancel to the driver."""
        assert job.ray_job_id is not None
        if job.cancel_requested_at:
            self.runner.stop(job.ray_job_id)
            return
        result = self._result(job)
        if result and self.clock() - result["ended_at"] > EXIT_AFTER_S:
            self.runner.stop(job.ray_job_id)
        progress = RunDir(Path(job.run_dir)).progress()
        if progress == job.progress:  # nothing new; right after the claim: nothing said yet in this attempt
            return
        status = JobStatus(progress.get("phase", job.status))
        if status.is_active() and status in TRANSITIONS[job.status]:
            self.store.move(job, status, progress=progress, lost_at=None)
        else:
            self.store.note(job, progress=progress, lost_at=None)

    def _finish(self, job: JobRecord, ray_job: RayJob | None) -> None:
        """Says how an attempt ended whose driver is gone."""
        result = self._result(job)
        if result and result["status"] == Phase.SUCCEEDED:
            if job.config.get("deploy") and result.get("registration") not in {"gated", "failed"}:
                choose_model(self.runs.parent / DEPLOYMENT_FILE, f"job:{job.id}")  # before it is over, safe to repeat
            self._end(job, JobStatus.SUCCEEDED, "FINISHED", **self._last(job, result))
        elif job.cancel_requested_at:
            self._end(job, JobStatus.CANCELLED, "KILLED", status_reason="cancelled")
        elif result:
            self._end(job, JobStatus.FAILED, "FAILED", error=result.get("error"), **self._last(job, result))
        elif ray_job and ray_job.status == RayStatus.STOPPED:
            self._end(job, JobStatus.CANCELLED, "KILLED", status_reason="stopped through Ray")
        elif ray_job and ray_job.exit_code is not None and 0 <= ray_job.exit_code < 128:
            error = error_body("DriverError", _tail(ray_job.message), "GET /jobs/{id}/logs has the whole log.")["error"]
            self._end(job, JobStatus.FAILED, "FAILED", error=error)
        else:
            self._lose(job, ray_job)

    def _lose(self, job: JobRecord, ray_job: RayJob | None) -> None:
        """A driver that was killed, or went down with its node or the head: go on from the checkpoint, within bounds."""
        if job.lost_at is None:
            self.store.note(job, lost_at=self.clock(), status_reason="its driver is gone; looking for a result")
            return
        if self.clock() - job.lost_at < LOST_AFTER_S:
            return
        how = "Ray does not know it any more"
        if ray_job:
            how = f"exit code {ray_job.exit_code}" if ray_job.exit_code is not None else _tail(ray_job.message, 300)
        if job.preemptions < job.max_preemptions:
            reason = f"attempt {job.attempt} lost its driver ({how}); it goes on from the last checkpoint"
            self.store.requeue(job, reason, preemptions=job.preemptions + 1)
            return
        error = error_body(
            "DriverLostError",
            f"the driver was lost {job.preemptions + 1} times ({how}); max_preemptions is {job.max_preemptions}",
            "POST /jobs/{id}/resume goes on from the last checkpoint.",
        )["error"]
        self._end(job, JobStatus.FAILED, "FAILED", error=error)

    def _end(self, job: JobRecord, to: JobStatus, tracking: str, **values: Any) -> None:
        due = tracking if job.attempt else None  # before its first attempt it has no run in the tracker
        self.store.move(job, to, **{"status_reason": "", "tracking_due": due} | values)

    def _result(self, job: JobRecord) -> dict[str, Any] | None:
        """The result of the current attempt: one that an earlier attempt left is not it."""
        result = RunDir(Path(job.run_dir)).result()
        return None if result and result["ended_at"] == job.stale_result_at else result

    def _last(self, job: JobRecord, result: dict[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in result.items() if name not in {"status", "ended_at", "error"}}
        progress = RunDir(Path(job.run_dir)).progress()
        return {"ended_at": result["ended_at"], "progress": progress, "result": made or None}

    # what waits

    def _expire(self) -> None:
        now = self.clock()
        for job in self.store.queue():
            if job.cancel_requested_at:  # while it was given back to the queue
                self._end(job, JobStatus.CANCELLED, "KILLED", status_reason="cancelled")
            elif now - job.queued_at > job.queue_timeout_s:
                message = (
                    f"waited {job.queue_timeout_s:g} s in the queue: {job.status_reason or 'no round looked at it'}"
                )
                hint = "Ask for less, give a longer queue_timeout_s, or add nodes; then resume it."
                error = error_body("QueueTimeoutError", message, hint, "queue_timeout_s")["error"]
                self._end(job, JobStatus.FAILED, "FAILED", error=error)
            elif error := _fault(job):
                self._end(job, JobStatus.FAILED, "FAILED", error=error)

    def _start(self) -> None:
        """Claims and launches as many jobs as may start."""
        cluster = self.runner.cluster()
        tried: set[str] = set()
        while True:
            queue = [job for job in self.store.queue() if job.id not in tried]
            decision = admit(queue, self.store.active(), cluster, self.limits)
            for job in queue[:EXPLAINED]:
                reason = decision.reasons.get(job.id, job.status_reason)
                if reason != job.status_reason:
                    self.store.note(job, status_reason=reason)
            if decision.start is None:
                return
            tried.add(decision.start.id)
            if claimed := self._claim(decision.start):
                self.store.overtake(decision.passed)
                self._launch(claimed)

    def _claim(self, job: JobRecord) -> JobRecord | None:
        """None when another dispatcher was first, it was cancelled, or its run directory cannot be read."""
        with self._apart(f"job {job.id} cannot be claimed"):
            run_dir = RunDir(Path(job.run_dir))
            stale = (run_dir.result() or {}).get("ended_at")
            return self.store.claim(job, stale_result_at=stale, progress=run_dir.progress())
        return None


def driver_lives(run_dir: RunDir) -> bool:
    """Whether some process holds the run directory's lock, which a driver does as long as it lives."""
    try:
        with run_dir.lock_path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _fault(job: JobRecord) -> dict[str, Any] | None:
    """Why the configuration that is stored for `job` cannot be run; None when it can."""
    try:
        _ = job.train_config
    except ConfigError as error:
        return error.as_dict() | {"hint": "Another version of Polythink stored it: submit the job again."}
    return None


def _tail(message: str, length: int = 2000) -> str:
    return message if len(message) <= length else f"…{message[-length:]}"
