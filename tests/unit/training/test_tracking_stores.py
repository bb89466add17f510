"""MLflow with its runs in PostgreSQL and its artifacts on S3: real servers of both, on loopback."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import postgres
from tests.unit.training.mlflow_server import mlflow_server
from tests.unit.training.object_store import bucket
from tests.unit.training.test_tracking import make_config, write_model
from training.errors import StorageError
from training.run_dir import RunDir
from training.tracking import registry
from training.tracking.run import Tracking


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL under which artifacts go."""
    for chatty in ("botocore", "boto3", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch, bucket(patch) as url:
        yield f"{url}/mlflow"


@pytest.fixture(scope="module")
def server(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with postgres.server() as database, mlflow_server(database, s3, log) as url:
        yield url


def new_run(home: Path, name: str = "job-1") -> RunDir:
    return RunDir.create(home / "runs" / name, make_config())


def test_model_goes_to_s3_and_comes_back_by_its_name(server, s3, home, random_base, tmp_path):
    import mlflow

    config = make_config(uri=server, alias="champion")
    tracking = Tracking.start(config, new_run(home))
    model_dir = tracking.model_dir
    assert model_dir == home / "runs" / "job-1" / "model"  # on this disk: S3 is no place to merge in
    shutil.copytree(random_base, model_dir)
    tracking.log_metrics({"loss": 1.5}, 1)
    result = tracking.register(model_dir, {"base": "some/base"})
    tracking.log_result({"evaluation": {"after": {"de": 0.9}}})
    tracking.end("FINISHED")
    again = Tracking.start(config, RunDir(home / "runs" / "job-1")).register(model_dir, {"base": "some/base"})

    assert result == again == {"registered_model": "thinker/1", "registration": "registered", "reason": None}
    version = tracking.client.get_model_version_by_alias("thinker", "champion")
    assert version.source.startswith(f"{s3}/")
    assert version.tags == {"base": "some/base", "polythink.job_id": "job-1"}
    artifacts = {item.path for item in tracking.client.list_artifacts(tracking.run_id)}
    assert artifacts == {"config.json", "result.json", "model"}
    assert "model/_COMPLETE" in {item.path for item in tracking.client.list_artifacts(tracking.run_id, "model")}

    mlflow.set_tracking_uri(server)
    try:
        downloaded = Path(mlflow.artifacts.download_artifacts("models:/thinker/1", dst_path=str(tmp_path)))
        model = mlflow.pyfunc.load_model("models:/thinker@champion")
    finally:
        mlflow.set_tracking_uri(None)
    for path in random_base.iterdir():
        assert (downloaded / path.name).read_bytes() == path.read_bytes(), path.name
    answer = model.predict(model.input_example, params={"max_new_tokens": 4})
    assert answer["finish_reason"][0] in {"length", "stop"}


def test_lost_bucket_fails_a_registration_only_and_is_said_at_the_start(server, home, monkeypatch):
    monkeypatch.setattr(registry, "WAIT_S", 0.5)
    tracking = Tracking.start(make_config(uri=server, registered_model="lost"), new_run(home, "job-2"))
    write_model(tracking.model_dir)
    httpx.post(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset").raise_for_status()
    result = tracking.register(tracking.model_dir, {})
    tracking.end("FINISHED")
    assert result["registration"] == "failed"
    assert "NoSuchBucket" in str(result["reason"])
    assert "lost" not in [model.name for model in tracking.client.search_registered_models()]
    run = tracking.client.get_run(tracking.run_id)
    assert run.info.status == "FINISHED"

    with pytest.raises(StorageError, match="does not take the run's config") as caught:
        Tracking.start(make_config(uri=server), new_run(home, "job-3"))
    assert "s3://" in caught.value.hint
    [failed] = tracking.client.search_runs([run.info.experiment_id], "tags.`polythink.job_id` = 'job-3'")
    assert failed.info.status == "FAILED"
