"""A checkpoint on request: by a file, at the next step, also when SIGTERM asks for it."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.training.runs import adapter, largest_difference, losses, make_run, run_workers, train
from training.durable import checkpoints
from training.durable.preemption import (
    EVERY_STEP,
    ONCE,
    REQUEST,
    request_checkpoint,
    save_on_sigterm,
    wait_for_checkpoint,
    withdraw_request,
)
from training.run_dir import RunDir
from training.trainer import Trainer


def ask_at(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, step: int, how: str) -> None:
    """Asks while the step after `step` is trained."""
    plain = Trainer.training_step

    def training_step(self: Trainer, *args: object, **kwargs: object) -> object:
        if self.state.global_step == step:
            request_checkpoint(run_dir.root, how)
        return plain(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "training_step", training_step)


@pytest.mark.parametrize(("how", "saved"), [(ONCE, [3, 6]), (EVERY_STEP, [3, 4, 5, 6])])
def test_a_checkpoint_is_taken_at_the_next_step(
    tmp_path: Path, random_base: Path, monkeypatch: pytest.MonkeyPatch, how: str, saved: list[int]
) -> None:
    run_dir = make_run(tmp_path / "job", random_base, optim__max_steps=6, checkpoint__keep=9)
    ask_at(monkeypatch, run_dir, 2, how)
    train(run_dir, random_base)
    assert sorted(checkpoints.step_of(path) for path in run_dir.checkpoints.iterdir()) == saved
    assert not (run_dir.root / REQUEST).exists(), "a finished training leaves no request behind"


def test_a_request_of_the_attempt_before_is_withdrawn(tmp_path: Path, random_base: Path) -> None:
    run_dir = make_run(tmp_path / "job", random_base)
    request_checkpoint(run_dir.root, EVERY_STEP)
    train(run_dir, random_base)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-00000004"]


def test_waiting_for_a_checkpoint(tmp_path: Path) -> None:
    request_checkpoint(tmp_path)
    assert not wait_for_checkpoint(tmp_path, timeout_s=0.3)
    threading.Timer(0.3, withdraw_request, [tmp_path]).start()
    assert wait_for_checkpoint(tmp_path, timeout_s=10)
    assert wait_for_checkpoint(tmp_path, timeout_s=0), "nothing asked for is nothing to wait for"


def test_sigterm_to_any_worker_saves_and_the_run_resumes_exactly(tmp_path: Path, random_base: Path) -> None:
    settings = {"optim__max_steps": 6, "lora__dropout": 0.1}
    whole, cut = (make_run(tmp_path / name, random_base, **settings) for name in ("whole", "cut"))
    train(whole, random_base)
    with pytest.raises((RuntimeError, AssertionError)):  # rank 0's connection to the worker that left
        run_workers(2, _train_and_get_sigterm, cut.root, random_base)
    newest = checkpoints.newest(cut.checkpoints)
    assert newest is not None
    assert checkpoints.step_of(newest) in (3, 4)  # rank 0 may be a step ahead when the request arrives
    train(cut, random_base, 2)
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-5)
    assert largest_difference(adapter(cut), adapter(whole)) < 1e-4


def _train_and_get_sigterm(root: Path, base: Path) -> None:
    """Rank 1 is told to stop as it begins its third step, and does no further one, like a process on its way out."""
    plain = Trainer.training_step

    def training_step(self: Trainer, *args: object, **kwargs: object) -> object:
        if dist.get_rank() == 1 and self.state.global_step == 2 and not (root / REQUEST).exists():
            os.kill(os.getpid(), signal.SIGTERM)
        if dist.get_rank() == 1 and self.state.global_step == 4:
            threading.Event().wait(60)
        return plain(self, *args, **kwargs)  # type: ignore[arg-type]

    Trainer.training_step = training_step  # type: ignore[method-assign,assignment]
    save_on_sigterm(root)
    train(RunDir.open(root), base)
