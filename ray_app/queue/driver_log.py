"""Copies of drivers' logs in their run directories, where they outlive the Ray head."""

import time
from collections.abc import Callable
from pathlib import Path

from serving.jobs import JobRecord
from training.errors import StorageError
from training.run_dir import RunDir

BYTES_PER_S = 2_000_000
"""Ray hands out a log only whole: the longer it is, the less often it is asked for."""


class LogCopies:
    """Copies of the logs of running jobs, each brought up to date when it is due."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def copy(self, job: JobRecord, read: Callable[[str], str], *, last: bool = False) -> None:
        """Brings the copy of the current attempt's log up to date: whole lines, or all of it at the `last` call.

        Raises:
            StorageError: the copy cannot be written.
            Exception: what `read` raises.
        """
        assert job.ray_job_id is not None
        now = time.monotonic()
        if not last and now < self._due.get(job.ray_job_id, 0):
            return
        text = read(job.ray_job_id).encode()
        self._due[job.ray_job_id] = now + len(text) / BYTES_PER_S
        if last:
            self._due.pop(job.ray_job_id)
        path = RunDir(Path(job.run_dir)).log_path
        try:
            append_attempt(path, job.attempt, text if last else text[: text.rfind(b"\n") + 1])
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}", hint="Is the disk full, or the run directory gone?"
            ) from error


def append_attempt(path: Path, attempt: int, text: bytes) -> None:
    """Makes `text` the part of the log at `path` that belongs to `attempt`; earlier attempts' parts stay.

    What is there already is not written again, and a byte's place depends on its text alone, so that two processes
    doing this at once write the same file.
    """
    header = f"\n===== attempt {attempt} =====\n".encode() if attempt > 1 else b""
    whole = path.read_bytes() if path.exists() else b""
    start = whole.find(header) if header in whole else len(whole)
    if fresh := (header + text)[len(whole) - start :]:
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(len(whole))
            file.write(fresh)
