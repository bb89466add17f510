"""MLflow with real stores: SQLite in a temporary directory, and one real server."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.training.mlflow_server import mlflow_server
from tests.unit.training.unity_catalog import UnityCatalog, unity_catalog
from training.config import TrainConfig, parse_config
from training.errors import ConfigError, StorageError
from training.run_dir import RunDir
from training.tracking import registry
from training.tracking import run as tracking_module
from training.tracking.mlflow_model import _conversation
from training.tracking.run import Tracking


def make_config(**tracking) -> TrainConfig:
    values = {"model": {"path": "some/base"}, "data": {"path": "some/rows"}, "scaling": {"device": "cpu"}}
    return parse_config(values | {"name": "thinker", "tracking": tracking}).resolved()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes seconds, copying the file does not."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def run_dir(home: Path, empty_store: Path) -> RunDir:
    (home / "mlflow").mkdir(exist_ok=True)
    shutil.copyfile(empty_store, home / "mlflow" / "mlflow.db")
    return RunDir.create(home / "runs" / "job-1", make_config())


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_run_holds_config_metrics_environment_and_ends(run_dir):
    tracking = Tracking.start(make_config(), run_dir)
    rank0 = Tracking.attach(tracking.run_id, tracking.uri)
    for step in range(3):
        rank0.log_metrics({"loss": 3.0 - step, "grad_norm": "0.5", "note": "text", "nested": {"x": 1}}, step)
    rank0.flush()
    tracking.log_dataset("some/rows", "main", "f" * 64, rows=7)
    tracking.log_result({"evaluation": {"before": {"de": 0.0}, "after": {"de": 0.9}}, "model": "somewhere"})
    tracking.end("FINISHED")
    run = tracking.client.get_run(tracking.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["lora.r"] == "8"
    assert run.data.metrics["loss"] == 1.0
    assert run.data.metrics["grad_norm"] == 0.5
    assert run.data.metrics["evaluation.after.de"] == 0.9
    assert "note" not in run.data.metrics
    assert len(tracking.client.get_metric_history(tracking.run_id, "loss")) == 3
    assert run.data.tags["version.mlflow"].startswith("3.")
    assert run.inputs.dataset_inputs[0].dataset.digest == "f" * 36
    assert {item.path for item in tracking.client.list_artifacts(tracking.run_id)} == {"config.json", "result.json"}


def test_resumed_job_reopens_its_run_and_logs_no_params_again(run_dir):
    first = Tracking.start(make_config(), run_dir)
    first.end("FAILED")
    changed = make_config().model_copy(update={"optim": make_config().optim.model_copy(update={"max_steps": 99})})
    second = Tracking.start(changed, run_dir)
    assert second.run_id == first.run_id
    assert Tracking.start(changed, run_dir, run_id=first.run_id).run_id == first.run_id
    run = second.client.get_run(second.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params["optim.max_steps"] == "None"


def test_a_run_whose_config_could_not_be_logged_gets_it_from_the_next_attempt(run_dir, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no right to write")

    from mlflow import MlflowClient

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_dict", refuse)
        for _ in range(2):  # the second finds the first one's run
            with pytest.raises(StorageError, match="does not take the run's config"):
                Tracking.start(make_config(), run_dir)
    tracking = Tracking.start(make_config(), run_dir)
    assert [item.path for item in tracking.client.list_artifacts(tracking.run_id)] == ["config.json"]
    run = tracking.client.get_run(tracking.run_id)
    assert len(tracking.client.search_runs([run.info.experiment_id])) == 1
    assert run.data.params["lora.r"] == "8"


def test_artifacts_of_a_bare_database_lie_beside_the_runs(run_dir, empty_store, tmp_path, monkeypatch):
    """MLflow's own default is ./mlruns of the directory that the driver happens to be started in."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(empty_store, tmp_path / "other.db")
    tracking = Tracking.start(make_config(uri=f"sqlite:///{tmp_path}/other.db"), run_dir)
    assert tracking.model_dir.is_relative_to(run_dir.root.parent.parent / "mlflow" / "artifacts")
    assert not (tmp_path / "mlruns").exists()


