"""The notebooks' training functions on two workers, against the presets of the same name. test_distributed.py has the Ray around them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.notebooks.compare import in_our_order, train_both
from tests.unit.training.runs import run_workers
from training.config import load_config
from training.driver import _prepare
from training.run_dir import RunDir
from training.worker import PROBE, Setup

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny"
BATCH, ROWS = 4, 8
TOLERANCE = 1e-6
"""On adapter values of 3e-4 and more; here both sides are equal to the last bit."""

REFINED: dict[str, Any] = {"assistant_only_loss": True, "router_aux_loss_coef": 0.0}
"""What the README asks to add to the notebooks."""


def overrides(rows: Path, steps_of_batch: int, *more: str) -> list[str]:
    """The preset on the tiny model, on two CPU workers, on all rows."""
    return [
        f"model.path={TINY / 'base'}",
        f"data.path={rows}",
        "data.held_out_share=0",
        "lora.dropout=0",  # each side draws its random numbers elsewhere
        f"optim.global_batch_size={steps_of_batch}",
        "scaling.workers=2",
        "scaling.device=cpu",
        "scaling.accelerator_type=null",
        "weights=bf16",
        "precision=fp32",
        "evaluation=null",
        *more,
    ]


def case(folder: Path, preset: str, module: str, changes: dict[str, Any], *more: str) -> dict[str, Any]:
    """One comparison: what `compare.train_both` needs."""
    rows = folder / "rows.jsonl"
    config = load_config(preset, overrides(rows, BATCH, *more)).resolved()
    run_dir = RunDir.create(folder / "run", config)
    rows.write_text("\n".join((TINY / "train.jsonl").read_text("utf-8").splitlines()[:ROWS]) + "\n", encoding="utf-8")
    assert in_our_order(rows, folder / "ordered" / "train.jsonl", config.optim) == ROWS
    _prepare(config, run_dir, TINY / "base")
    (run_dir.root / PROBE).write_text("here")
    return {
        "module": module,
        "base": str(TINY / "base"),
        "rows": str(folder / "ordered"),
        "example": str(folder / "example"),
        "steps": ROWS // BATCH,
        "changes": {
            "train_sampling_strategy": "sequential",  # the rows lie in our order; each side shuffles its own way
            "gradient_accumulation_steps": BATCH // 2,
            **changes,
        },
        "setup": vars(Setup(run_dir.root, TINY / "base", "here")),
    }


def adapters(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return tuple(load_file(folder / name / "adapter_model.safetensors") for name in ("example", "run/adapter"))  # type: ignore[return-value]


LITERAL = ("data.train_on=all", "optim.router_aux_loss_coef=0.9")
"""What the notebooks do without saying so: every token, and gpt-oss's own router loss."""

COMPARISONS = {
    "20b": ("gpt-oss-20b", "configs.notebooks.gpt_oss_20b", REFINED, ()),
    "20b-literally": ("gpt-oss-20b", "configs.notebooks.gpt_oss_20b", {}, LITERAL),
    "120b": ("gpt-oss-120b", "configs.notebooks.gpt_oss_120b", REFINED, ()),
    "120b-literally": ("gpt-oss-120b", "configs.notebooks.gpt_oss_120b", {}, LITERAL),
}


def test_the_notebooks_functions_and_the_presets_give_the_same_adapter(tmp_path: Path) -> None:
    """All in one pair of workers, which is a start of two processes rather than of sixteen."""
    cases = []
    for name, (preset, module, changes, more) in COMPARISONS.items():
        (tmp_path / name).mkdir()
        cases.append(case(tmp_path / name, preset, module, changes, *more))
    run_workers(2, train_both, cases)
    for name in COMPARISONS:
        example, ours = adapters(tmp_path / name)
        assert example.keys() == ours.keys()
        moved = max(value.abs().max().item() for key, value in ours.items() if "lora_B" in key)
        apart = max((example[key] - ours[key]).abs().max().item() for key in ours)
        assert moved > 1e-4, name
        assert apart < TOLERANCE, f"{name}: {apart} apart, after a change of {moved}"
