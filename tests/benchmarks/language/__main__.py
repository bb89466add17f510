"""Prints the identifier's own error, by language, on hard cases, and between close languages: `python -m tests.benchmarks.language [JSON]`.

With a path it writes the same figures there.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.language import close, gold, hard, scores
from training.language import language_name, same_language
from training.reasoning.metrics import wilson

LONG = 80
"""Characters from which a trace must be told nearly without fail."""


def main() -> None:
    texts = gold()
    figures: dict[str, Any] = {"gold": gold_figures(texts), "hard": hard_figures(), "close": close(texts)}
    for table in (gold_table(figures["gold"]), hard_table(figures["hard"]), close_table(figures["close"])):
        Console().print(table)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def gold_figures(texts: dict[str, list[str]]) -> dict[str, Any]:
    """Shares over all traces and over those of 80 characters or more, and by language."""
    results = scores(texts)
    verdicts = [
        (text, verdict)
        for score in results
        for text, verdict in zip(texts[score.language], score.verdicts, strict=True)
    ]
    long = [bool(verdict.matches) for text, verdict in verdicts if len(text) >= LONG]
    opinions = [
        same_language(opinion, verdict.detected)
        for score in results
        for opinion, verdict in zip(score.opinions, score.verdicts, strict=True)
        if opinion and verdict.detected
    ]
    return {
        "languages": len(results),
        **_share("trace_match", [bool(verdict.matches) for _, verdict in verdicts]),
        **_share("strict_match", [verdict.strict for _, verdict in verdicts]),
        **_share(f"trace_match_of_{LONG}_characters", long),
        **(_share("identifiers_disagree", [not same for same in opinions]) if opinions else {}),
        "by_language": {
            score.language: {
                "traces": len(score.verdicts),
                "trace_match": score.trace_match,
                "strict_match": score.strict_match,
                "mistaken_for": score.mistaken_for,
                "second_identifier": score.second_match,
            }
            for score in results
        },
    }


def _share(name: str, outcomes: list[bool]) -> dict[str, Any]:
    low, high = wilson(sum(outcomes), len(outcomes))
    shares = {"share": sum(outcomes) / len(outcomes), "low": low, "high": high}
    return {name: {"traces": len(outcomes)} | {key: round(share, 4) for key, share in shares.items()}}


def hard_figures() -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for case in hard():
        kind = figures.setdefault(case.kind, {"traces": 0, "right": 0, "wrong": []})
        kind["traces"] += 1
        kind["right"] += case.passed
        if not case.passed:
            kind["wrong"].append(f"{case.requested}: {case.verdict.detected} {case.text[:40]}")
    return figures


def gold_table(figures: dict[str, Any]) -> Table:
    table = Table("language", "traces", "trace match", "strict match", "mistaken for", "second", title="Gold traces")
    for code, found in figures["by_language"].items():
        second = "-" if found["second_identifier"] is None else f"{found['second_identifier']:.0%}"
        shares = (f"{found['trace_match']:.1%}", f"{found['strict_match']:.1%}")
        table.add_row(language_name(code), str(found["traces"]), *shares, ", ".join(found["mistaken_for"]), second)
    table.add_section()
    for name, key in (("all", "trace_match"), (f"of {LONG} characters", f"trace_match_of_{LONG}_characters")):
        found = figures[key]
        strict = f"{figures['strict_match']['share']:.1%}" if name == "all" else ""
        disagree = figures.get("identifiers_disagree") if name == "all" else None
        second = f"{1 - disagree['share']:.1%}" if disagree else ""
        table.add_row(name, str(found["traces"]), f"{found['share']:.1%} (from {found['low']:.1%})", strict, "", second)
    return table


def hard_table(figures: dict[str, dict[str, Any]]) -> Table:
    table = Table("kind", "traces", "judged right", "wrong ones", title="Hard traces")
    for kind, found in figures.items():
        table.add_row(kind, str(found["traces"]), str(found["right"]), "; ".join(found["wrong"]))
    return table


def close_table(figures: list[dict[str, Any]]) -> Table:
    table = Table("written in", "asked for", "traces that pass", "sentences that pass", title="Close languages")
    for pair in figures:
        shown = (f"{pair[name + '_passed']} of {pair[name]}" for name in ("traces", "sentences"))
        table.add_row(pair["written"], pair["asked"], *shown)
    return table


if __name__ == "__main__":
    main()