def test_long_values_are_cut_in_params_and_whole_in_the_artifact(run_dir):
    path = "./" + "x" * 8000
    config = make_config()
    config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
    tracking = Tracking.start(config, run_dir)
    assert len(tracking.client.get_run(tracking.run_id).data.params["data.path"]) == 500
    artifacts = tracking.model_dir.parent
    assert path in (artifacts / "config.json").read_text()


def test_registering_makes_one_version_however_often(run_dir):
    tracking = Tracking.start(make_config(alias="champion"), run_dir)
    model_dir = write_model(tracking.model_dir)
    first = tracking.register(model_dir, {"polythink.adherence": 0.97})
    again = Tracking.start(make_config(alias="champion"), run_dir).register(model_dir, {"polythink.adherence": 0.97})
    assert first == again == {"registered_model": "thinker/1", "registration": "registered", "reason": None}
    version = tracking.client.get_model_version_by_alias("thinker", "champion")
    assert version.tags == {"polythink.adherence": "0.97", "polythink.job_id": "job-1"}
    assert Path(version.source) == model_dir
    other = RunDir.create(run_dir.root.parent / "job-2", make_config())
    tracking = Tracking.start(make_config(), other)
    assert tracking.register(write_model(tracking.model_dir), {})["registered_model"] == "thinker/2"


@pytest.mark.parametrize("after", ["create_registered_model", "create_model_version", "set_model_version_tag"])
def test_registration_that_was_cut_off_is_finished_by_the_next(run_dir, monkeypatch, after):
    class Killed(BaseException):
        pass

    def call_and_die(*args, **kwargs):
        call(*args, **kwargs)
        raise Killed

    tracking = Tracking.start(make_config(alias="champion"), run_dir)
    model_dir = write_model(tracking.model_dir)
    call = getattr(tracking.client, after)
    monkeypatch.setattr(tracking.client, after, call_and_die)
    with pytest.raises(Killed):
        tracking.register(model_dir, {"base": "some/base"})
    again = Tracking.start(make_config(alias="champion"), run_dir)
    assert again.register(model_dir, {"base": "some/base"})["registered_model"] == "thinker/1"
    [version] = again.client.search_model_versions("name='thinker'")
    assert version.tags == {"base": "some/base", "polythink.job_id": "job-1"}


def test_failed_registration_is_an_answer_and_leaves_no_empty_model(run_dir, monkeypatch):
    monkeypatch.setattr(registry, "WAIT_S", 0.5)
    tracking = Tracking.start(make_config(), run_dir)
    model_dir = write_model(tracking.model_dir)
    monkeypatch.setattr(tracking.client, "create_model_version", _unavailable)
    result = tracking.register(model_dir, {})
    assert result["registration"] == "failed"
    assert "maintenance" in result["reason"]
    assert tracking.client.search_registered_models() == []


def test_a_model_that_another_job_registered_meanwhile_is_not_deleted(run_dir, monkeypatch):
    monkeypatch.setattr(registry, "WAIT_S", 0.5)
    tracking = Tracking.start(make_config(), run_dir)
    model_dir = write_model(tracking.model_dir)
    create = tracking.client.create_model_version

    def after_another(name, source, run_id):
        create(name, source, "another-run")
        _unavailable()

    monkeypatch.setattr(tracking.client, "create_model_version", after_another)
    assert tracking.register(model_dir, {})["registration"] == "failed"
    assert [model.name for model in tracking.client.search_registered_models()] == ["thinker"]


def _unavailable(*args, **kwargs):
    from mlflow.exceptions import MlflowException

    raise MlflowException("down for maintenance")


def test_metrics_that_cannot_be_written_are_warned_about_once(run_dir, caplog):
    tracking = Tracking.start(make_config(), run_dir)
    lost = Tracking.attach("no-such-run", tracking.uri)
    for step in range(5):
        lost.log_metrics({"loss": 1.0}, step)
    lost.flush()
    assert sum("do not reach MLflow" in record.message for record in caplog.records) == 1
    lost.end("FINISHED")


