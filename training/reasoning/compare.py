"""Evaluations of several models side by side: the same figures in one table and one picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import ConfigError
from training.language import NAMES
from training.reasoning.figures import heat_maps
from training.reasoning.metrics import RATES
from training.run_dir import RunDir, read_json

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One figure of two models.

    Attributes:
        name: of the figure, or of the language whose trace match it is.
        first, second: its values; None where there is nothing to measure.
        difference: second minus first, with its 95 % interval where it is a rate.
    """

    name: str
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def compare(first: Report, second: Report) -> list[Line]:
    """The overall figures, then English and each language: `training.reasoning.metrics.report` of two models on the same kind of prompts."""
    lines = [
        _line(name.replace("_", " "), name, first, second)
        for name in (*RATES, "purity", "purity_p5", "completion_tokens")
    ]
    empty = dict.fromkeys(RATES)
    codes = sorted(first["by_language"].keys() | second["by_language"].keys())
    for code in codes:
        pair = [report["by_language"].get(code, empty) for report in (first, second)]
        lines.append(_line(f"trace match, {NAMES[code][0] if code in NAMES else code}", "trace_match", *pair))
    return lines


def reports_of_run(run_dir: RunDir) -> dict[str, Report]:
    """`before` and `after` of a run.

    Raises:
        ConfigError: it was not evaluated (yet).
    """
    evaluation = read_json(run_dir.evaluation / "evaluation.json")
    if evaluation is None:
        raise ConfigError(f"{run_dir.id} has no evaluation", hint="It may be running still, or had `evaluation: null`.")
    return {"before": evaluation["before"], "after": evaluation["after"]}


def compare_runs(runs: Sequence[RunDir], figure: Path) -> list[Line]:
    """Two runs' tuned models side by side; writes their heat maps, and that of the first one's base, to `figure`.

    Raises:
        ConfigError: one was not evaluated.
    """
    first, second = (reports_of_run(run) for run in runs)
    heat_maps(
        {f"base of {runs[0].id}": first["before"], runs[0].id: first["after"], runs[1].id: second["after"]}, figure
    )
    return compare(first["after"], second["after"])


def _line(name: str, key: str, first: Report, second: Report) -> Line:
    one, other = first.get(key), second.get(key)
    if one is None or other is None:
        return Line(name, one, other, None, None, None)
    low, high = _interval(key, first, second) if f"{key}_low" in first and f"{key}_low" in second else (None, None)
    return Line(name, one, other, other - one, low, high)


def _interval(key: str, first: Report, second: Report) -> tuple[float, float]:
    """95 % interval of the difference of two independent rates from their Wilson intervals (Newcombe 1998, method 10)."""
    one, other = first[key], second[key]
    below = math.hypot(other - second[f"{key}_low"], first[f"{key}_high"] - one)
    above = math.hypot(second[f"{key}_high"] - other, one - first[f"{key}_low"])
    return other - one - below, other - one + above
