"""A checkpoint just before an attempt ends: asked for by a file in the run directory, taken by rank 0 at its next step.

Who asks: a worker that gets SIGTERM; Ray Train's controller, before it resizes an elastic run or when a node of the run is
drained. A file reaches rank 0 from any process that shares the run directory with it, and costs it one `stat` a step. With a
storage URL in the place of a shared disk that is rank 0's own node: others lose the steps since the last checkpoint.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

REQUEST = ".checkpoint-request"
ONCE, EVERY_STEP = "once", "every step"
GRACE_S = 25.0
"""How long a checkpoint is waited for: Kubernetes kills 30 s after SIGTERM, spot instances after 30 to 120 s."""

_POLL_S = 0.1

logger = logging.getLogger(__name__)


def request_checkpoint(run_dir: Path, how: str = ONCE) -> None:
    """Asks rank 0 to save after the step it is in: ONCE, or after EVERY_STEP from then on."""
    (run_dir / REQUEST).write_text(how)


def withdraw_request(run_dir: Path) -> None:
    (run_dir / REQUEST).unlink(missing_ok=True)


def wait_for_checkpoint(run_dir: Path, timeout_s: float = GRACE_S) -> bool:
    """Whether a checkpoint that was asked for ONCE was taken in time."""
    deadline = time.monotonic() + timeout_s
    while (run_dir / REQUEST).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


class AnswerRequests(TrainerCallback):
    """Rank 0's part: saves when asked. A save needs no other rank, so none has to agree on the step.

    Args:
        finish: waits until the checkpoint is on the disk; whoever asks may end this process right after.
    """

    def __init__(self, run_dir: Path, finish: Callable[[], None]):
        self._run_dir = run_dir
        self._finish = finish
        self._asked: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        withdraw_request(self._run_dir)  # the one that ended the attempt before

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        try:
            self._asked = (self._run_dir / REQUEST).read_text()
        except FileNotFoundError:
            self._asked = None
            return
        control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._asked:
            self._finish()
        if self._asked == ONCE:
            logger.warning("Saved step %d, as asked", state.global_step)
            withdraw_request(self._run_dir)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        withdraw_request(self._run_dir)


def save_on_sigterm(run_dir: Path) -> None:
    """Makes SIGTERM ask for a checkpoint and end this process once it is taken, or after GRACE_S. For a main thread."""

    def on_sigterm(number: int, frame: Any) -> None:
        request_checkpoint(run_dir)
        threading.Thread(target=leave, daemon=True).start()

    def leave() -> None:
        wait_for_checkpoint(run_dir)
        os._exit(128 + signal.SIGTERM)  # no clean-up: the other ranks sit in a collective with this one

    signal.signal(signal.SIGTERM, on_sigterm)
