"""Model versions in MLflow's registry, by the address of their files: no second copy is made and no weight is loaded.

A registry that does not answer is waited for; one that refuses is a failed registration, and never a failed training.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlparse

from training.config import TrackingConfig
from training.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

WAIT_S = 120.0
"""How long a registry that does not answer is waited for before the registration counts as failed."""

CHECK_S = 30.0
"""How long it is waited for when a run starts. The training takes longer than most maintenance: none is no error yet."""

_LASTING_ERRORS = {
    "INVALID_PARAMETER_VALUE",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_DOES_NOT_EXIST",
    "BAD_REQUEST",
}
_PASSING_ERRORS = {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
_ABSENT = {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}

T = TypeVar("T")


@dataclass(frozen=True)
class Registry:
    """The registry of one MLflow run, of which at most one version comes."""

    client: "MlflowClient"
    run_id: str
    config: TrackingConfig

    def check(self) -> None:
        """Asks for the model that will be registered: credentials that are missing or refused are said now.

        Raises:
            ConfigError: the registry refuses.
        """
        from mlflow.exceptions import MlflowException

        try:
            within(CHECK_S, self._ask)
        except (OSError, MlflowException) as error:
            if isinstance(error, OSError) or error.error_code in _PASSING_ERRORS:
                logger.warning("The model registry %s does not answer now: %s", self.config.registry_uri, error)
                return
            raise ConfigError(
                f"the model registry {self.config.registry_uri} refuses: {error.message}",
                hint="For databricks-uc set DATABRICKS_HOST and DATABRICKS_TOKEN.",
                field="tracking.registry_uri",
            ) from None

    def register(self, model_dir: Path, tags: dict[str, Any]) -> dict[str, str | None]:
        """Registers `model_dir` as a version of the configured model. Safe to repeat: one run has one version.

        Args:
            model_dir: finished; gets MLflow's description of it.
            tags: of the version.

        Returns:
            `registered_model` ("name/version" or None), `registration` ("registered", "failed" or "skipped"), `reason`.
        """
        name = self.config.registered_model
        if not name:
            return {"registered_model": None, "registration": "skipped", "reason": "no tracking.registered_model"}
        try:
            version = self._patiently(lambda: self._version(name, model_dir, tags))
        except Exception as error:  # of MLflow, or of whatever client its artifact store has
            logger.warning("The model in %s is not registered: %s", model_dir, error, exc_info=True)
            return {"registered_model": None, "registration": "failed", "reason": str(error) or repr(error)}
        return {"registered_model": f"{name}/{version.version}", "registration": "registered", "reason": None}

    def _patiently(self, call: Callable[[], T]) -> T:
        """`call()`, once the registry answers, and again while it fails with what may pass, for `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        pause_s = 1.0
        while True:
            try:
                within(deadline - time.monotonic(), self._ask)
                return call()
            except Exception as error:
                lasting = getattr(error, "error_code", None) in _LASTING_ERRORS
                if lasting or time.monotonic() + pause_s > deadline:
                    raise
                logger.warning("The model registry does not answer, trying again: %s", error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 15)

    def _ask(self) -> None:
        """A cheap question; that there is no such model is an answer."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.get_registered_model(self.config.registered_model or "polythink")
        except MlflowException as error:
            if error.error_code not in _ABSENT:
                raise

    def _version(self, name: str, model_dir: Path, tags: dict[str, Any]) -> "ModelVersion":
        is_new = self._create_model(name)
        version = self._earlier_version(name)
        if version is None:
            try:
                version = self._create_version(name, model_dir)
            except Exception:
                if is_new and next(self._versions(name), None) is None:  # another job may have used the name meanwhile
                    self.client.delete_registered_model(name)  # else an empty model stays behind
                raise
        for key, value in tags.items():
            self.client.set_model_version_tag(name, version.version, key, str(value))
        if self.config.alias:
            self.client.set_registered_model_alias(name, self.config.alias, version.version)
        return version

    def _create_model(self, name: str) -> bool:
        """Whether the registered model is new."""
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return False
        return True

    def _earlier_version(self, name: str) -> "ModelVersion | None":
        """The run's version, of an attempt before; what a crash left in the middle of an upload is deleted."""
        found = None
        for version in [version for version in self._versions(name) if version.run_id == self.run_id]:
            if version.status == "READY":
                found = version
            else:
                self.client.delete_model_version(name, version.version)
        return found

    def _versions(self, name: str) -> Iterator["ModelVersion"]:
        token = None
        while True:
            page = self.client.search_model_versions(f"name='{name}'", page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _create_version(self, name: str, model_dir: Path) -> "ModelVersion":
        from training.tracking.mlflow_model import describe

        describe(model_dir, self.run_id)
        return self.client.create_model_version(name, self._source(model_dir), self.run_id)

    def _source(self, model_dir: Path) -> str:
        """What to register: the directory itself if it lies in the run's artifacts, else an upload of it.

        Unity Catalog uploads by itself. A directory is given as a path: MLflow's client for Unity Catalog deletes what
        a `file:` URI names, taking it for its own download (mlflow 3.17, `UcModelRegistryStore._local_model_dir`).
        """
        artifact_uri = self.client.get_run(self.run_id).info.artifact_uri
        directory, location = Path(model_dir).resolve(), local_path(artifact_uri)
        on_unity_catalog = (self.config.registry_uri or "").startswith("databricks-uc")
        if on_unity_catalog or (location is not None and directory.is_relative_to(location.resolve())):
            return str(directory)
        self.client.log_artifacts(self.run_id, str(model_dir), "model")
        self.client.log_text(self.run_id, "", "model/_COMPLETE")  # object stores have no rename: written last
        return f"{artifact_uri}/model"


def within(limit_s: float, call: Callable[[], T]) -> T:
    """`call()` in a thread of its own, left behind if it takes longer.

    MLflow waits 4 minutes for a server that does not answer, and 5 for Databricks, whatever its settings say
    (databricks-sdk 0.162, `Config._resolve_host_metadata`).

    Raises:
        TimeoutError: there is no answer after `limit_s`.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="mlflow-question", daemon=True).start()
    try:
        return answer.result(limit_s)
    except TimeoutError:
        if answer.done():  # the call's own
            raise
        raise TimeoutError(f"no answer within {limit_s:.0f} s") from None


def local_path(uri: str) -> Path | None:
    """The directory that `uri` names, or None when it is not on a disk."""
    parts = urlparse(uri)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None
