"""Where a whole forward and backward pass goes, kernel by kernel, by torch's profiler."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from training.config import TrainConfig
from training.model.lora import attach
from training.model.loss import install_loss, trained_positions
from training.model.recompute import checkpoint_arguments
from training.rows.batches import Collator
from training.rows.packing import install_masks
from training.worker import compile_layers

WARM_UP, SHOWN = 3, 30


def profile_step(
    config: TrainConfig, base: Path, rows: list[dict[str, list[int]]], load: Callable[..., PreTrainedModel]
) -> list[dict[str, Any]]:
    """The longest kernels of one pass of `rows`, each with its milliseconds, calls and share of all; the sum comes first.

    Args:
        load: `training.model.load.load`, or what stands in for it.
    """
    device = "cuda" if config.scaling.device == "cuda" else "cpu"
    model = load(
        base, weights=config.weights, precision=config.precision, attention=config.attention, experts=config.experts,
        device=device,
    )  # fmt: skip
    step = _stepper(config, model, rows, device)
    del model
    for _ in range(WARM_UP):
        step()
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with profile(activities=kinds) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    del step
    gc.collect()  # what follows wants the memory
    torch.cuda.empty_cache()
    return _kernels(profiler, device)


def _stepper(
    config: TrainConfig, model: PreTrainedModel, rows: list[dict[str, list[int]]], device: str
) -> Callable[[], None]:
    if config.attention == "flex_attention":
        install_masks(model.get_decoder(), packed=False)
    adapted = attach(model, config.lora, "base").train()
    if config.compile:
        compile_layers(model)
    if config.recompute != "none":
        model.gradient_checkpointing_enable(checkpoint_arguments(config.recompute))
    install_loss(model)
    batch = Collator(0)(rows)
    batch = {key: value.to(device) for key, value in (batch | {"trained": trained_positions(batch["labels"])}).items()}

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"):
            sums = adapted(**batch, use_cache=False)
        sums.loss.backward()

    return step


def step_table(lines: list[dict[str, Any]]) -> str:
    shown = [f"{'kernel':72}{'calls':>7}{'ms':>10}{'share':>7}"]
    shown += [f"{line['kernel'][:70]:72}{line['calls']:7}{line['ms']:10.2f}{line['share']:7.1%}" for line in lines]
    return "\n".join(shown)


def _kernels(profiler: Any, device: str) -> list[dict[str, Any]]:
    events = profiler.key_averages()
    times = {
        event.key: (
            event.count,
            (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e3,
        )
        for event in events
    }
    total = sum(ms for _, ms in times.values())
    longest = sorted(times.items(), key=lambda item: -item[1][1])[:SHOWN]
    first = {"kernel": "all", "calls": sum(calls for calls, _ in times.values()), "ms": total, "share": 1.0}
    return [
        first,
        *({"kernel": name, "calls": calls, "ms": ms, "share": ms / total} for name, (calls, ms) in longest if ms),
    ]
