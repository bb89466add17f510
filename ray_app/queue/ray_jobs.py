"""Ray Jobs as the dispatcher sees it: submit, list, stop, logs, and what the cluster holds."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.dashboard.modules.job.common import JOB_LOGS_PATH_TEMPLATE
from ray.job_submission import JobDetails, JobSubmissionClient
from ray.job_submission import JobStatus as RayStatus

from ray_app.cluster.parts import ray_directory
from ray_app.queue.admission import Cluster
from training.durable.storage import VARIABLE as STORAGE

OWNER = "polythink_job"
"""Key of a Ray Job's metadata that holds our job's id."""


@dataclass(frozen=True)
class RayJob:
    """A Ray Job of the cluster's table."""

    id: str
    """Submission id."""
    entrypoint: str
    status: RayStatus
    message: str = ""
    exit_code: int | None = None
    started_at: float = 0.0
    job_id: str | None = None
    """The job in our store that it was submitted for; None when somebody else submitted it."""

    @property
    def ended(self) -> bool:
        return self.status.is_terminal()


class RayJobs:
    """The cluster's job server.

    Args:
        address: the dashboard's URL; None asks the cluster that this process belongs to.
        env: variables for drivers, on top of those that the head was started with.
    """

    def __init__(self, address: str | None = None, env: dict[str, str] | None = None):
        self.address = address
        self.env = env or {}
        self._client: JobSubmissionClient | None = None

    @property
    def client(self) -> JobSubmissionClient:
        if self._client is None:
            self._client = JobSubmissionClient(self.address)
        return self._client

    def submit(self, ray_job_id: str, command: list[str], job_id: str) -> None:
        """Starts `command` under `ray_job_id`; does nothing when that id was submitted before."""
        try:
            self.client.submit_job(
                entrypoint=shlex.join(command),  # Ray hands it to a shell
                submission_id=ray_job_id,
                runtime_env={"env_vars": self.env},
                metadata={OWNER: job_id},
            )
        except RuntimeError as error:
            if "already exists" not in str(error):
                raise

    def jobs(self) -> dict[str, RayJob]:
        """Every submitted job that Ray knows, by submission id."""
        submitted = [_ray_job(job) for job in self.client.list_jobs() if job.submission_id]  # others just connected
        return {job.id: job for job in submitted}

    def stop(self, ray_job_id: str) -> None:
        """Asks for the end: SIGTERM, and SIGKILL 3 s later."""
        self.client.stop_job(ray_job_id)

    def forget(self, ray_job_id: str) -> None:
        """Takes an ended job out of Ray's table."""
        self.client.delete_job(ray_job_id)

    def logs(self, ray_job_id: str) -> str:
        """What the driver has printed, stdout and stderr.

        Raises:
            RuntimeError: Ray does not know the job, and no session of our own Ray on this machine has left its log.
        """
        try:
            return self.client.get_job_logs(ray_job_id)
        except RuntimeError:  # a head that was started again knows no jobs of its predecessor's, whose files are there
            name = JOB_LOGS_PATH_TEMPLATE.format(submission_id=ray_job_id)
            logs = [session / "logs" / name for session in ray_directory().glob("session_2*")]
            if left := next(filter(Path.exists, logs), None):
                return left.read_text(encoding="utf-8", errors="replace")
            raise

    def cluster(self) -> Cluster:
        nodes = tuple(node["Resources"] for node in ray.nodes() if node["Alive"])
        return Cluster(nodes, ray.available_resources())


def _ray_job(details: JobDetails) -> RayJob:
    return RayJob(
        id=details.submission_id or "",
        entrypoint=details.entrypoint,
        status=details.status,
        message=details.message or "",
        exit_code=details.driver_exit_code,
        started_at=(details.start_time or 0) / 1000,
        job_id=(details.metadata or {}).get(OWNER),
    )


def driver_environment(home: str, tracking_uri: str, storage: str = "") -> dict[str, str]:
    """Variables that a driver must have, whatever environment the head was started in."""
    env = {"POLYTHINK_HOME": home, "MLFLOW_TRACKING_URI": tracking_uri} | ({STORAGE: storage} if storage else {})
    env |= {
        "RAY_COLOR_PREFIX": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # what they log is read in files and over HTTP
    return env | {name: os.environ[name] for name in ("HF_HOME", "HF_HUB_OFFLINE") if name in os.environ}
