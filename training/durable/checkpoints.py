"""Checkpoints in the run directory: written beside, renamed, marked complete with checksums; a torn one is never resumed from.

Training hands over bytes, which takes as long as copying the adapter and its optimizer state to host memory; a thread
writes them while it goes on (`Background`).

```
checkpoints/step-00000050/
  adapter_model.safetensors, adapter_config.json, optimizer.pt, scheduler.pt, trainer_state.json
  COMPLETE      sha256 of each file; written last
```
Nothing in them depends on the number of workers: adapters and optimizer are replicated, the data position is the step, and
dropout draws from a seed of its own per row (`training.rows.batches`).
"""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from training.errors import StorageError
from training.run_dir import read_json, write_json

MARKER = "COMPLETE"

logger = logging.getLogger(__name__)


class Background:
    """Saves checkpoints in a thread of its own, one at a time.

    Args:
        root: directory of the checkpoints.
        keep: how many are kept.
        then: called in the thread with each whole checkpoint, such as to copy it elsewhere.
    """

    def __init__(self, root: Path, keep: int, then: Callable[[Path], None] = lambda checkpoint: None):
        self.root = root
        self._keep = keep
        self._then = then
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def save(self, step: int, files: Mapping[str, bytes]) -> None:
        """Begins to save `files`, after waiting for the save before.

        Raises:
            StorageError: the save before failed.
        """
        self.finish()
        self._last = self._thread.submit(self._save, step, files)

    def finish(self) -> None:
        """Waits until what was handed over is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _save(self, step: int, files: Mapping[str, bytes]) -> None:
        self._then(save(self.root, step, files, keep=self._keep))


def save(root: Path, step: int, files: Mapping[str, bytes], *, keep: int) -> Path:
    """Makes `root/step-…` of `files`, then deletes the oldest beyond `keep`.

    Raises:
        StorageError: the disk cannot be written, or has less room than `files` need: found before anything is written.
    """
    final = root / f"step-{step:08d}"
    beside = root / f".{final.name}.partial"
    size_bytes = sum(map(len, files.values()))
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        if shutil.disk_usage(beside).free < size_bytes:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size_bytes / 2**20:,.0f} MiB are needed")
        for name, content in files.items():
            _write(beside / name, content)
        write_json(beside / MARKER, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()})
        shutil.rmtree(final, ignore_errors=True)  # a step done again after a failure
        beside.rename(final)
    except OSError as error:
        raise StorageError(
            f"cannot write the checkpoint {final}: {error.strerror or error}",
            hint="Free space, or lower checkpoint.keep.",
        ) from error
    for old in _all(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _write(path: Path, content: bytes) -> None:
    """Onto the disk itself: older checkpoints are deleted once this one is there, and a power failure must not take both."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def newest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`.

    Torn ones that lie before it are named in the log and deleted, since `save` would count them among those to keep.
    """
    for checkpoint in _all(root):
        fault = _fault(checkpoint)
        if fault is None:
            return checkpoint
        logger.warning("Deleting the torn checkpoint %s: %s", checkpoint.name, fault)
        shutil.rmtree(checkpoint, ignore_errors=True)
    return None


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _all(root: Path) -> list[Path]:
    """Checkpoints, newest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if re.fullmatch(r"step-\d{8}", path.name)), reverse=True)


def _fault(checkpoint: Path) -> str | None:
    try:
        checksums = read_json(checkpoint / MARKER)
    except ValueError:
        return "its completeness marker is cut"
    if checksums is None:
        return "it has no completeness marker"
    for name, expected in checksums.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if _sha256(checkpoint / name) != expected:
            return f"{name} has another checksum"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
