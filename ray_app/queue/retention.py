"""What is kept of jobs that ended: all up to a number and an age, and for ever those whose model is in use."""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ray_app.queue.store import SqlStore
from serving.deployment import DEPLOYMENT_FILE, read_choice
from serving.jobs import JobRecord
from serving.models.names import ModelNames
from training.durable.run_mirror import RunMirror
from training.errors import PolythinkError
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
            Exception: the database does not answer. What was not asked about is still there.
        """
        chosen = read_choice(self.names.home / DEPLOYMENT_FILE).model
        deployed = self._directory(chosen)
        gone = []
        for job in self.store.superseded(self.keep, time.time() - self.keep_days * DAY_S):
            if chosen in {f"job:{job.id}", f"adapter:{job.id}"} or self._is_kept(job, deployed):
                continue
            if self.store.delete(job):
                self._delete(job)
                gone.append(job.id)
        if gone:
            log.info("%d jobs were forgotten: %s", len(gone), ", ".join(gone))
        return gone

    def _is_kept(self, job: JobRecord, deployed: Path | None) -> bool:
        made = [job.run_dir, (job.result or {}).get("model")]
        if deployed and any(deployed.is_relative_to(Path(directory).resolve()) for directory in made if directory):
            return True
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
        try:
            return self.names.resolve(model).directory.resolve()
        except PolythinkError:  # nothing is there to be deployed, or it is gone already
            return None
