"""One MLflow run per training run, from creation to registered model; MLflow's troubles never become training's.

The driver starts the run, or reopens it after a crash: the tag `polythink.job_id` finds it. Rank 0 attaches to it for
metrics. The merged model is written straight into the run's artifact directory and registered there by its URI, so that
no second copy is made and no weight is loaded; a tracking server accepts local sources nowhere else.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.config import TrackingConfig, TrainConfig
from training.environment import describe_environment, package_version
from training.errors import ConfigError, StorageError
from training.run_dir import RunDir, polythink_home
from training.tracking.mlflow_names import DATABASES
from training.tracking.outbox import Outbox
from training.tracking.registry import Registry, local_path, within

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

JOB_TAG = "polythink.job_id"
CONFIG_TAG = "polythink.config"
"""On runs that hold their whole configuration, which also says that their artifacts can be written. One that failed at it
is found again by the job's tag."""

_REACH_S = 120.0  # for a tracking store that does not answer: making the tables of a new one takes up to a minute
_FLUSH_S = 60.0
_PARAMS_PER_CALL = 100  # MLflow's limit
_PARAM_CHARACTERS = 500  # databases cut or refuse more; the whole value is in the artifact config.json
T = TypeVar("T")


class Tracking:
    """An MLflow run that is being written. Make one with `start` (driver) or `attach` (rank 0)."""

    def __init__(self, client: "MlflowClient", run_id: str, uri: str):
        self.client = client
        self.run_id = run_id
        self.uri = uri
        self.config = TrackingConfig()
        self.job_id = ""
        self.local_dir: Path | None = None
        self._outbox = Outbox(lambda metrics: client.log_batch(self.run_id, metrics=metrics))

    @classmethod
    def start(cls, config: TrainConfig, run_dir: RunDir, run_id: str | None = None) -> "Tracking":
        """Creates the run and logs `config`, or reopens the one of an earlier attempt.

        Args:
            config: resolved.
            run_dir: its id becomes the run's name and the tag that finds it again.
            run_id: the run of an earlier attempt, where known; else it is searched by the tag.

        Raises:
            ConfigError: a deleted experiment, a run that does not exist.
            StorageError: the tracking store does not answer.
        """
        warn_of_transformers_limit()
        uri = config.tracking.uri or default_uri()
        client = _reach(uri, lambda: _client(uri, config.tracking.registry_uri))
        if config.tracking.registry_uri:
            Registry(client, "", config.tracking).check()
        experiment_id = _reach(uri, lambda: _experiment_id(client, config.tracking.experiment, uri))
        run_id = run_id or _reach(uri, lambda: _find_run(client, experiment_id, run_dir.id))
        tracking = cls(client, run_id or "", uri)
        if run_id:
            run = _reach(uri, lambda: client.get_run(run_id))
            _reach(uri, lambda: client.update_run(run_id, status="RUNNING"))
        else:
            tags = {JOB_TAG: run_dir.id, "polythink.name": config.name}
            run = _reach(uri, lambda: client.create_run(experiment_id, run_name=run_dir.id, tags=tags))
            tracking.run_id = run.info.run_id
        if CONFIG_TAG not in run.data.tags:
            tracking._log_config(config)
        tracking.config, tracking.job_id, tracking.local_dir = config.tracking, run_dir.id, run_dir.root
        return tracking

    @classmethod
    def attach(cls, run_id: str, uri: str) -> "Tracking":
        """The run of another process, for its metrics; that process ends it."""
        return cls(_client(uri, None), run_id, uri)

    @property
    def model_dir(self) -> Path:
        """Where to write the merged model: in the run's artifact directory if that is on a disk, else in the run
        directory, from where `register` uploads it."""
        location = local_path(self._artifact_uri)
        if location is not None:
            return location / "model"
        if self.local_dir is None:
            raise StorageError(f"run {self.run_id} keeps its artifacts at {self._artifact_uri}, not on a disk")
        return self.local_dir / "model"

    @property
    def _artifact_uri(self) -> str:
        return self.client.get_run(self.run_id).info.artifact_uri

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Queues the numbers in `metrics` for MLflow; never waits, never raises. The first failure is logged."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._outbox.put([Metric(_key(k), v, now_ms, step) for k, v in numbers(metrics).items()])

    def log_result(self, result: dict[str, Any], figures: tuple[Path, ...] = ()) -> None:
        """Logs a job's result: its numbers as metrics, all of it as `result.json`, and `figures`. Never raises."""
        self.log_metrics(result, step=0)
        with self._at_most_a_warning("The result is not in MLflow"):
            self.client.log_dict(self.run_id, json.loads(json.dumps(result, default=str)), "result.json")
            for figure in figures:
                self.client.log_artifact(self.run_id, str(figure), "figures")

    def log_dataset(self, name: str, revision: str | None, fingerprint: str, rows: int) -> None:
        """Notes what the run trained on: shown in MLflow as its data set, the fingerprint as digest."""
        from mlflow.entities import Dataset, DatasetInput

        source = json.dumps({"path": name, "revision": revision})
        profile = json.dumps({"rows": rows})
        dataset = Dataset(name=name, digest=fingerprint[:36], source_type="polythink", source=source, profile=profile)
        with self._at_most_a_warning("The data set is not in MLflow"):
            self.client.log_inputs(self.run_id, [DatasetInput(dataset, tags=[])])

    def register(self, model_dir: Path, tags: dict[str, Any]) -> dict[str, str | None]:
        """Registers `model_dir`, with the job's id among its tags; see `Registry.register`. Never raises."""
        return Registry(self.client, self.run_id, self.config).register(model_dir, {JOB_TAG: self.job_id} | tags)

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Waits until the queued metrics are written, `timeout_s` at most."""
        self._outbox.flush(timeout_s)

    def end(self, status: str) -> None:
        """Ends the run as FINISHED, FAILED or KILLED. Never raises: the job's own outcome counts."""
        self.flush()
        with self._at_most_a_warning(f"The run could not be ended as {status}"):
            self.client.set_terminated(self.run_id, status)

    @contextmanager
    def _at_most_a_warning(self, failure: str) -> Iterator[None]:
        """MLflow's exceptions, and those of whatever client its artifact store has, end here."""
        try:
            yield
        except Exception as error:
            logger.warning("%s (run %s): %s", failure, self.run_id, error)

    def _log_config(self, config: TrainConfig) -> None:
        """
        Raises:
            StorageError: the store or its artifact store does not take it; the run is then ended.
        """
        from mlflow.entities import Param, RunTag

        values = config.model_dump(mode="json")
        params = [Param(key, str(value)[:_PARAM_CHARACTERS]) for key, value in flatten(values)]
        tags = [RunTag(key, str(value)) for key, value in describe_environment().items()]
        try:
            for first in range(0, len(params), _PARAMS_PER_CALL):
                self.client.log_batch(self.run_id, params=params[first : first + _PARAMS_PER_CALL])
            self.client.log_batch(self.run_id, tags=tags)
            self.client.log_dict(self.run_id, values, "config.json")
            self.client.set_tag(self.run_id, CONFIG_TAG, "logged")
        except Exception as error:  # an artifact store's client has exceptions of its own
            self.end("FAILED")
            raise StorageError(
                f"MLflow at {self.uri} does not take the run's config.json: {error}",
                hint=f"Artifacts go to {self._artifact_uri}: does it exist, and do this node's credentials allow writing?",
                field="tracking.uri",
            ) from error


