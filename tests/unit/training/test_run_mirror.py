"""Runs whose storage root is an S3 bucket: they outlive their directory, and their nodes share no disk."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.training.object_store import bucket
from tests.unit.training.runs import adapter, largest_difference, losses, make_run, run_workers, train
from training.__main__ import open_or_create
from training.durable import checkpoints
from training.durable.run_mirror import RunMirror, keep_upload
from training.durable.storage import VARIABLE, Mirror, open_url
from training.errors import StorageError
from training.run_dir import Phase, RunDir
from training.worker import PROBE, train_loop

SETTINGS = {"lora__dropout": 0.1, "optim__max_steps": 6, "checkpoint__every_steps": 2, "checkpoint__keep": 2}


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    open_url.cache_clear()
    with bucket(monkeypatch) as url:
        monkeypatch.setenv(VARIABLE, url)
        yield url


def prepared(root: Path, base: Path) -> tuple[RunDir, RunMirror]:
    """A run as the driver leaves it for its workers."""
    run_dir = make_run(root, base, **SETTINGS)
    run_dir.write_progress(Phase.STARTING, attempt=1, mlflow_run_id="of-the-driver")
    mirror = RunMirror.of(run_dir)
    assert mirror is not None
    mirror.push_inputs(run_dir.root / PROBE)
    return run_dir, mirror


def without_url(root: Path, base: Path) -> RunDir:
    run_dir = make_run(root, base, **SETTINGS)
    train(run_dir, base)
    return run_dir


def train_at(url: str, run_dir: RunDir, base: Path) -> None:
    train_loop({"run_dir": run_dir.root, "base": base, "probe": "probe", "storage": url})


def test_a_run_outlives_its_directory(tmp_path: Path, random_base: Path, url: str) -> None:
    whole = without_url(tmp_path / "whole", random_base)
    run_dir, mirror = prepared(tmp_path / "runs" / "job", random_base)
    train_at(url, run_dir, random_base)
    mirror.push_outcome()
    kept = mirror.checkpoints()
    assert [checkpoints.step_of(path) for path in kept] == [4, 6], "as many as on the disk"
    shutil.rmtree(run_dir.root)

    found = open_or_create(str(run_dir.root), [])
    mirror.restore()
    assert found.progress()["mlflow_run_id"] == "of-the-driver"
    assert losses(found) == pytest.approx(losses(whole), abs=1e-6)
    shutil.rmtree(found.adapter)
    shutil.rmtree(found.checkpoints / "step-00000006")
    (found.root / PROBE).write_text("probe")  # as the driver does
    train(found, random_base)
    assert found.metrics()[6]["step"] == 5, "it went on from the checkpoint"
    assert losses(found) == pytest.approx(losses(whole), abs=1e-6)
    assert largest_difference(adapter(found), adapter(whole)) < 1e-6


def test_a_directory_that_is_up_to_date_is_left_as_it_is(tmp_path: Path, random_base: Path, url: str) -> None:
    run_dir, mirror = prepared(tmp_path / "runs" / "job", random_base)
    run_dir.write_progress(Phase.RUNNING, step=3)
    mirror.restore()
    assert run_dir.progress()["step"] == 3


def test_nodes_without_a_common_disk(tmp_path: Path, random_base: Path, url: str) -> None:
    """Driver and rank 0 on different nodes, rank 1 on a third, then all on others: only the bucket is common."""
    whole = without_url(tmp_path / "whole", random_base)
    here, mirror = prepared(tmp_path / "driver" / "job", random_base)
    with mirror.followed():
        run_workers(2, _train_on_own_node, tmp_path / "first", url, random_base)
    assert here.progress()["step"] == 6, "rank 0's progress is seen by the driver"
    assert here.progress()["mlflow_run_id"] == "of-the-driver"
    assert losses(here) == pytest.approx(losses(whole), abs=1e-5)
    assert largest_difference(adapter(here), adapter(whole)) < 1e-4

    newest = mirror.checkpoints()[-1]
    mirror.copy.delete(newest)
    run_workers(2, _train_on_own_node, tmp_path / "second", url, random_base)
    again = RunDir(tmp_path / "second" / "0" / "job")
    steps = [line["step"] for line in again.metrics()]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6], (
        "it went on from the bucket's newest checkpoint, and kept what was measured"
    )
    assert largest_difference(adapter(again), adapter(whole)) < 1e-4


def _train_on_own_node(nodes: Path, url: str, base: Path) -> None:
    import torch.distributed as dist

    open_url.cache_clear()  # made before this process was forked
    train_at(url, RunDir(nodes / str(dist.get_rank()) / "job"), base)


@pytest.mark.parametrize("pushed", range(5))
def test_wherever_a_push_is_cut_short_the_metrics_reach_the_newest_checkpoint(
    tmp_path: Path, random_base: Path, url: str, monkeypatch: pytest.MonkeyPatch, pushed: int
) -> None:
    """It goes on from there: a step before it that has no line then would never get one."""
    run_dir, mirror = prepared(tmp_path / "runs" / "job", random_base)
    mirror.push_checkpoint(train_a_step(run_dir, 1))
    push_file = Mirror._push_file
    files = iter(range(pushed))

    def die(self: Mirror, path: Path) -> None:
        if next(files, None) is None:
            raise KeyboardInterrupt
        push_file(self, path)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Mirror, "_push_file", die)
        mirror.push_checkpoint(train_a_step(run_dir, 2))
    shutil.rmtree(run_dir.root)
    mirror.bring_config()
    mirror.restore()
    newest = checkpoints.newest(run_dir.checkpoints)
    assert newest is not None
    assert run_dir.metrics()[-1]["step"] >= checkpoints.step_of(newest)


def test_rank_0_that_comes_back_to_a_node_goes_on_from_what_it_did_on_another(
    tmp_path: Path, random_base: Path, url: str
) -> None:
    prepared(tmp_path / "driver" / "job", random_base)
    for step, node in enumerate(("one", "other", "one"), 1):
        run_dir = RunDir(tmp_path / node / "job")
        mirror = RunMirror(run_dir, url)
        assert mirror.bring(run_dir.root / PROBE, "probe")
        mirror.bring_checkpoints()
        assert [line["step"] for line in run_dir.metrics()] == list(range(1, step))
        mirror.push_checkpoint(train_a_step(run_dir, step))


def train_a_step(run_dir: RunDir, step: int) -> Path:
    """What rank 0 leaves on its disk after a step, and its checkpoint."""
    run_dir.append_metrics({"step": step})
    run_dir.write_progress(Phase.RUNNING, step=step)
    return checkpoints.save(run_dir.checkpoints, step, {"adapter": bytes([step])}, keep=2)


def test_a_node_that_sees_neither_disk_nor_url_says_so(tmp_path: Path, random_base: Path, url: str) -> None:
    run_dir, _ = prepared(tmp_path / "runs" / "job", random_base)
    settings = {"run_dir": run_dir.root, "base": random_base, "probe": "another driver's"}
    with pytest.raises(StorageError, match=f"does not see the run directory .*, nor {url}/runs/job") as caught:
        train_loop(settings | {"storage": url})
    assert VARIABLE in caught.value.hint


def test_a_checkpoint_that_cannot_be_copied_does_not_end_the_training(
    tmp_path: Path, random_base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_url.cache_clear()
    with bucket(monkeypatch) as url:
        run_dir = make_run(tmp_path / "runs" / "job", random_base, **SETTINGS)
        mirror = RunMirror(run_dir, url)
    checkpoint = checkpoints.save(run_dir.checkpoints, 2, {"adapter": b"x"}, keep=2)
    mirror.push_checkpoint(checkpoint)
    assert "step-00000002 has no copy" in caplog.text


def test_uploads_are_kept_and_come_back(home: Path, url: str) -> None:
    rows = home / "files" / "file-1.jsonl"
    rows.parent.mkdir()
    rows.write_text("rows")
    keep_upload("file:file-1")
    rows.unlink()
    keep_upload("file:file-1")
    assert rows.read_text() == "rows"
    keep_upload("file:../runs")
    keep_upload("openai/rows")


def test_progress_is_followed_while_it_changes(
    tmp_path: Path, random_base: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.run_mirror.EVERY_S", 0.1)
    here, mirror = prepared(tmp_path / "driver" / "job", random_base)
    there = RunDir(tmp_path / "node" / "job")
    distant = RunMirror.of(there)
    assert distant is not None
    assert distant.bring(there.root / PROBE, "probe")
    with mirror.followed(), distant.pushing():
        there.write_progress(Phase.RUNNING, step=2)
        deadline = time.monotonic() + 30
        while here.progress().get("step") != 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
