"""Figures of evaluations: question language x asked language, one panel a model, in one colour scale."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.language import NAMES


def heat_maps(reports: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Writes a PNG with the trace match of each pair of languages, a panel for each report, side by side.

    Args:
        reports: title -> `training.reasoning.metrics.report`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no state shared with others' figures
    from matplotlib.figure import Figure

    questions = sorted({question for report in reports.values() for question in report["matrix"]})
    asked = sorted({code for report in reports.values() for row in report["matrix"].values() for code in row})
    width = 2.2 + len(reports) * (1.2 + 0.62 * len(asked))
    figure = Figure(figsize=(width, 2.2 + 0.5 * len(questions)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(reports), squeeze=False, sharey=True)[0]
    for panel, (title, report) in zip(panels, reports.items(), strict=True):
        values = [[report["matrix"].get(q, {}).get(a, {}).get("trace_match") for a in asked] for q in questions]
        image = _draw(panel, values)
        panel.set_title(f"{title}\n{_headline(report)}", fontsize=10)
        panel.set_xticks(range(len(asked)), [_label(code) for code in asked], rotation=45, ha="right", fontsize=8)
        panel.set_yticks(range(len(questions)), [_label(code) for code in questions], fontsize=8)
        panel.set_xlabel("asked to think in")
    panels[0].set_ylabel("question in")
    figure.colorbar(image, ax=panels, label="trace match", shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw(panel: Any, values: list[list[float | None]]) -> Any:
    numbers = [[float("nan") if value is None else value for value in row] for row in values]
    image = panel.imshow(numbers, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                on_dark = abs(value - 0.5) > 0.35  # both ends of the scale are
                colour = "white" if on_dark else "black"
                panel.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8, color=colour)
    return image


def _headline(report: Mapping[str, Any]) -> str:
    """The figure without English, with its interval."""
    if report["trace_match"] is None:
        return "no prompts outside of English"
    return f"{report['trace_match']:.0%} outside of English ({report['trace_match_low']:.0%} to {report['trace_match_high']:.0%})"


def _label(code: str) -> str:
    return NAMES[code][0] if code in NAMES else code
