"""What is compared: each recipe as changes to a configuration."""

from dataclasses import dataclass, field
from typing import Any

from training.config import TrainConfig, parse_config


@dataclass(frozen=True)
class Recipe:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    """Rows per forward pass and GPU."""
    real_lengths: bool = False
    """Rows of Multilingual-Thinking's lengths, packed, instead of full ones."""


PACKED = {"weights": "mxfp4"}
STOCK = {"weights": "bf16", "recompute": "full", "compile": False}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("notebooks", STOCK | {"attention": "eager", "experts": "eager"}),
        Recipe("stock best", STOCK | {"experts": "grouped_mm"}, rows=8),
        Recipe("ours, full", PACKED | {"recompute": "full"}, rows=16),
        Recipe("ours, selective", PACKED | {"recompute": "selective"}, rows=16),
        Recipe("ours, none", PACKED | {"recompute": "none"}, rows=24),
        Recipe("ours, none, bf16 experts", {"weights": "bf16", "experts": "frozen", "recompute": "none"}, rows=16),
        Recipe("ours, none, packed rows", PACKED | {"recompute": "none"}, rows=16, real_lengths=True),
        Recipe("ours, full, not compiled", PACKED | {"recompute": "full", "compile": False}, rows=16),
        Recipe("ours, full, experts too", PACKED | {"recompute": "full", "lora": "experts"}, rows=8),
    )
}
"""`notebooks` comes first: ratios are to it. Every recipe has our loss and, where attention is flex, our attention, which only helps the
others."""


def configuration(
    recipe: Recipe, *, device: str, strategy: str, workers: int, length: int, steps: int, rows: int | None
) -> TrainConfig:
    """The run that measures `recipe`.

    Args:
        rows: per forward pass and GPU, instead of the recipe's own.
    """
    changes = dict(recipe.changes)
    targets = "attention+experts" if changes.pop("lora", None) else "attention"
    if device == "cpu":  # where attention is eager, and compiling takes longer than training
        changes |= {"attention": "eager", "experts": "eager", "compile": False}
    rows = rows or recipe.rows
    values = {
        "name": "bench",
        "model": {"path": "./base"},
        "data": {"path": "./rows", "max_length": length, "packing": recipe.real_lengths},
        "lora": {"r": 8, "alpha": 16, "targets": targets},
        "optim": {
            "max_steps": steps,
            "per_device_batch_size": rows,
            "global_batch_size": rows * workers,
            "warmup_ratio": 0.0,
        },
        "scaling": {"workers": workers, "device": device, "strategy": strategy, "ignore_memory_plan": True},
        "checkpoint": {"every_steps": 10_000},
        "evaluation": None,
        **changes,
    }
    return parse_config(values).resolved()
