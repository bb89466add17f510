"""`@distributed` in a real notebook, run by nbclient: cells' functions on two workers, and an error as the cell's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent / "notebooks" / "two_workers.ipynb"

TIMEOUT_S = 600
"""Half a minute on a quiet machine."""


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_notebook_runs_on_two_workers(tmp_path: Path) -> None:
    env = os.environ | {
        "RAY_ADDRESS": "local",
        "POLYTHINK_DISTRIBUTED": "workers=2",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),  # IPython's and Jupyter's own files
        "IPYTHONDIR": str(tmp_path),
    }
    command = [str(Path(sys.executable).parent / "jupyter-execute"), "--output", str(tmp_path / "done"), str(NOTEBOOK)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {cell["id"]: cell for cell in json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]}

    (values,) = [output["data"] for output in cells["run"]["outputs"] if output["output_type"] == "execute_result"]
    assert values["text/plain"] == ["[(0, 42), (1, 42)]"]
    shown = "".join("".join(output.get("text", [])) for output in cells["run"]["outputs"])
    assert "[rank 0] hello from 0" in shown
    assert "[rank 1] hello from 1" in shown

    (error,) = [output for output in cells["fail"]["outputs"] if output["output_type"] == "error"]
    assert (error["ename"], error["evalue"].splitlines()[0]) == ("Diverged", "loss is nan on rank 1")
    assert "Raised by rank 1 of 2" in "\n".join(error["traceback"]) + error["evalue"]
