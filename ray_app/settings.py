"""The service's settings: fields of `Settings`, from arguments of the application, else POLYTHINK_* variables."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ray_app.generator.settings import GeneratorSettings
from training.config import PRESETS
from training.run_dir import polythink_home

DAY_S = 86_400


class Settings(BaseSettings):
    """What the service can be told. Every value can come as a variable: `POLYTHINK_QUEUE_TIMEOUT_S=3600`."""

    model_config = SettingsConfigDict(env_prefix="POLYTHINK_", env_nested_delimiter="__", extra="forbid", frozen=True)

    home: Path = Field(default_factory=polythink_home)
    """Runs, the SQLite job store, uploads, MLflow's store. On a storage that every node sees."""
    storage: str = ""
    """URL under which runs have a copy (`s3://bucket/prefix`), where nodes share no disk; empty is `home` alone."""
    database_url: str = ""
    """SQLAlchemy URL of the job store; empty is SQLite in `home`."""
    data_roots: Annotated[tuple[Path, ...], NoDecode] = ()
    """Directories that requests may name files in, separated by `:`; empty is `home` and the presets' folder."""
    api_keys_file: Path | None = None
    """File of API keys; None leaves the API open, which suits loopback only."""
    mlflow_tracking_uri: str | None = Field(default=None, validation_alias="MLFLOW_TRACKING_URI")
    """Where jobs log to; None is SQLite in `home`."""
    ray_dashboard_url: str | None = None
    """The dashboard as users reach it, for links; None takes Ray's own address."""
    poll_interval_s: float = Field(default=1.0, gt=0, le=30)
    """Pause between two rounds of the dispatcher."""
    max_running_jobs: int | None = Field(default=None, ge=1)
    """Jobs at once; None is bounded by the cluster alone."""
    driver_command: tuple[str, ...] = ()
    """What is run with a run directory as its last argument, as a JSON list; empty is this interpreter's `-m training`.
    For nodes whose interpreter lies elsewhere, or a profiler in front."""
    queue_timeout_s: float = Field(default=DAY_S, gt=0)
    """Longest wait in the queue of jobs that give none."""
    overtake_limit: int = Field(default=8, ge=0)
    """Jobs that may start before a waiting one that is ahead of them but does not fit yet."""
    generator: GeneratorSettings = GeneratorSettings()
    """For example POLYTHINK_GENERATOR__NUM_GPUS=1."""
    api_replicas: int = Field(default=1, ge=1)
    max_upload_mib: float = Field(default=512, gt=0)
    keep_jobs: int = Field(default=10_000, ge=1)
    """Ended jobs kept in the store and on disk, newest first."""
    keep_jobs_days: float = Field(default=365, gt=0)

    @field_validator("home", "api_keys_file", mode="after")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return value and value.expanduser().resolve()

    @field_validator("data_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home / 'jobs.db'}"

    @property
    def readable_roots(self) -> tuple[Path, ...]:
        return self.data_roots or (self.home, PRESETS)

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_tracking_uri or f"sqlite:///{self.home / 'mlflow' / 'mlflow.db'}"

    @property
    def on_head(self) -> bool:
        """Whether replicas must run on the head: SQLite is a file there, and drivers' working copies of runs are."""
        return self.store_url.startswith("sqlite") or bool(self.storage)
