"""Checkpoints are whole or passed over, as many as asked for, and say so when the disk is full."""

import logging
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.durable import checkpoints
from training.errors import StorageError


def files(text: str) -> dict[str, bytes]:
    return {"adapter.bin": text.encode(), "state.json": b"{}"}


def save(root: Path, *steps: int, keep: int = 10) -> None:
    for step in steps:
        checkpoints.save(root, step, files(f"step {step}"), keep=keep)


def test_the_newest_is_found(tmp_path: Path) -> None:
    save(tmp_path, 50, 100, 1000)
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert checkpoints.step_of(newest) == 1000
    assert (newest / "adapter.bin").read_text() == "step 1000"


def test_none_when_there_is_none(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "missing") is None


def test_only_as_many_as_asked_for_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_checkpoint_is_on_the_disk_before_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check(self: Path, target: Path) -> Path:
        assert {path.name for path in self.iterdir() if path.stat().st_ino not in synced} == set()
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", check)
    save(tmp_path, 1)
    assert len(synced) == 3


def tear(checkpoint: Path, how: str) -> None:
    if how == "no marker":
        (checkpoint / checkpoints.MARKER).unlink()
    elif how == "cut file":
        (checkpoint / "adapter.bin").write_text("step")
    elif how == "missing file":
        (checkpoint / "state.json").unlink()
    elif how == "flipped bit":
        (checkpoint / "adapter.bin").write_text("step 9")
    elif how == "cut marker":
        (checkpoint / checkpoints.MARKER).write_text('{"adapter.bin": "12')
    elif how == "empty marker":
        (checkpoint / checkpoints.MARKER).write_text("")


@pytest.mark.parametrize("how", ["no marker", "cut file", "missing file", "flipped bit", "cut marker", "empty marker"])
def test_a_torn_one_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    save(tmp_path, 1, 2, 3)
    tear(tmp_path / "step-00000003", how)
    with caplog.at_level(logging.WARNING):
        newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert checkpoints.step_of(newest) == 2
    assert "step-00000003" in caplog.text


def test_one_that_was_being_written_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_json", die)  # all is written but the marker
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert checkpoints.step_of(newest) == 1
    save(tmp_path, 2)
    assert (tmp_path / "step-00000002" / "adapter.bin").read_text() == "step 2"


def test_a_step_done_again_replaces_the_first(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 5, files("first"), keep=2)
    checkpoints.save(tmp_path, 5, files("again"), keep=2)
    assert (tmp_path / "step-00000005" / "adapter.bin").read_text() == "again"
    assert checkpoints.newest(tmp_path) == tmp_path / "step-00000005"


def test_a_torn_one_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    """A run that tore its newest checkpoint, resumed from the one before, and saves the next."""
    save(tmp_path, 1, 2, keep=2)
    tear(tmp_path / "step-00000002", "flipped bit")
    assert checkpoints.newest(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, 3, keep=2)
    tear(tmp_path / "step-00000003", "flipped bit")
    newest = checkpoints.newest(tmp_path)
    assert newest is not None
    assert checkpoints.step_of(newest) == 1


def disk_with(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))


def test_a_disk_that_cannot_be_written_is_an_error_with_a_way_out() -> None:
    with pytest.raises(StorageError, match="cannot write the checkpoint") as caught:
        checkpoints.save(Path("/proc/self"), 1, files("never"), keep=2)
    assert "checkpoint.keep" in caught.value.hint


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_with(monkeypatch, free_bytes=7)
    with pytest.raises(StorageError, match=r"No space left.*MiB are needed"):
        save(tmp_path, 1)
    assert not list(tmp_path.rglob("adapter.bin"))
    disk_with(monkeypatch, free_bytes=8)
    save(tmp_path, 1)


class TestBackground:
    """Saves in a thread: the caller goes on, two are never at work, and what goes wrong is said."""

    def test_the_caller_goes_on_and_the_next_save_waits(self, tmp_path: Path) -> None:
        gates = {1: threading.Event(), 2: threading.Event()}
        done: list[int] = []

        def hold(checkpoint: Path) -> None:
            assert gates[checkpoints.step_of(checkpoint)].wait(30)
            done.append(checkpoints.step_of(checkpoint))

        saves = checkpoints.Background(tmp_path, 10, hold)
        saves.save(1, files("one"))
        assert done == [], "it came back while the first is being saved"
        second = threading.Thread(target=saves.save, args=(2, files("two")))
        second.start()
        second.join(0.3)
        assert second.is_alive(), "two at once"
        assert not (tmp_path / "step-00000002").exists()
        gates[1].set()
        second.join(30)
        gates[2].set()
        saves.finish()
        assert done == [1, 2]

    def test_a_failure_is_raised_by_the_next_call(self, tmp_path: Path) -> None:
        (tmp_path / ".step-00000001.partial").write_text("in the way")
        saves = checkpoints.Background(tmp_path, 10)
        saves.save(1, files("one"))
        with pytest.raises(StorageError):
            saves.save(2, files("two"))
        saves.save(2, files("two"))
        saves.finish()
        saves.finish()
        assert checkpoints.newest(tmp_path) == tmp_path / "step-00000002"
