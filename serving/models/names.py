"""Which directory a model's name means. Loads without torch."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from serving.engines.engine import EngineName
from serving.errors import NotFoundError, RequestError, UnavailableError
from serving.schemas import ID_PATTERN
from training.model.base import fetch
from training.run_dir import Phase, RunDir
from training.tracking.patience import ANSWER_S, limit_patience

LATEST = "latest"
LISTED_JOBS = 100
REGISTERED = "models:/"
MAX_VERSION = 2**31 - 1
"""Of a registered model: MLflow's column is a 32-bit integer, and databases have errors of their own beyond it."""
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""What MLflow's stores call a version, and an alias, that they do not know."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded."""

    name: str
    """As answers carry it: `job:ID`, `adapter:ID`, `models:/name/version`, or a path."""
    directory: Path
    adapter: Path | None = None
    """A LoRA adapter to answer with, unmerged, on the model in `directory`."""
    engine: EngineName | None = None
    """What to load it with; None is as the service's settings say."""

    @property
    def base(self) -> "ModelSource":
        """The model without the adapter."""
        return self if self.adapter is None else replace(self, name=str(self.directory), adapter=None)


@dataclass(frozen=True)
class ModelNames:
    """Finds models of jobs, of MLflow's registry, and in directories.

    Args:
        home: POLYTHINK_HOME, whose `runs/` holds the jobs.
        roots: POLYTHINK_DATA_ROOTS; paths must lie under one of them.
        tracking_uri: MLflow's.
    """

    home: Path
    roots: tuple[Path, ...]
    tracking_uri: str

    def resolve(self, name: str) -> ModelSource:
        """
        Raises:
            RequestError: `name` is none of the forms, or a path outside of the roots.
            NotFoundError: there is no such job, version or directory.
            UnavailableError: `latest`, and no job has succeeded yet; or MLflow does not answer, which may take 20 s.
        """
        if name == LATEST:
            return self._latest()
        if name.startswith("job:"):
            return self._job(name.removeprefix("job:"))
        if name.startswith("adapter:"):
            return self._adapter(name.removeprefix("adapter:"))
        if name.startswith(REGISTERED):
            return self._registered(name)
        if name.startswith(("/", "~/")):
            return self._path(name)
        raise _unknown(name)

    def _latest(self) -> ModelSource:
        newest = next(_jobs(self.home), None)
        if newest is None:
            raise UnavailableError(
                "no job has made a model yet",
                hint="POST /jobs trains one; PUT /deployment serves any other, such as a path.",
                field="model",
            )
        return newest

    def _job(self, job_id: str) -> ModelSource:
        result = self._result(job_id)
        if result["status"] != Phase.SUCCEEDED:
            raise NotFoundError(f"job {job_id} is {result['status']}: it has no model", field="model")
        return ModelSource(f"job:{job_id}", Path(result["model"]))

    def _adapter(self, job_id: str) -> ModelSource:
        """The adapter of a job on its base, unmerged: also of a job whose merge failed."""
        adapter = self._result(job_id).get("adapter")
        if not adapter:
            raise NotFoundError(f"job {job_id} has no adapter", field="model")
        base = fetch(RunDir(self.home / "runs" / job_id).config().model, progress=False)
        return ModelSource(f"adapter:{job_id}", base, Path(adapter))

    def _result(self, job_id: str) -> dict[str, Any]:
        result = None
        if re.fullmatch(ID_PATTERN, job_id):
            result = RunDir(self.home / "runs" / job_id).result()
        if result is None:
            raise NotFoundError(f"there is no finished job {job_id!r}", hint="GET /jobs lists them.", field="model")
        return result

    def _registered(self, name: str) -> ModelSource:
        model, separator, version = name.removeprefix(REGISTERED).rpartition("@" if "@" in name else "/")
        if not model or not separator or not version:
            raise _unknown(name)
        if "@" not in name and not (re.fullmatch("[0-9]{1,10}", version) and int(version) <= MAX_VERSION):
            raise NotFoundError(f"there is no {name!r}: a version is a whole number up to {MAX_VERSION}", field="model")
        store = self.tracking_uri.removeprefix("sqlite:///")
        if store != self.tracking_uri and not Path(store).exists():  # the client would make it, which takes seconds
            raise NotFoundError(f"there is no {name!r}: nothing is registered yet", field="model")
        limit_patience(ANSWER_S)
        from mlflow import MlflowClient  # takes a second to import, and only these names need it
        from mlflow.exceptions import MlflowException

        client = MlflowClient(self.tracking_uri)
        try:
            find = client.get_model_version_by_alias if "@" in name else client.get_model_version
            found = find(model, version)
        except MlflowException as error:
            if error.error_code in NOT_THERE:
                raise NotFoundError(f"MLflow knows no {name}: {error.message}", field="model") from None
            raise UnavailableError(
                f"MLflow does not say which files {name} are: {error.message}",
                hint="job:ID names the model of a job without MLflow.",
                field="model",
            ) from None
        directory = Path(str(found.source).removeprefix("file://"))
        return ModelSource(f"models:/{found.name}/{found.version}", directory)

    def _path(self, name: str) -> ModelSource:
        try:
            directory = Path(name).expanduser().resolve()
            complete = (directory / "config.json").is_file()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL byte, an unknown user
            raise RequestError(f"{name[:100]!r} is no path: {error}", field="model") from None
        if not any(directory.is_relative_to(root.resolve()) for root in self.roots):
            raise RequestError(
                f"{name!r} lies outside of the directories that the service may read",
                hint=f"Allowed (POLYTHINK_DATA_ROOTS): {', '.join(map(str, self.roots))}.",
                field="model",
            )
        if not complete:
            raise NotFoundError(f"{name!r} is no model: it has no config.json", field="model")
        return ModelSource(str(directory), directory)


def names_of_jobs(home: Path) -> list[str]:
    """What requests can call the models and adapters of the newest jobs in `home`, newest first."""
    jobs = [source.name for source in islice(_jobs(home), LISTED_JOBS)]
    return jobs + [name.replace("job:", "adapter:", 1) for name in jobs]


def _jobs(home: Path) -> Iterator[ModelSource]:
    """Models of the jobs that succeeded, newest first; older results are not read before they are asked for."""
    ended = []
    for path in home.glob("runs/*/result.json"):
        with suppress(FileNotFoundError):  # retention has deleted it meanwhile
            ended.append((path.stat().st_mtime, path))
    for _, path in sorted(ended, reverse=True):
        result = RunDir(path.parent).result() or {}
        if result.get("status") == Phase.SUCCEEDED and result.get("model"):
            yield ModelSource(f"job:{path.parent.name}", Path(result["model"]))


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"there is no model {name!r}",
        hint="A model is job:ID, adapter:ID, models:/name@alias, models:/name/version, a path, or latest.",
        field="model",
    )