def default_uri() -> str:
    """`MLFLOW_TRACKING_URI`, else the SQLite store under POLYTHINK_HOME."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{polythink_home() / 'mlflow' / 'mlflow.db'}"


def warn_of_transformers_limit() -> None:
    """Says at the start, not after the training, that MLflow does not know the installed transformers. The registered
    model does not depend on it: it has a flavour of its own."""
    from mlflow.ml_package_versions import _ML_PACKAGE_VERSIONS
    from packaging.version import Version

    limits, installed = _ML_PACKAGE_VERSIONS["transformers"]["models"], package_version("transformers")
    if installed and not Version(limits["minimum"]) <= Version(installed) <= Version(limits["maximum"]):
        logger.warning(
            "MLflow supports transformers %s to %s; installed is %s. Load the registered model with mlflow.pyfunc, not "
            "with mlflow.transformers.",
            *(limits["minimum"], limits["maximum"], installed),
        )


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys with their leaves."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The numeric leaves of `values` under dotted keys; trainers log some numbers as text."""
    found: dict[str, float] = {}
    for key, value in flatten(values):
        try:
            found[key] = float(value) if isinstance(value, int | float | str) else float("nan")
        except ValueError:
            continue
        if value is None or isinstance(value, list | bool | tuple):
            del found[key]
    return found


def _key(name: str) -> str:
    """`name` with what MLflow's metric names may not hold replaced."""
    return re.sub(r"[^\w./ -]", "_", name)[:250]


def _client(uri: str, registry_uri: str | None) -> "MlflowClient":
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for chatty in ("mlflow", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri, registry_uri=registry_uri or uri)


def _reach(uri: str, call: Callable[[], T]) -> T:
    """`call()`, a store that does not answer being a StorageError, and one that cannot be read here a ConfigError."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import ArgumentError, OperationalError

    uri = re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", uri)  # errors are shown to more people than passwords are
    try:
        return within(_REACH_S, call)
    except (ImportError, ArgumentError) as error:  # a database whose driver is not installed, or does not exist
        raise ConfigError(
            f"tracking.uri={uri!r} cannot be read here: {error}",
            hint="Install the database's driver, or give the one there is: postgresql+psycopg://…",
            field="tracking.uri",
        ) from None
    except OperationalError as error:
        reason = str(error.orig).strip().splitlines()[0]
        raise StorageError(
            f"the database of tracking.uri={uri!r} does not answer: {reason}",
            hint="Is it running?",
            field="tracking.uri",
        ) from None
    except TimeoutError as error:
        raise StorageError(f"MLflow at {uri}: {error}", hint="Is it running?", field="tracking.uri") from None
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            raise ConfigError(f"MLflow at {uri}: {error.message}", field="tracking.uri") from None
        raise StorageError(
            f"MLflow at {uri} does not answer: {error.message}",
            hint="Is it running? See tracking.uri.",
            field="tracking.uri",
        ) from None


def _experiment_id(client: "MlflowClient", name: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=_artifact_root(uri))
        except MlflowException as error:
            experiment = client.get_experiment_by_name(name)  # another run made it meanwhile
            if experiment is None:
                raise error
    if experiment.lifecycle_stage != "active":
        raise ConfigError(
            f"the MLflow experiment {name!r} is deleted",
            hint="Restore it, or name another.",
            field="tracking.experiment",
        )
    return experiment.experiment_id


def _artifact_root(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: what a server says (None), and beside the runs for a bare database,
    for which MLflow's own default is ./mlruns of whatever directory the driver was started in."""
    is_database = uri.partition(":")[0].partition("+")[0] in DATABASES
    return (polythink_home() / "mlflow" / "artifacts").as_uri() if is_database else None


def _find_run(client: "MlflowClient", experiment_id: str, job_id: str) -> str | None:
    runs = client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{job_id}'", max_results=1)
    return runs[0].info.run_id if runs else None
