"""How often the identifier itself is wrong, on texts whose language is known.

`gold.tsv` holds traces of our own writing, six in each of 33 languages and one in each of 34 more; `hard.jsonl` what is hard: mixed, romanised, code-heavy, two-word
traces and the wrong one of two close languages. MGSM's human chains of thought are added where `../shared/data` is present.
`python -m tests.benchmarks.language` prints the tables; `results.json` holds the last ones.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.language import LanguageVerdict, assess, language_code, same_language, second_opinion

HERE = Path(__file__).resolve().parent
MGSM = HERE.parents[3] / "shared" / "data" / "multilingual" / "mgsm_exemplars_thinking.jsonl"

CLOSE = [("es", "pt", "gl"), ("no", "da", "sv"), ("id", "ms"), ("cs", "sk"), ("ru", "uk"), ("it", "es", "ro")]
"""Languages that identifiers take for one another."""


@dataclass(frozen=True)
class Score:
    """Verdicts on the gold traces of one language."""

    language: str
    verdicts: list[LanguageVerdict]
    opinions: list[str | None]

    @property
    def trace_match(self) -> float:
        return sum(bool(verdict.matches) for verdict in self.verdicts) / len(self.verdicts)

    @property
    def strict_match(self) -> float:
        return sum(verdict.strict for verdict in self.verdicts) / len(self.verdicts)

    @property
    def mistaken_for(self) -> list[str]:
        return sorted({verdict.detected or "undetermined" for verdict in self.verdicts if not verdict.matches})

    @property
    def second_match(self) -> float | None:
        """The same for the second identifier; None when it is not installed."""
        known = [opinion for opinion in self.opinions if opinion]
        return sum(same_language(opinion, self.language) for opinion in known) / len(known) if known else None


@dataclass(frozen=True)
class Hard:
    kind: str
    requested: str
    text: str
    matches: bool | None
    strict: bool

    @property
    def verdict(self) -> LanguageVerdict:
        return assess(self.text, self.requested)

    @property
    def passed(self) -> bool:
        """Whether the verdict is the right one; what must not match may also be undetermined."""
        verdict = self.verdict
        matches = bool(verdict.matches) if self.matches is False else verdict.matches
        return (matches, verdict.strict) == (self.matches, self.strict)


def gold() -> dict[str, list[str]]:
    """Texts by language code."""
    texts: dict[str, list[str]] = defaultdict(list)
    for line in (HERE / "gold.tsv").read_text(encoding="utf-8").splitlines():
        code, text = line.split("\t")
        texts[code].append(text)
    if MGSM.exists():
        for line in MGSM.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            code = language_code(row["reasoning_language"])
            if row["analysis"] not in texts[code]:
                texts[code].append(row["analysis"])
    return dict(sorted(texts.items()))


def hard() -> list[Hard]:
    return [Hard(**json.loads(line)) for line in (HERE / "hard.jsonl").read_text(encoding="utf-8").splitlines()]


def scores(texts: dict[str, list[str]]) -> list[Score]:
    return [
        Score(code, [assess(text, code) for text in group], [second_opinion(text) for text in group])
        for code, group in texts.items()
    ]


def close(texts: dict[str, list[str]]) -> list[dict[str, Any]]:
    """How often a trace, or one of its sentences, in one language passes as another close to it."""
    pairs = []
    for written, asked in [(one, other) for group in CLOSE for one in group for other in group if one != other]:
        verdicts = [assess(text, asked) for text in texts[written]]
        sentences = [sentence.matches for verdict in verdicts for sentence in verdict.sentences]
        pairs.append(
            {
                "written": written,
                "asked": asked,
                "traces": len(verdicts),
                "traces_passed": sum(bool(verdict.matches) for verdict in verdicts),
                "sentences": len(sentences),
                "sentences_passed": sum(sentences),
            }
        )
    return pairs
