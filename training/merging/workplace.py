"""A directory that appears whole or not at all: made beside its place, renamed at the end, taken up again after a kill."""

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.errors import MergeError, PolythinkError, StorageError
from training.merging.survival import Survival, Written

JOURNAL = ".journal"


class Journal:
    """The tensors that are finished, one JSON line each, after a line that says of which rewrite."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.done: dict[str, Written] = {}
        self._lock = threading.Lock()
        if path.exists():
            for line in path.read_text(encoding="utf-8").split("\n")[1:-1]:  # a line being written has no end yet
                name, xxh128, survival = json.loads(line)
                self.done[name] = Written(xxh128, survival and Survival(**survival))
        else:
            path.write_text(json.dumps(identity) + "\n", encoding="utf-8")

    def add(self, name: str, written: Written) -> None:
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            self.done[name] = written
            survival = written.survival and asdict(written.survival)
            file.write(json.dumps([name, written.xxh128, survival]) + "\n")

    @staticmethod
    def belongs_to(path: Path, identity: dict[str, Any]) -> bool:
        """Whether the journal at `path` is of the same rewrite."""
        if not path.exists():
            return False
        first, newline, _ = path.read_text(encoding="utf-8").partition("\n")
        return bool(newline) and json.loads(first) == identity


def boot_id() -> str:
    """Changes when the machine restarts: what a journal says was written may then not have reached the disk."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@contextmanager
def work_directory(out: Path, size: int, identity: dict[str, Any]) -> Iterator[Path]:
    """A hidden directory beside `out`, renamed to it at the end, removed on failure.

    Args:
        out: must not exist.
        size: bytes that will be written.
        identity: of what is made. What a killed attempt at the same left is kept, if it has a journal; else it is emptied.

    Raises:
        MergeError: another process is at work on `out`.
        StorageError: `out` exists, cannot be made, or the disk is full.
    """
    refuse_existing(out)
    work = out.parent / f".{out.name}.merging"
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise _storage_error(error, out, size) from error
    try:
        _lock(lock, out)
        if not Journal.belongs_to(work / JOURNAL, identity):
            for path in work.iterdir():
                path.unlink()
        try:
            _check_space(out, work, size)
            yield work
            os.rename(work, out)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)
            raise _storage_error(error, out, size) from error
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def refuse_existing(out: Path) -> None:
    """Raises StorageError if there is anything at `out`, or could not be."""
    try:
        exists = out.exists()
    except OSError as error:  # a name too long, a directory that may not be read
        raise StorageError(f"{out} cannot be made: {error.strerror}") from None
    if exists:
        raise StorageError(f"{out} already exists", hint="Choose another directory; models are never overwritten.")


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MergeError(f"another merge is writing {out}", hint="Wait for it, or choose another target.") from None


def _check_space(out: Path, work: Path, size: int) -> None:
    there = sum(path.stat().st_blocks * 512 for path in work.iterdir())
    free = shutil.disk_usage(out.parent).free
    if free + there < size:
        raise StorageError(
            f"{out} needs {size / 2**30:.1f} GiB, and its disk has {free / 2**30:.1f} GiB free",
            hint="Free some space, or merge to another disk.",
        )


def _storage_error(error: OSError, out: Path, size: int) -> PolythinkError:
    if isinstance(error, PolythinkError):
        return error
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageError(f"the disk filled up while writing {out}", hint=f"It needs {size / 2**30:.1f} GiB.")
    return StorageError(f"cannot write {out}: {error.strerror or error}")
