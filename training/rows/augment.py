"""What can be done to training rows so that the reasoning language is learnt better. All of it is off by default (`DataConfig`)."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from training.config import DataConfig
from training.data import Row
from training.harmony import with_reasoning_language
from training.language import NAMES, LanguageVerdict, assess, language_name
from training.rows.duplicates import NearDuplicates
from training.rows.prompt_sets import INSTRUCTION_LINE, without_instruction

NAMED_VALUE = re.compile(r"^([ \t]*reasoning language:[ \t]*)[^\n]*", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Mismatch:
    """A row whose reasoning is in another language than it asks for."""

    row: Row
    verdict: LanguageVerdict


def augment(rows: Sequence[Row], data: DataConfig, seed: int) -> tuple[list[Row], dict[str, int]]:
    """`rows` with what `data` asks for, in the order: drop, line, names, balance; and how many rows each touched.

    Deterministic under `seed`; rows keep their order, repeated ones come last.
    """
    kept = list(rows)
    counts = {}
    if data.drop_mismatched:
        wrong = {id(mismatch.row) for mismatch in mismatched(kept)}
        kept = [row for row in kept if id(row) not in wrong]
        counts["mismatched_dropped"] = len(wrong)
    if data.language_line == "first":
        before, kept = kept, [line_first(row) for row in kept]
        counts["line_moved"] = sum(old.messages != new.messages for old, new in zip(before, kept, strict=True))
    if data.vary_language_names:
        before, kept = kept, vary_names(kept, seed)
        counts["renamed"] = sum(old.messages != new.messages for old, new in zip(before, kept, strict=True))
    if data.balance_languages:
        before, kept = kept, balance(kept, seed)
        counts["repeated"] = len(kept) - len(before)
    return kept, counts


def mismatched(rows: Sequence[Row]) -> list[Mismatch]:
    """Rows whose reasoning is not in the language they ask for. Too short reasoning counts as right, it cannot be told."""
    found = []
    for row in rows:
        trace = row.messages[-1].get("thinking", "")
        if row.reasoning_language and trace:
            verdict = assess(trace, row.reasoning_language)
            if verdict.matches is False:
                found.append(Mismatch(row, verdict))
    return found


def balance(rows: Sequence[Row], seed: int) -> list[Row]:
    """`rows`, then rows of the rarer reasoning languages again until each has as many as the most frequent one."""
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.reasoning_language, []).append(row)
    most = max((len(group) for language, group in groups.items() if language), default=0)
    choices = random.Random(seed)
    repeated = []
    for language in sorted(filter(None, groups)):
        group = groups[language]
        missing = most - len(group)
        repeated += group * (missing // len(group)) + choices.sample(group, missing % len(group))
    return [*rows, *repeated]


def vary_names(rows: Sequence[Row], seed: int) -> list[Row]:
    """`rows` with the language called by its English name in half of them, else by its native name or its code."""
    choices = random.Random(seed)
    return [
        _renamed(row, choices.choice(_ways(row.reasoning_language))) if row.reasoning_language else row for row in rows
    ]


def line_first(row: Row) -> Row:
    """`row` with the line on the reasoning language first and worded as serving does, and its other instructions after it."""
    if row.reasoning_language is None:
        return row
    messages = with_reasoning_language(without_instruction(row.messages), language_name(row.reasoning_language))
    return replace(row, messages=messages)


def without_near_duplicates(held_out: Sequence[Row], train: Sequence[Row]) -> list[Row]:
    """Held-out rows whose prompt is not nearly one that is trained on."""
    trained = NearDuplicates()
    for row in train:
        trained.add(row.prompt)
    return [row for row in held_out if row.prompt not in trained]


def languages(rows: Sequence[Row]) -> dict[str, int]:
    """Rows by the code of the reasoning language, the most frequent first; `-` counts those that ask for none."""
    return dict(Counter(row.reasoning_language or "-" for row in rows).most_common())


def _ways(code: str) -> list[str]:
    names = NAMES[code]
    return [names[0], names[0], names[min(1, len(names) - 1)], code]


def _renamed(row: Row, name: str) -> Row:
    messages = [
        {**message, "content": NAMED_VALUE.sub(lambda match: f"{match[1]}{name}", message["content"])}
        if message["role"] in ("system", "developer") and INSTRUCTION_LINE.search(message["content"])
        else message
        for message in row.messages
    ]
    return replace(row, messages=messages)