def test_absent_server_and_unknown_run_are_said_at_the_start(run_dir, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(StorageError, match="does not answer"):
            Tracking.start(make_config(uri=uri), run_dir)
    with pytest.raises(ConfigError, match="no-such-run"):
        Tracking.start(make_config(), run_dir, run_id="no-such-run")


@pytest.mark.parametrize(
    ("uri", "error", "message"),
    [
        ("mysql://user:secret@127.0.0.1:1/db", ConfigError, "No module named 'MySQLdb'"),
        ("postgresql+nothing://user:secret@127.0.0.1:1/db", ConfigError, "Can't load plugin"),
        ("postgresql://user:secret@127.0.0.1:1/db", StorageError, "does not answer: connection failed"),
    ],
)
def test_databases_that_cannot_be_read_are_said_without_their_password(uri, error, message, run_dir):
    with pytest.raises(error, match=message) as caught:
        Tracking.start(make_config(uri=uri), run_dir)
    assert "user:***@127.0.0.1:1" in caught.value.message
    assert "secret" not in caught.value.message
    assert (caught.value.field, bool(caught.value.hint)) == ("tracking.uri", True)


@pytest.fixture
def server(run_dir: RunDir, home: Path) -> Iterator[str]:
    """`mlflow server` as `polythink up` starts it, over the store of `home`."""
    artifacts = f"{home}/mlflow/artifacts"
    with mlflow_server(f"sqlite:///{home}/mlflow/mlflow.db", artifacts, home / "server.log") as url:
        yield url


def test_whole_life_through_a_server(server, run_dir):
    tracking = Tracking.start(make_config(uri=server, alias="champion"), run_dir)
    tracking.log_metrics({"loss": 1.5}, 1)
    result = tracking.register(write_model(tracking.model_dir), {"a": "b"})
    tracking.end("FINISHED")
    assert result["registered_model"] == "thinker/1", result
    run = tracking.client.get_run(tracking.run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 1.5})


def test_registered_version_downloads_in_place_and_answers(run_dir, random_base):
    import mlflow
    import pandas

    tracking = Tracking.start(make_config(alias="champion"), run_dir)
    shutil.copytree(random_base, tracking.model_dir)
    weights = {path.name: path.stat().st_ino for path in tracking.model_dir.glob("*.safetensors")}
    assert tracking.register(tracking.model_dir, {})["registration"] == "registered"

    mlflow.set_tracking_uri(tracking.uri)
    try:
        model = mlflow.pyfunc.load_model("models:/thinker@champion")
        downloaded = Path(mlflow.artifacts.download_artifacts("models:/thinker/1"))
    finally:
        mlflow.set_tracking_uri(None)
    assert downloaded == tracking.model_dir
    assert {path.name: path.stat().st_ino for path in downloaded.glob("*.safetensors")} == weights
    assert model._model_impl._loaded is None  # nothing is read before the first question

    answers = model.predict(model.input_example, params={"max_new_tokens": 8})
    assert list(answers.columns) == ["reasoning", "answer", "finish_reason"]
    assert answers["finish_reason"][0] in {"length", "stop"}
    with pytest.raises(mlflow.exceptions.MlflowException, match="messages"):
        model.predict(pandas.DataFrame([{"prompt": "hello"}]))
    assert [column.name for column in model.metadata.signature.outputs.inputs] == list(answers.columns)


def test_language_reaches_the_prompt():
    asked = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    assert _conversation(asked | {"reasoning_language": "de"})[0]["content"].startswith("reasoning language: German")
    assert "Be brief." in _conversation(asked | {"reasoning_language": "de"})[0]["content"]
    assert _conversation(asked | {"reasoning_language": float("nan")}) == asked["messages"]


def test_transformers_beyond_mlflows_limit_is_said_at_the_start(run_dir, monkeypatch, caplog):
    Tracking.start(make_config(), run_dir)
    assert "MLflow supports transformers" not in caplog.text
    monkeypatch.setattr(tracking_module, "package_version", lambda name: "99.0")
    Tracking.start(make_config(), run_dir)
    assert "installed is 99.0" in caplog.text


