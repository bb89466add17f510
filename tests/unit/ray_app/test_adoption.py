"""Which Ray Jobs are training drivers, and where their runs lie."""

from pathlib import Path

import pytest

from ray_app.queue.adoption import run_dir_of, training_argument
from ray_app.queue.ray_jobs import RayJob, RayStatus
from training.config import parse_config
from training.run_dir import RunDir


@pytest.mark.parametrize(
    ("entrypoint", "argument"),
    [
        ("python -m training configs/tiny.yaml optim.seed=1", "configs/tiny.yaml"),
        ("OMP_NUM_THREADS=1 /opt/venv/bin/python3.11 -u -m training tiny", "tiny"),
        ("python -m training '/a b/run'", "/a b/run"),
        ("python -m training", None),
        ("python train.py -m training x", None),
        ("python -m training.data x", None),
        ("echo 'unclosed", None),
        ("", None),
    ],
)
def test_the_argument_of_a_driver(entrypoint: str, argument: str | None) -> None:
    assert training_argument(entrypoint) == argument


def test_the_run_is_the_named_directory_or_the_one_under_the_submission_id(tmp_path: Path) -> None:
    config = parse_config({"model": {"path": "a/b"}, "data": {"path": "a/c"}})

    def find(entrypoint: str) -> RunDir | None:
        return run_dir_of(RayJob("raysubmit_1", entrypoint, RayStatus.RUNNING), tmp_path / "runs")

    assert find("python -m training tiny") is None
    made = RunDir.create(tmp_path / "runs" / "raysubmit_1", config)
    named = RunDir.create(tmp_path / "elsewhere", config)
    assert find("python -m training tiny") == made
    assert find(f"python -m training {named.root}") == named
