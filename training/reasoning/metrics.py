"""Figures over judged responses, with their uncertainty. Names and definitions are the literature's.

- trace match: the likeliest language of the whole trace is the asked one (XReasoning, arXiv:2505.22888; LCR in MMATH, arXiv:2505.19126)
- strict match: so is every sentence of 20 letters or more (M-Thinker, arXiv:2510.07300; AdaMame, arXiv:2606.15080)
- purity: share of a trace's letters in the asked language; the mean over traces, and the 5th percentile
- answer-language match: the answer is in the question's language; answers too short to tell are left out
- accuracy: the answer is right, over the prompts whose answer is known

- identifiers disagree: a second identifier takes the trace for another language, over the traces that both judged

A trace too short to tell is a miss, and is counted as undetermined.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.config import EvaluationConfig
from training.language import same_language

RATES = ("trace_match", "strict_match", "answer_language_match", "accuracy")

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Judged:
    """A response with what was measured on it."""

    prompt_id: str
    question: str
    question_language: str | None
    reasoning_language: str
    reasoning: str
    answer: str
    finish_reason: str
    completion_tokens: int
    detected: str | None
    strict: bool
    purity: float
    matches: bool
    answer_matches: bool | None
    correct: bool | None
    second: str | None = None
    """What a second identifier takes the reasoning for, where one is installed."""


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % interval of a rate (Wilson 1927): inside 0 to 1 and honest at the ends, where the normal one is not."""
    if not n:
        return 0.0, 1.0
    rate, z2 = hits / n, Z95**2
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def summary(responses: Sequence[Judged]) -> dict[str, Any]:
    """All figures of `responses`; a rate over nothing is None."""
    purities = [response.purity for response in responses]
    return {
        "prompts": len(responses),
        **_rate("trace_match", [response.matches for response in responses]),
        **_rate("strict_match", [response.strict for response in responses]),
        "purity": statistics.fmean(purities) if purities else None,
        "purity_p5": percentile(purities, 0.05) if purities else None,
        **_rate("answer_language_match", [response.answer_matches for response in responses]),
        **_rate("accuracy", [response.correct for response in responses]),
        "undetermined": sum(response.detected is None for response in responses),
        **_rate("identifiers_disagree", [_disagrees(response) for response in responses]),
        "completion_tokens": statistics.fmean(r.completion_tokens for r in responses) if responses else None,
        "finish_reasons": dict(Counter(response.finish_reason for response in responses)),
    }


def report(responses: Sequence[Judged]) -> dict[str, Any]:
    """The figures over all languages other than English, and for English, cross cases, each language and each pair of languages."""
    others = [response for response in responses if response.reasoning_language != "en"]
    return {
        **summary(others),
        "english": summary([response for response in responses if response.reasoning_language == "en"]),
        "cross": summary(
            [response for response in others if response.question_language != response.reasoning_language]
        ),
        "by_language": {code: summary(group) for code, group in _by(responses, "reasoning_language").items()},
        "matrix": {
            question: {code: _cell(cell) for code, cell in _by(row, "reasoning_language").items()}
            for question, row in _by(responses, "question_language").items()
        },
    }


def gate(evaluation: Mapping[str, Any] | None, config: EvaluationConfig) -> str | None:
    """Why a model must not be registered or deployed, or None when it may.

    Args:
        evaluation: `{before, after}`, or one `report`; None when the model was not evaluated.
    """
    least = config.gate.model_dump(exclude_none=True) if config.gate else {}
    figures = (evaluation or {}).get("after", evaluation or {})
    misses = []
    for name, value in least.items():
        found = figures.get(name)
        if found is None or found < value:
            shown = "was not measured" if found is None else f"is {found:.1%}"
            misses.append(f"{name} {shown}, the gate asks for {value:.1%}")
    return "; ".join(misses) or None


def tags(evaluation: Mapping[str, Any] | None) -> dict[str, str]:
    """The figures of a tuned model as tags of its registered version: `trace_match: 0.975`, `trace_match_before: 0.000`."""
    found = {}
    for name in (*RATES, "purity"):
        for when, suffix in (("after", ""), ("before", "_before")):
            value = (evaluation or {}).get(when, {}).get(name)
            if value is not None:
                found[f"{name}{suffix}"] = f"{value:.3f}"
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _rate(name: str, outcomes: Iterable[bool | None]) -> dict[str, Any]:
    """A rate and its interval over the outcomes that are known."""
    known = [outcome for outcome in outcomes if outcome is not None]
    low, high = wilson(sum(known), len(known))
    if not known:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: sum(known) / len(known), f"{name}_low": low, f"{name}_high": high}


def _disagrees(response: Judged) -> bool | None:
    if response.detected is None or response.second is None:
        return None
    return not same_language(response.detected, response.second)


def _cell(responses: Sequence[Judged]) -> dict[str, Any]:
    return {"prompts": len(responses), "trace_match": sum(r.matches for r in responses) / len(responses)}


def _by(responses: Iterable[Judged], attribute: str) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for response in responses:
        groups[getattr(response, attribute) or "unknown"].append(response)
    return dict(sorted(groups.items()))
