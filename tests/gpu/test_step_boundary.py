"""Between two optimizer steps the GPU does not wait for Python: nothing there waits for the GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.training.checkpoint import write_random_base, write_rows
from tests.gpu.shapes import ON_GPU, marks
from training.config import parse_config
from training.run_dir import RunDir
from training.trainer import Trainer
from training.worker import PROBE, train_loop

pytestmark = [*marks, pytest.mark.skipif(not ON_GPU, reason="a CPU does what it is told at once")]

WATCHED = range(4, 8)
"""Steps, of 10, in which an operation that waits is an error; before, kernels are compiled."""


@pytest.mark.parametrize("rows", [4, 2], ids=["one pass a step", "two passes a step"])
def test_no_step_waits_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    base = tmp_path / "base"
    write_random_base(base, "20b", 2)
    values = {
        "model": {"path": str(base)},
        "data": {"path": "./rows", "max_length": 512},
        "optim": {"max_steps": 10, "global_batch_size": 4, "per_device_batch_size": rows},
        "recompute": "none",
        "compile": False,
    }
    config = parse_config(values).resolved()
    run_dir = RunDir.create(tmp_path / "job", config)
    write_rows(run_dir, config, 500, real_lengths=False)
    (run_dir.root / PROBE).write_text("probe")
    plain = Trainer.training_step

    def watched(self: Trainer, *arguments: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error" if self.state.global_step in WATCHED else "default")
        return plain(self, *arguments)

    monkeypatch.setattr(Trainer, "training_step", watched)
    try:
        train_loop({"run_dir": run_dir.root, "base": base, "probe": "probe"})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [line["step"] for line in run_dir.metrics()] == list(range(1, 11))
