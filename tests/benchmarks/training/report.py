"""What the bench says: a table, JSON with machine and versions, a plot."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def with_ratios(results: Sequence[Result]) -> list[Result]:
    """Each result with its speed over the first one's."""
    first = results[0]["tokens_per_s_per_gpu"]
    return [result | {"ratio": result["tokens_per_s_per_gpu"] / first} for result in results]


def table(results: Sequence[Result]) -> str:
    """One line a recipe; ratios are to the first."""
    head = f"{'recipe':26}{'rows':>5}{'tokens/s/GPU':>14}{'ratio':>7}{'MFU':>6}{'peak GiB':>10}{'planned':>9}{'load s':>8}{'1st step s':>12}{'last loss':>11}"
    lines = [
        f"{result['recipe']:26}{result['rows']:5}{result['tokens_per_s_per_gpu']:14,.0f}{result['ratio']:7.1f}"
        f"{_shown(result['mfu'], '6.2f')}{_shown(result['peak_gpu_gib'], '10.1f')}{_shown(result['planned_gpu_gib'], '9.1f')}{result['load_s']:8.1f}"
        f"{result['first_step_s']:12.1f}{result['losses'][-1]:11.3f}"
        for result in with_ratios(results)
    ]
    return "\n".join([head, *lines])


def plot(results: Sequence[Result], title: str, path: Path) -> Path:
    """Bars of speed, and of peak memory where there is a GPU."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state shared with others' figures
    from matplotlib.figure import Figure

    names = [result["recipe"] for result in results][::-1]
    panels = {"tokens/s per GPU": "tokens_per_s_per_gpu"}
    if all(result["peak_gpu_gib"] is not None for result in results):
        panels["peak GPU memory, GiB"] = "peak_gpu_gib"
    figure = Figure(figsize=(5.2 * len(panels), 0.8 + 0.4 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (label, key) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        bars = axis.barh(names, [result[key] for result in results][::-1], color="#3b6ea5")
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def machine() -> dict[str, Any]:
    """Where this was measured, and with what."""
    import peft
    import torch
    import transformers
    import trl

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {module.__name__: module.__version__ for module in (torch, transformers, trl, peft)}
    return {"gpu": gpu, "gpus": torch.cuda.device_count(), "python": platform.python_version(), **versions}


def _shown(value: float | None, form: str) -> str:
    return format("-" if value is None else value, form if value is not None else f">{form.partition('.')[0]}")
