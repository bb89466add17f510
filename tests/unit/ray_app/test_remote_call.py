"""The answer of a remote call: written by the job's driver, hidden from the log, read by the caller."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_app.functions import remote_call
from ray_app.functions.hardware import Hardware
from training.errors import ConfigError, TrainingError

MARK = "a1b2c3"


class Client:
    """The part of Ray's JobSubmissionClient that reads a job that ended."""

    def __init__(self, log: str):
        self.log = log

    def get_job_logs(self, job_id: str) -> str:
        return self.log

    def get_job_info(self, job_id: str) -> Any:
        return SimpleNamespace(status="FAILED", message="killed")


def run_driver(
    outcome: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit status and log of the job's driver whose workers return, or raise, `outcome`."""

    def workers(call: bytes, hardware: Hardware) -> list[Any]:
        assert (call, hardware) == (b"call", Hardware(gpus=2))
        print("[rank 0] hello")
        if isinstance(outcome, Exception):
            raise outcome
        return list(outcome)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(remote_call, "run_packed", workers)
    (folder / remote_call.CALL_FILE).write_bytes(pickle.dumps((b"call", {"gpus": 2})))
    status = remote_call.main(MARK)
    return status, capsys.readouterr().out


def test_values_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    values = [{"loss": 0.5}, "x" * 50_000]  # several lines
    status, log = run_driver(values, tmp_path, monkeypatch, capsys)
    assert status == 0
    assert remote_call._answer(Client(log), "job", MARK) == (values, None, [])
    assert [line for line in log.splitlines() if not line.startswith(MARK)] == ["[rank 0] hello"]


def test_an_error_comes_back_with_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = TrainingError("diverged", hint="Lower the rate.")
    error.add_note("Raised by rank 1 of 2")
    status, log = run_driver(error, tmp_path, monkeypatch, capsys)
    assert status == 1
    _, back, notes = remote_call._answer(Client(log), "job", MARK)
    assert isinstance(back, TrainingError)
    assert (back.message, back.hint, notes) == ("diverged", "Lower the rate.", ["Raised by rank 1 of 2"])


def test_values_that_are_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_call, "MAX_ANSWER_MIB", 0.01)
    status, log = run_driver(["x" * 50_000], tmp_path, monkeypatch, capsys)
    assert status == 1
    assert "bring" in str(remote_call._answer(Client(log), "job", MARK)[1])


def test_a_job_that_died_says_so() -> None:
    with pytest.raises(TrainingError, match="ended FAILED without an answer: killed"):
        remote_call._answer(Client("some output\n"), "raysubmit_1", MARK)


def test_without_a_cluster_there_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="no cluster to send the call to"):
        remote_call._address()
