"""The run directory: the contract between a training run and whoever watches it. This module owns its paths.

```
RUN_DIR/
  config.json       the resolved TrainConfig; the run is started from it
  progress.json     phase and numbers of the moment, replaced whole
  metrics.jsonl     one line per logging step
  data/             tokenised rows, an Arrow data set
  effective.json    what really runs: workers, strategy, attention backend, …
  driver.log        what the driver printed (the service copies it there)
  checkpoints/      Ray Train's checkpoints
  adapter/          the trained adapter, in PEFT's layout
  evaluation/       reasoning-language figures before and after
  result.json       written once, at the end: SUCCEEDED with where things are, or FAILED with the reason
```
"""

import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from training.config import TrainConfig, parse_config
from training.errors import ConfigError, StorageError


def polythink_home() -> Path:
    """Where runs, the job store, uploads and MLflow's store lie: `$POLYTHINK_HOME`, else `~/.polythink`."""
    return Path(os.environ.get("POLYTHINK_HOME") or Path.home() / ".polythink").expanduser().resolve()


class Phase(StrEnum):
    """Where a run stands. Values equal the job statuses of the same name."""

    STARTING = "STARTING"  # data checked, model fetched, workers being placed
    RUNNING = "RUNNING"  # optimizer steps
    MERGING = "MERGING"  # adapter added into the base, and the proof of it
    EVALUATING = "EVALUATING"  # reasoning language before and after; registration
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


def write_json(path: Path, value: Any) -> None:
    """Writes `value` beside `path` and renames it there: readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)  # mkstemp makes it private; other users' tools read these
    os.replace(temporary, path)


def read_json(path: Path) -> Any | None:
    """The file's value, or None when it does not exist (yet)."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, and the reading and writing of its small files."""

    root: Path

    @classmethod
    def create(cls, root: Path | str, config: TrainConfig) -> "RunDir":
        """Makes a fresh run directory holding `config`.

        Raises:
            StorageError: `root` already holds a run, or cannot be made.
        """
        run_dir = cls(Path(root))
        if run_dir.config_path.exists():
            raise StorageError(
                f"{root} already holds a run",
                hint="Resume it, or choose another directory; runs are never overwritten.",
            )
        try:
            run_dir.root.mkdir(parents=True, exist_ok=True)
            write_json(run_dir.config_path, config.model_dump(mode="json"))
        except OSError as error:  # a file where a directory should be, no right to write, a full disk
            raise StorageError(
                f"cannot make the run directory {root}: {error.strerror or error}",
                hint="POLYTHINK_HOME must be a directory that can be written.",
            ) from error
        return run_dir

    @classmethod
    def open(cls, root: Path | str) -> "RunDir":
        """An existing run directory.

        Raises:
            StorageError: there is no `config.json` in `root`.
        """
        run_dir = cls(Path(root))
        if not run_dir.config_path.exists():
            raise StorageError(f"{root} is not a run directory: it has no config.json")
        return run_dir

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def config_path(self) -> Path:
        return self.root / "config.json"

    @property
    def progress_path(self) -> Path:
        return self.root / "progress.json"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def result_path(self) -> Path:
        return self.root / "result.json"

    @property
    def log_path(self) -> Path:
        return self.root / "driver.log"

    @property
    def lock_path(self) -> Path:
        """Held with flock(2) by the driver as long as it lives."""
        return self.root / ".lock"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.root / "adapter"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def effective_path(self) -> Path:
        return self.root / "effective.json"

    @property
    def evaluation(self) -> Path:
        return self.root / "evaluation"

    def config(self) -> TrainConfig:
        """The resolved configuration.

        Raises:
            ConfigError: `config.json` holds none.
        """
        try:
            return parse_config(json.loads(self.config_path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.config_path} is not JSON: {error}", field="config") from None

    def progress(self) -> dict[str, Any]:
        """What `write_progress` last wrote, or {} before the run said anything."""
        return read_json(self.progress_path) or {}

    def write_progress(self, phase: Phase, **numbers: Any) -> None:
        """Replaces `progress.json`; numbers of the earlier phase are kept unless given anew.

        Args:
            phase: where the run stands.
            numbers: step, total_steps, percent, eta_s, loss, tokens_per_s_per_gpu, peak_gpu_gib, message.
        """
        write_json(self.progress_path, {**self.progress(), **numbers, "phase": phase, "updated_at": time.time()})

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        """Adds one line to `metrics.jsonl`; called by one process only."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, ensure_ascii=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`, oldest first; one that a full disk or a kill cut short is left out."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8").split("\n")[:-1]  # a line being written has no end yet
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def result(self) -> dict[str, Any] | None:
        """What `write_result` wrote; None while there is none, and for a file that is not of its making."""
        try:
            result = read_json(self.result_path)
        except ValueError:
            return None
        return result if isinstance(result, dict) and "status" in result else None

    def write_result(self, phase: Phase, **result: Any) -> None:
        """Ends the run: SUCCEEDED with adapter, model, registered_model, …, or FAILED with `error`."""
        write_json(self.result_path, {"status": phase, "ended_at": time.time(), **result})
