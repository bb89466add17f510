"""The run directory's contract: whole files or none, used directories refused, readers never see a part."""

import json
import threading
from pathlib import Path

import pytest

from training.config import TrainConfig, parse_config
from training.errors import StorageError
from training.run_dir import Phase, RunDir, polythink_home, read_json, write_json


@pytest.fixture
def config() -> TrainConfig:
    return parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}}).resolved()


@pytest.fixture
def run_dir(tmp_path: Path, config: TrainConfig) -> RunDir:
    return RunDir.create(tmp_path / "job-1", config)


def test_keeps_the_configuration(run_dir: RunDir, config: TrainConfig) -> None:
    assert RunDir.open(run_dir.root).config() == config
    assert run_dir.id == "job-1"


def test_a_used_directory_is_refused(run_dir: RunDir, config: TrainConfig) -> None:
    with pytest.raises(StorageError, match="already holds a run"):
        RunDir.create(run_dir.root, config)


def test_only_run_directories_open(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"config\.json"):
        RunDir.open(tmp_path)


def test_a_fresh_run_has_said_nothing(run_dir: RunDir) -> None:
    assert run_dir.progress() == {}
    assert run_dir.metrics() == []
    assert run_dir.result() is None


def test_progress_keeps_earlier_numbers(run_dir: RunDir) -> None:
    run_dir.write_progress(Phase.RUNNING, step=3, total_steps=9, loss=1.5)
    run_dir.write_progress(Phase.MERGING, message="merging")
    progress = run_dir.progress()
    assert (progress["phase"], progress["step"], progress["loss"], progress["message"]) == (
        "MERGING",
        3,
        1.5,
        "merging",
    )
    assert progress["updated_at"] > 0


def test_metrics_leave_out_a_line_being_written(run_dir: RunDir) -> None:
    run_dir.append_metrics({"step": 1, "loss": 2.0})
    run_dir.append_metrics({"step": 2, "loss": 1.0})
    with run_dir.metrics_path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in run_dir.metrics()] == [1, 2]


def test_metrics_leave_out_a_line_that_was_cut(run_dir: RunDir) -> None:
    run_dir.metrics_path.write_text('{"step": 1}\n{"half\n{"step": 2}\n')
    assert run_dir.metrics() == [{"step": 1}, {"step": 2}]


def test_result_carries_the_error(run_dir: RunDir) -> None:
    error = StorageError("full", hint="Free some.").as_dict()
    run_dir.write_result(Phase.FAILED, error=error)
    result = run_dir.result()
    assert result is not None
    assert (result["status"], result["error"]) == ("FAILED", error)


def test_writes_are_whole_under_concurrent_reading(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"n": 0, "text": "ä" * 5000})
    broken: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                assert len(read_json(path)["text"]) == 5000
            except (json.JSONDecodeError, TypeError) as error:
                broken.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        write_json(path, {"n": number, "text": "ä" * 5000})
    stop.set()
    reader.join()
    assert broken == []
    assert [file.name for file in tmp_path.iterdir()] == ["value.json"], "no temporary file stays"


def test_others_may_read_what_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644


def test_home_is_the_variable_or_the_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert polythink_home() == home
    monkeypatch.delenv("POLYTHINK_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert polythink_home() == Path("/somewhere/.polythink")


def test_phases_are_job_statuses() -> None:
    assert {str(phase) for phase in Phase} == {
        "STARTING",
        "RUNNING",
        "MERGING",
        "EVALUATING",
        "SUCCEEDED",
        "FAILED",
    }