@pytest.fixture
def catalog(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[UnityCatalog]:
    with unity_catalog() as catalog:
        monkeypatch.setenv("DATABRICKS_HOST", catalog.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", "not-a-token")
        monkeypatch.setenv("MLFLOW_USE_DATABRICKS_SDK_MODEL_ARTIFACTS_REPO_FOR_UC", "true")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield catalog


UNITY = {"registry_uri": "databricks-uc", "registered_model": "main.models.thinker", "alias": "champion"}


def test_unity_catalog_gets_one_version_with_files_tags_and_alias(catalog, run_dir):
    tracking = Tracking.start(make_config(**UNITY), run_dir)
    model_dir = write_model(tracking.model_dir)
    result = tracking.register(model_dir, {"base": "some/base"})
    again = Tracking.start(make_config(**UNITY), run_dir).register(model_dir, {"base": "some/base"})
    assert (
        result == again == {"registered_model": "main.models.thinker/1", "registration": "registered", "reason": None}
    )
    assert len(catalog.versions) == 1
    assert catalog.versions[0]["status"] == "READY"
    assert catalog.versions[0]["run_id"] == tracking.run_id
    uploads = [path for method, path, _ in catalog.requests if path.endswith("model-versions/create")]
    assert len(uploads) == 1
    uploaded = {Path(path).name for path in catalog.files if path.startswith("/Models/main/models/thinker/1/")}
    assert uploaded >= {"config.json", "MLmodel"}
    tags = [body for _, path, body in catalog.requests if path.endswith("model-versions/set-tag")]
    assert {"name": "main.models.thinker", "version": "1", "key": "base", "value": "some/base"} in tags
    aliases = [body for method, path, body in catalog.requests if method == "POST" and path.endswith("alias")]
    assert aliases[0] == {"name": "main.models.thinker", "alias": "champion", "version": "1"}
    assert (model_dir / "config.json").exists()  # MLflow's client takes some sources for downloads of its own


def test_version_that_a_crash_left_half_made_is_replaced(catalog, run_dir):
    tracking = Tracking.start(make_config(registry_uri=catalog.url), run_dir)
    model_dir = write_model(tracking.model_dir)
    assert tracking.register(model_dir, {})["registered_model"] == "thinker/1"
    catalog.versions[0]["status"] = "PENDING_REGISTRATION"
    assert tracking.register(model_dir, {})["registered_model"] == "thinker/2"
    assert [version["version"] for version in catalog.versions] == ["2"]


def test_registry_that_is_down_is_waited_for(catalog, run_dir):
    tracking = Tracking.start(make_config(registry_uri=catalog.url), run_dir)
    catalog.failing_requests = 2
    assert tracking.register(write_model(tracking.model_dir), {})["registered_model"] == "thinker/1"
    assert catalog.failing_requests == 0


def test_registry_that_stays_down_fails_the_registration_only(catalog, run_dir, monkeypatch):
    monkeypatch.setattr(registry, "WAIT_S", 0.5)
    tracking = Tracking.start(make_config(registry_uri=catalog.url), run_dir)
    catalog.failing_requests = 1000
    result = tracking.register(write_model(tracking.model_dir), {})
    assert result["registration"] == "failed"
    assert "503" in result["reason"]
    tracking.end("FINISHED")
    assert tracking.client.get_run(tracking.run_id).info.status == "FINISHED"


@pytest.fixture(params=["refuses connections", "takes them and says nothing"])
def dead_host(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as host:
        host.bind(("127.0.0.1", 0))
        if request.param != "refuses connections":
            host.listen()
        yield f"http://127.0.0.1:{host.getsockname()[1]}"


def test_dead_databricks_is_waited_for_no_longer_than_said(catalog, run_dir, dead_host, monkeypatch, caplog):
    """MLflow's client for Databricks asks its host for 5 minutes before its own settings count."""
    monkeypatch.setenv("DATABRICKS_HOST", dead_host)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    monkeypatch.setattr(registry, "WAIT_S", 1.0)
    monkeypatch.setattr(registry, "CHECK_S", 1.0)
    started = time.monotonic()
    tracking = Tracking.start(make_config(**UNITY), run_dir)
    assert "databricks-uc does not answer now" in caplog.text
    result = tracking.register(write_model(tracking.model_dir), {})
    assert time.monotonic() - started < 20
    assert result == {"registered_model": None, "registration": "failed", "reason": "no answer within 1 s"}
    tracking.end("FINISHED")
    assert tracking.client.get_run(tracking.run_id).info.status == "FINISHED"


def test_missing_credentials_are_said_at_the_start(catalog, run_dir, monkeypatch):
    monkeypatch.delenv("DATABRICKS_HOST")
    monkeypatch.delenv("DATABRICKS_TOKEN")
    with pytest.raises(ConfigError) as caught:
        Tracking.start(make_config(**UNITY), run_dir)
    assert caught.value.field == "tracking.registry_uri"
