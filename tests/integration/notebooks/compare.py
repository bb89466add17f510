"""Both ways to the same adapter, in one worker: an example's training function, and our preset's training loop."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def train_both(cases: list[dict[str, Any]]) -> None:
    """For each case, trains by the example into `example` and by the preset into the run directory.

    Args:
        cases: `module` of the example, `changes` to its SFTConfig, `rows`, `base`, `example` (output directory), `steps` that it
            must take, `setup` (the preset's).
    """
    import importlib
    import os

    from accelerate.state import AcceleratorState

    from training.worker import train_loop

    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `ray_app.functions.workers` does on CPU
    for case in cases:
        function = importlib.import_module(case["module"]).train
        with _keywords("trl", "SFTConfig", case["changes"]), _keywords("peft", "LoraConfig", {"lora_dropout": 0.0}):
            result = function(case["base"], case["rows"], case["example"])
        assert result["steps"] == case["steps"], result
        AcceleratorState._reset_state()  # one process trains several times here
        train_loop(case["setup"])
        AcceleratorState._reset_state()


@contextlib.contextmanager
def _keywords(module_name: str, name: str, changes: dict[str, Any]) -> Iterator[None]:
    """What an example imports as `name` takes `changes` over the keywords that it is called with."""
    import importlib

    module = importlib.import_module(module_name)
    original = getattr(module, name)
    setattr(module, name, lambda **given: original(**(given | changes)))
    try:
        yield
    finally:
        setattr(module, name, original)


def in_our_order(rows: Path, target: Path, optim: Any) -> int:
    """Writes `rows` to `target` in the order in which our trainer deals them in its first epoch; returns how many."""
    import torch

    lines = rows.read_text(encoding="utf-8").splitlines()
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(optim.seed)).tolist()
    target.parent.mkdir()
    target.write_text("\n".join(lines[index] for index in order) + "\n", encoding="utf-8")
    return len(lines)
