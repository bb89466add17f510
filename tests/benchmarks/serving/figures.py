"""The report as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

NAMES = {
    "bare": "generate in a loop",
    "transformers_serve": "transformers serve",
    "polythink": "polythink",
}


def draw(report: dict[str, Any], target: Path) -> None:
    """Tokens per second of each service at 16 clients, and of ours by clients."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    ours = report["polythink"]["closed"]
    at_16 = next(load for load in ours if load["clients"] == 16)
    speeds = {"bare": report["bare"], "transformers_serve": report["transformers_serve"], "polythink": at_16}
    bars = left.barh([NAMES[name] for name in speeds], [load["tokens_per_s"] for load in speeds.values()])
    left.bar_label(bars, fmt="{:,.0f}", padding=3)
    left.margins(x=0.15)
    left.invert_yaxis()
    left.set_xlabel("tokens per second, 16 clients")
    clients = [load["clients"] for load in ours]
    right.plot(clients, [load["tokens_per_s"] for load in ours], marker="o")
    right.set_xscale("log", base=2)
    right.set_xticks(clients, labels=map(str, clients))
    right.set_ylim(bottom=0)
    right.set_xlabel("clients")
    right.set_ylabel("tokens per second, polythink")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)
