"""MLflow runs of jobs: ended where a driver could not do it, kept where a registry knows them."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ray_app.queue.store import SqlStore
from serving.jobs import JobRecord
from training.config import TrackingConfig
from training.tracking.patience import ANSWER_S, limit_patience

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)


class TrackedRuns:
    """The runs that jobs left in MLflow.

    Args:
        uri: tracking URI of jobs that name none.
    """

    def __init__(self, store: SqlStore, uri: str):
        self.store = store
        self.uri = uri

    def settle(self) -> None:
        """Ends the runs of ended jobs that are still RUNNING. What cannot be reached now is tried again next time."""
        for job in self.store.tracking_due():
            assert job.tracking_due is not None  # that is what was asked for
            try:
                self._end(job, job.tracking_due)
            except Exception as error:  # whatever MLflow's client raises when its server or database is away
                log.warning("the MLflow runs of job %s cannot be ended yet: %s", job.id, error)
            else:
                self.store.note(job, tracking_due=None)

    def _end(self, job: JobRecord, status: str) -> None:
        uri = _tracking(job).uri or self.uri
        if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
            return  # no driver has come as far as to make it
        client = self._client(job)
        for run_id in _run_ids(client, job, "attributes.status = 'RUNNING'"):
            now = self.store.get(job.id)
            if now and now.tracking_due:  # else a new attempt has reopened it meanwhile
                client.set_terminated(run_id, status)

    def is_registered(self, job: JobRecord) -> bool:
        """Whether the registry holds a version that a run of `job` made, whoever registered it.

        Raises:
            MlflowException: the tracking store or the registry does not answer.
        """
        client = self._client(job)
        return any(client.search_model_versions(f"run_id = '{run_id}'") for run_id in _run_ids(client, job))

    def _client(self, job: JobRecord) -> "MlflowClient":
        limit_patience(ANSWER_S)
        from mlflow import MlflowClient

        tracking = _tracking(job)
        return MlflowClient(tracking.uri or self.uri, tracking.registry_uri)


def _tracking(job: JobRecord) -> TrackingConfig:
    """Where `job` logs: to be read also where another version stored the rest of its configuration."""
    return TrackingConfig.model_validate(job.config.get("tracking", {}))


def _run_ids(client: "MlflowClient", job: JobRecord, *conditions: str) -> list[str]:
    """The runs of `job`, found by their tag: a driver may die before it writes the id down."""
    from training.tracking.run import JOB_TAG

    experiment = client.get_experiment_by_name(_tracking(job).experiment)
    if experiment is None:
        return []
    wanted = " and ".join([f"tags.`{JOB_TAG}` = '{job.id}'", *conditions])
    return [run.info.run_id for run in client.search_runs([experiment.experiment_id], wanted)]
