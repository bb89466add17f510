"""What a job is: its statuses and how they may follow each other, its record, and what the API asks of a store."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from training.config import TrainConfig, parse_config


class JobStatus(StrEnum):
    """Where a job stands. Values from STARTING on equal `training.run_dir.Phase`."""

    QUEUED = "QUEUED"  # recorded; waits for its turn and for room in the cluster
    STARTING = "STARTING"  # claimed: its driver is being started, data checked, workers placed
    RUNNING = "RUNNING"  # optimizer steps
    MERGING = "MERGING"  # adapter added into the base, and the proof of it
    EVALUATING = "EVALUATING"  # reasoning language before and after; registration
    SUCCEEDED = "SUCCEEDED"  # the merged model is in place
    FAILED = "FAILED"  # `error` says why; may be resumed
    CANCELLED = "CANCELLED"  # stopped on request, no process left; may be resumed

    def is_terminal(self) -> bool:
        """Whether nothing happens any more unless somebody asks."""
        return self in {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}

    def is_active(self) -> bool:
        """Whether a driver is, or may be, at work."""
        return self in ACTIVE


ACTIVE = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.MERGING, JobStatus.EVALUATING)

_ENDS = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED}

TRANSITIONS: dict[JobStatus, set[JobStatus]] = {
    JobStatus.QUEUED: {JobStatus.STARTING, JobStatus.FAILED, JobStatus.CANCELLED},
    # An active job's status is read now and then, so that phases may be skipped; QUEUED again when its driver was lost.
    JobStatus.STARTING: {JobStatus.RUNNING, JobStatus.MERGING, JobStatus.EVALUATING, JobStatus.QUEUED, *_ENDS},
    JobStatus.RUNNING: {JobStatus.MERGING, JobStatus.EVALUATING, JobStatus.QUEUED, *_ENDS},
    JobStatus.MERGING: {JobStatus.EVALUATING, JobStatus.QUEUED, *_ENDS},
    JobStatus.EVALUATING: {JobStatus.QUEUED, *_ENDS},
    JobStatus.SUCCEEDED: set(),
    JobStatus.FAILED: {JobStatus.QUEUED, JobStatus.STARTING},  # resumed; or run again by hand
    JobStatus.CANCELLED: {JobStatus.QUEUED, JobStatus.STARTING},
}
"""From each status, those that may follow. The store refuses every other change."""


@dataclass(frozen=True)
class NewJob:
    """A job as it is handed to the store: checked, resolved, without a past."""

    name: str
    config: TrainConfig
    plan: dict[str, Any] | None = None
    priority: int = 0
    queue_timeout_s: float = 86_400
    max_preemptions: int = 3


@dataclass(frozen=True)
class JobRecord:
    """A job as it is stored. Times are seconds since 1970, UTC."""

    seq: int
    """Order of arrival; pages of the list end at one."""
    id: str
    name: str
    status: JobStatus
    config: dict[str, Any]
    """The resolved TrainConfig, as JSON."""
    created_at: float
    queued_at: float
    """When it last became QUEUED: its time in the queue counts from here."""
    priority: int
    """Higher goes first."""
    queue_timeout_s: float
    max_preemptions: int
    """Losses of the driver that are not the job's fault (killed, node or head lost) before it is FAILED."""
    attempt: int = 0
    """Number of the current attempt; 0 before the first."""
    preemptions: int = 0
    overtaken: int = 0
    """Jobs behind it that were started before it since it was QUEUED."""
    run_dir: str = ""
    ray_job_id: str | None = None
    """Ray's submission id of the current attempt."""
    submitted_at: float | None = None
    """When Ray took the current attempt; None between the claim and that."""
    lost_at: float | None = None
    """When the current attempt's driver was first found gone without a result."""
    stale_result_at: float | None = None
    """`ended_at` of a result that an earlier attempt left in the run directory."""
    cancel_requested_at: float | None = None
    tracking_due: str | None = None
    """Status in which the tracker's run is still to be ended: FINISHED, FAILED or KILLED."""
    started_at: float | None = None
    ended_at: float | None = None
    status_reason: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None

    @property
    def train_config(self) -> TrainConfig:
        """
        Raises:
            ConfigError: `config` was stored by a version whose configuration was another.
        """
        return parse_config(self.config)


@dataclass(frozen=True)
class JobFilter:
    """Which jobs a list holds, newest first."""

    statuses: tuple[JobStatus, ...] = ()
    name: str | None = None
    before: int | None = None
    """Only jobs whose `seq` is smaller: where the page before ended."""
    limit: int = 50


class JobStore(Protocol):
    """What the API needs of a store; all methods block and may be called from several threads."""

    def submit(self, job: NewJob, key: str | None = None, body_hash: str = "") -> JobRecord:
        """Records a QUEUED job. The same idempotency `key` gives the job that it gave first.

        Raises:
            ConflictError: `key` was used with another body.
        """

    def get(self, job_id: str) -> JobRecord | None: ...

    def list_jobs(self, wanted: JobFilter) -> list[JobRecord]: ...

    def request_cancel(self, job_id: str) -> JobRecord | None:
        """QUEUED becomes CANCELLED; an active job is marked, for the dispatcher to stop; an ended one stays."""

    def resume(self, job_id: str) -> JobRecord | None:
        """FAILED or CANCELLED becomes QUEUED.

        Raises:
            ConflictError: it has any other status.
        """

    def remember(self, scope: str, key: str, body_hash: str, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer kept under an idempotency key: `answer`, or the one that was there first.

        Raises:
            ConflictError: `key` was used with another body.
        """

    def recall(self, scope: str, key: str, body_hash: str) -> dict[str, Any] | None:
        """The answer kept under an idempotency key, None when there is none.

        Raises:
            ConflictError: `key` was used with another body.
        """

    def ping(self) -> None:
        """Raises when the database does not answer."""
