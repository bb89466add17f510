"""Settings: arguments before variables before defaults."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from ray_app.queue.ray_jobs import driver_environment
from ray_app.settings import Settings
from training.config import PRESETS


def test_everything_lies_under_home_unless_told_otherwise(home: Path) -> None:
    settings = Settings()
    assert settings.home == home
    assert settings.store_url == f"sqlite:///{home}/jobs.db"
    assert settings.tracking_uri == f"sqlite:///{home}/mlflow/mlflow.db"
    assert settings.readable_roots == (home, PRESETS)
    assert settings.on_head


def test_runs_at_an_url_have_their_working_copies_on_the_head(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_STORAGE", "s3://bucket/polythink")
    settings = Settings(database_url="postgresql+psycopg://u@h/d")
    assert settings.on_head
    assert driver_environment("/home", "http://mlflow", settings.storage)["POLYTHINK_STORAGE"] == settings.storage


def test_variables_and_arguments(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_DATABASE_URL", "postgresql+psycopg://u@h/d")
    monkeypatch.setenv("POLYTHINK_DATA_ROOTS", "/data:/more")
    monkeypatch.setenv("POLYTHINK_QUEUE_TIMEOUT_S", "60")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    settings = Settings(queue_timeout_s=5)
    assert settings.store_url == "postgresql+psycopg://u@h/d"
    assert not settings.on_head
    assert settings.readable_roots == (Path("/data"), Path("/more"))
    assert settings.queue_timeout_s == 5
    assert Settings().queue_timeout_s == 60
    assert settings.tracking_uri == "http://mlflow"


def test_wrong_ones_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="queue_timeout"):
        Settings(queue_timeout=5)  # type: ignore[call-arg]
    monkeypatch.setenv("POLYTHINK_OVERTAKE_LIMIT", "-1")
    with pytest.raises(ValidationError, match="overtake_limit"):
        Settings()
