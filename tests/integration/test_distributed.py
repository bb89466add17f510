"""`@distributed` for real: a script's functions on two gloo workers of a Ray of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "notebooks" / "script.py"

TIMEOUT_S = 600
"""Half a minute on a quiet machine."""


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_script_runs_on_two_workers(tmp_path: Path) -> None:
    env = os.environ | {"RAY_ADDRESS": "local", "POLYTHINK_DISTRIBUTED": "workers=2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())

    assert [value["rank"] for value in results["values"]] == [0, 1]
    assert [value["sum"] for value in results["values"]] == [2 * (10 + 11)] * 2
    assert {value["cwd"] for value in results["values"]} == {str(tmp_path)}
    environment = results["values"][1]["env"]
    assert environment.pop("MASTER_ADDR")
    assert int(environment.pop("MASTER_PORT"))
    assert environment == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    assert results["error"]["text"] == "loss is nan on rank 1"
    (note,) = results["error"]["notes"]
    assert "Raised by rank 1 of 2" in note
    assert 'raise Diverged(f"loss is nan on rank {rank}")' in note

    assert results["interrupted_after_s"] < 120
    assert results["sigint_is_default"]

    shown = done.stdout + done.stderr
    assert "[rank 0] hello from 0" in shown
    assert "[rank 1] hello from 1" in shown
