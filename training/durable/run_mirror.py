"""A run directory's copy at the storage URL (`training.durable.storage`): who pushes what, and what comes back where.

The driver pushes what it prepared and how it ended. Rank 0, which may be on another node, pushes metrics, progress, checkpoints
and the adapter. A node that has not got the run directory, or lost it, pulls it.

Where a checkpoint is, there are the metrics of every step up to it: they are pushed before it and pulled after it.
"""

import fcntl
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.durable.storage import Mirror, storage_url
from training.errors import StorageError
from training.run_dir import RunDir, polythink_home, write_json

EVERY_S = 5.0
"""Between two looks at what changed while a run trains."""

logger = logging.getLogger(__name__)


class RunMirror:
    """A run directory and its copy at `url`."""

    def __init__(self, run_dir: RunDir, url: str):
        self.run_dir = run_dir
        self.url = f"{url}/runs/{run_dir.id}"
        self.copy = Mirror(run_dir.root, self.url)
        self._pushing_small = threading.Lock()

    @classmethod
    def of(cls, run_dir: RunDir) -> "RunMirror | None":
        """None where POLYTHINK_HOME is the storage root itself."""
        url = storage_url()
        return cls(run_dir, url) if url else None

    @property
    def _small(self) -> tuple[Path, ...]:
        return (self.run_dir.metrics_path, self.run_dir.effective_path, self.run_dir.log_path)

    @property
    def _inputs(self) -> tuple[Path, ...]:
        return (self.run_dir.data, self.run_dir.evaluation, self.run_dir.config_path)

    # the driver

    def bring_config(self) -> None:
        """Makes a run directory whose place here is gone one that can be opened; `restore` does the rest."""
        self.copy.pull(self.run_dir.config_path)

    def restore(self) -> None:
        """Brings back a run that went on elsewhere, or whose directory here is gone."""
        if self._newer_progress():
            self.copy.pull(*self._inputs, self.run_dir.adapter)
            self._pull_checkpoints(self.checkpoints())
            self._follow()
            logger.info("Restored %s from %s", self.run_dir.root, self.url)

    def push_inputs(self, probe: Path) -> None:
        """What workers begin with."""
        self.copy.push(*self._inputs)
        self._push_small()
        self.copy.push(probe)

    def push_outcome(self) -> None:
        """All there is but checkpoints. A failure changes nothing: the outcome is known here."""
        with _only_warning(f"how {self.run_dir.id} ended has no copy"):
            self.copy.push(*self._inputs, self.run_dir.adapter, self.run_dir.result_path)
            self._push_small()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Shows rank 0's progress here while it trains on another node, and brings its adapter in the end."""
        with _repeating(self._follow):
            yield
        self._follow()
        if not self.run_dir.adapter.exists():
            self.copy.pull(self.run_dir.adapter)

    def _follow(self) -> None:
        """Brings what is newer there. The progress is read first and written last: it says that all up to it is here."""
        if progress := self._newer_progress():
            self.copy.pull(*self._small)
            write_json(self.run_dir.progress_path, progress)

    def _newer_progress(self) -> dict[str, Any]:
        """The copy's, when it was written later than the directory here, else {}."""
        there: dict[str, Any] = json.loads(self.copy.read(self.run_dir.progress_path) or b"{}")
        return there if there.get("updated_at", 0) > self.run_dir.progress().get("updated_at", 0) else {}

    def _push_small(self) -> None:
        with self._pushing_small:  # of two threads, the one that read earlier could write later
            self.copy.push(*self._small, self.run_dir.progress_path)

    # workers

    def bring(self, probe: Path, expected: str) -> bool:
        """Makes this node's directory one that the driver's inputs lie in; False when the URL is not the driver's."""
        with self._one_per_node():
            if probe.is_file() and probe.read_text() == expected:
                return True  # another worker of this node was first
            if self.copy.read(probe) != expected.encode():
                return False
            self.copy.pull(*self._inputs, probe)
        return True

    def bring_checkpoints(self, *wanted: Path) -> None:
        """Brings those of `wanted` that this node has not got; by default all, and the metrics so far, which rank 0 goes on from.

        Raises:
            StorageError: one of `wanted` is not there whole.
        """
        with self._one_per_node():
            if wanted:
                self.copy.pull(*[path for path in wanted if not path.exists()])
            else:
                self._pull_checkpoints([path for path in self.checkpoints() if not path.exists()])
                self._follow()

    def _pull_checkpoints(self, paths: Iterable[Path]) -> None:
        """Each for itself: one that is damaged, or deleted meanwhile, leaves the others to go on from."""
        for path in paths:
            with _only_warning(f"{path.name} cannot be used"):
                self.copy.pull(path)

    def push_checkpoint(self, checkpoint: Path) -> None:
        """A whole checkpoint; those that are kept no more go. A failure is for the next one to mend."""
        with _only_warning(f"{checkpoint.name} has no copy"):
            self._push_small()
            self.copy.push(checkpoint)
            for old in self.checkpoints():
                if not old.exists():
                    self.copy.delete(old)

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Pushes progress while rank 0 trains."""
        with _repeating(self._push_small):
            yield

    def push_adapter(self) -> None:
        self.copy.push(self.run_dir.adapter, self.run_dir.evaluation)
        self._push_small()

    # the service

    def push_log(self) -> None:
        with _only_warning(f"the log of {self.run_dir.id} has no copy"):
            self.copy.push(self.run_dir.log_path)

    def delete(self) -> None:
        with _only_warning(f"the copy of {self.run_dir.id} is still there"):
            self.copy.delete(self.run_dir.root)

    def checkpoints(self) -> list[Path]:
        return self.copy.directories(self.run_dir.checkpoints)

    @contextmanager
    def _one_per_node(self) -> Iterator[None]:
        self.run_dir.root.mkdir(parents=True, exist_ok=True)
        with (self.run_dir.root / ".mirror.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def keep_upload(path: str) -> None:
    """Keeps uploaded rows (`file:ID`) at the storage URL, or brings them back from there."""
    url = storage_url()
    if url is None or not re.fullmatch(r"file:[A-Za-z0-9_-]+", path):
        return
    files = polythink_home() / "files"
    rows, mirror = files / f"{path.removeprefix('file:')}.jsonl", Mirror(files, f"{url}/files")
    (mirror.push if rows.exists() else mirror.pull)(rows)


@contextmanager
def _only_warning(consequence: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("%s: %s", consequence, error)


@contextmanager
def _repeating(work: Callable[[], None]) -> Iterator[None]:
    """Does `work` every EVERY_S in a thread; a failure is said once and tried again."""
    ended = threading.Event()

    def loop() -> None:
        quiet = False
        while not ended.wait(EVERY_S):
            try:
                work()
                quiet = False
            except StorageError as error:
                if not quiet:
                    logger.warning("The storage does not answer, trying again: %s", error)
                quiet = True

    thread = threading.Thread(target=loop, name="storage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
