"""What is kept of jobs that ended: all up to a number and an age, and for ever those whose model is in use."""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ray_app.queue.store import SqlStore
from serving.deployment import DEPLOYMENT_FILE, read_choice
from serving.errors import NotFoundError, UnavailableError
from serving.jobs import JobRecord
from serving.models.names import LATEST, ModelNames
from training.config import is_local_path
from training.durable.run_mirror import RunMirror
from training.run_dir import RunDir

log = logging.getLogger(__name__)

DAY_S = 86_400


@dataclass(frozen=True)
class Retention:
    """Forgets jobs, and deletes what they left on disk.

    Args:
        names: says which directory is deployed.
        keep: ended jobs kept, newest first.
        keep_days: longest time a job is kept after its end.
        is_registered: whether a registry holds a model of the job; raises when the registry does not answer, which keeps it.
    """

    store: SqlStore
    names: ModelNames
    keep: int
    keep_days: float
    is_registered: Callable[[JobRecord], bool]
    storage: str = ""
    """URL under which runs have a copy, which goes as well."""

    def sweep(self) -> list[str]:
        """Deletes what is too much or too old; returns the ids of the jobs that are gone.

        Raises:
            PolythinkError: which model is deployed cannot be told, so that any may be.
            Exception: the database does not answer. What was not asked about is still there.
        """
        gone = []
        for job in self.store.superseded(self.keep, time.time() - self.keep_days * DAY_S):
            # the deployment is looked at last and anew: another one may have been chosen while a registry was asked
            if not self._may_be_registered(job) and not self._is_deployed(job) and self.store.delete(job):
                self._delete(job)
                gone.append(job.id)
                log.info("job %s was forgotten", job.id)
        return gone

    def _is_deployed(self, job: JobRecord) -> bool:
        chosen = read_choice(self.names.home / DEPLOYMENT_FILE).model
        if chosen in {f"job:{job.id}", f"adapter:{job.id}"}:
            return True
        made = [job.run_dir, (job.result or {}).get("model")]
        deployed = self._directory(chosen)
        return deployed is not None and any(deployed.is_relative_to(Path(path).resolve()) for path in made if path)

    def _may_be_registered(self, job: JobRecord) -> bool:
        try:
            return self.is_registered(job)
        except Exception as error:  # each job may have a tracker of its own, and whatever its client raises
            log.warning("job %s is kept: whether its model is registered cannot be told: %s", job.id, error)
            return True

    def _delete(self, job: JobRecord) -> None:
        """Deletes what `job` left in POLYTHINK_HOME. A run that was adopted may lie anywhere: that is its owner's."""
        home = self.names.home.resolve()
        run_dir, model = Path(job.run_dir).resolve(), (job.result or {}).get("model")
        if run_dir.parent == home / "runs":
            shutil.rmtree(run_dir, ignore_errors=True)
        if model and Path(model).resolve().is_relative_to(home):
            shutil.rmtree(model, ignore_errors=True)
        if self.storage:
            RunMirror(RunDir(Path(job.run_dir)), self.storage).delete()

    def _directory(self, model: str) -> Path | None:
        """Where the model of that name lies, or an adapter's base; None when there is none, or none any more.

        Raises:
            PolythinkError: that cannot be told.
        """
        if model.startswith("adapter:"):  # a base from the hub is no job's, and must not be fetched for this
            job = self.store.get(model.removeprefix("adapter:"))
            base = job.config["model"]["path"] if job else ""
            return Path(base).expanduser().resolve() if is_local_path(base) else None
        try:
            return self.names.resolve(model).directory.resolve()
        except NotFoundError:
            return None
        except UnavailableError:
            if model == LATEST:  # no job has made a model
                return None
            raise
