"""Whole runs at true layer shapes: the loss of 50 steps follows the reference recipe's, and modes equal each other."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.benchmarks.training.checkpoint import write_random_base, write_rows
from tests.gpu.shapes import DEVICE, ON_GPU, marks
from tests.unit.training.runs import losses, run_workers
from training.config import parse_config
from training.run_dir import RunDir
from training.worker import PROBE, train_loop

pytestmark = marks

REFERENCE = {"weights": "bf16", "attention": "eager", "experts": "eager", "compile": False, "recompute": "full"}
"""The notebooks' recipe."""
OURS: dict[str, Any] = {"weights": "mxfp4", "recompute": "none", "compile": False}
LENGTH = 512 if ON_GPU else 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of gpt-oss-20b's shapes, one of each kind of attention."""
    directory = tmp_path_factory.mktemp("base") / "base"
    write_random_base(directory, "20b" if ON_GPU else "tiny", 2)
    return directory


def run(root: Path, base: Path, steps: int, *, workers: int = 1, strategy: str = "ddp", **changes: Any) -> list[float]:
    """Losses of a run that sees the same eight rows again and again."""
    packing = changes.pop("packing", False)
    values = {
        "model": {"path": str(base)},
        "data": {"path": "./rows", "max_length": LENGTH, "packing": packing},
        "lora": {"r": 16, "alpha": 32, "targets": changes.pop("targets", "attention")},
        "optim": {"max_steps": steps, "global_batch_size": 8, "per_device_batch_size": 4, "learning_rate": 2e-3},
        "scaling": {"device": DEVICE, "workers": workers, "strategy": strategy},
        **changes,
    }
    config = parse_config(values).resolved()
    run_dir = RunDir.create(root, config)
    write_rows(run_dir, config, 500, real_lengths=packing)
    (run_dir.root / PROBE).write_text("probe")
    settings = {"run_dir": run_dir.root, "base": base, "probe": "probe"}
    if workers == 1:
        train_loop(settings)
    else:
        run_workers(workers, _on_own_gpu, settings)
    return losses(run_dir)


def _on_own_gpu(settings: dict[str, Any]) -> None:
    if ON_GPU:
        torch.cuda.set_device(torch.distributed.get_rank())
    train_loop(settings)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, base: Path) -> list[float]:
    return run(tmp_path_factory.mktemp("ours") / "job", base, 50, **OURS)


def assert_follows(found: list[float], reference: list[float], share: float) -> None:
    """Step by step, and on average within a fifth of that, within `share` of the first loss: of the small losses at the end
    of a run that learns its rows by heart, what rounding began is a large part."""
    apart = [abs(one - other) / reference[0] for one, other in zip(found, reference, strict=True)]
    assert max(apart) < share, [f"{one:.3f} {other:.3f}" for one, other in zip(found, reference, strict=True)]
    assert abs(fmean(found) - fmean(reference)) < 0.2 * share * reference[0]


def test_fifty_steps_follow_the_reference_recipe(tmp_path: Path, base: Path, ours: list[float]) -> None:
    """Within 5 % of the first loss, or within twice what transformers' own two ways to compute experts are apart: in bf16 a
    router now and then chooses another expert, and steps on the same eight rows make more of it."""
    on_cpu = {} if ON_GPU else {"attention": "eager"}
    reference = run(tmp_path / "reference", base, 50, **REFERENCE | on_cpu)
    assert reference[-1] < reference[0] - 0.2, "it learns, so that there is something to follow"
    other = run(tmp_path / "other", base, 50, **REFERENCE | on_cpu | {"experts": "grouped_mm"})
    apart = max(abs(one - two) for one, two in zip(other, reference, strict=True)) / reference[0]
    print(f"transformers' two ways are {apart:.4f} of the first loss apart")
    assert_follows(ours[:10], reference[:10], 0.05)
    assert_follows(ours, reference, max(0.05, 2 * apart))


@pytest.mark.parametrize(
    "changes",
    [{"recompute": "full"}, {"recompute": "selective"}, {"compile": ON_GPU, "recompute": "selective"}],
    ids=["full", "selective", "compiled"],
)
def test_modes_train_the_same(tmp_path: Path, base: Path, ours: list[float], changes: dict[str, Any]) -> None:
    assert_follows(run(tmp_path / "job", base, 10, **OURS | changes), ours[:10], 0.02)


def test_expert_adapters_learn_faster_than_attention_alone(tmp_path: Path, base: Path, ours: list[float]) -> None:
    found = run(tmp_path / "job", base, 20, **OURS, targets="attention+experts")
    assert abs(found[0] - ours[0]) < 0.01 * ours[0], "a fresh adapter changes nothing"
    assert found[-1] < ours[19]


def test_packed_rows_train(tmp_path: Path, base: Path) -> None:
    found = run(tmp_path / "job", base, 10, **OURS, packing=True)
    assert found[-1] < found[0]


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_workers_equal_one(tmp_path: Path, base: Path, ours: list[float], strategy: str) -> None:
    assert_follows(run(tmp_path / "job", base, 10, **OURS, workers=2, strategy=strategy), ours[:10], 0.02)
