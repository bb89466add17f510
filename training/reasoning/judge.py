"""What is measured on one response: the language of its reasoning and of its answer, and whether the answer is right."""

import re
import unicodedata

from training.language import assess, second_opinion
from training.parsing.parsers import Parsed
from training.reasoning.metrics import Judged
from training.rows.prompt_sets import Prompt


def judge(prompt: Prompt, parsed: Parsed, completion_tokens: int) -> Judged:
    """What is measured on one response."""
    question = prompt.question
    verdict = assess(parsed.reasoning, prompt.reasoning_language)
    in_question_language = assess(parsed.answer, question.language).matches if question.language else None
    return Judged(
        prompt_id=prompt.id,
        question=question.text,
        question_language=question.language,
        reasoning_language=prompt.reasoning_language,
        reasoning=parsed.reasoning,
        answer=parsed.answer,
        finish_reason=parsed.finish_reason,
        completion_tokens=completion_tokens,
        detected=verdict.detected,
        strict=verdict.strict,
        purity=verdict.share,
        matches=bool(verdict.matches),
        answer_matches=in_question_language,
        correct=None if question.answer is None else holds_answer(parsed.answer, question.answer),
        second=second_opinion(parsed.reasoning),
    )


NUMBER = re.compile(r"-?(?:\d{1,3}(?:['’ \u00a0\u202f]\d{3}(?!\d))+|\d+)(?:[.,]\d+)*")
"""Marks belong to it between digits alone, spaces between thousands: `1, 2` and `3 4` are two each."""

WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR")
"""Scripts, by Unicode's names of their letters, that put no space around a word, or write particles to it."""


def holds_answer(text: str, expected: str) -> bool:
    """Whether `text` answers `expected`: its last number is that one (as MGSM is scored), or it holds the words."""
    wanted = _number(expected)
    if wanted is None:
        return bool(re.search(_as_words(expected.strip().casefold()), text.casefold()))
    found = [number for match in NUMBER.findall(text) if (number := _number(match)) is not None]
    return bool(found) and found[-1] == wanted


def _as_words(expected: str) -> str:
    """A pattern for `expected` where it is no part of a longer word."""
    starts, ends = (
        "" if unicodedata.name(edge, "").startswith(WITHOUT_SPACES) else r"\w" for edge in (expected[:1], expected[-1:])
    )
    before, after = f"(?<!{starts})" if starts else "", f"(?!{ends})" if ends else ""
    return before + re.escape(expected) + after


def _number(text: str) -> float | None:
    """A number as people of any country write it: 70,000 and 70.000 and 70 000; 0.5 and 0,5; ৭."""
    digits = "".join(
        str(unicodedata.digit(c)) if c.isdigit() else c for c in text.strip() if c not in " '’\u00a0\u202f"
    )
    if re.fullmatch(r"-?\d{1,3}(?:([.,])\d{3})(?:\1\d{3})*", digits):
        digits = re.sub(r"[.,]", "", digits)
    elif re.fullmatch(r"-?[\d.]+,\d+|-?\d+,\d+", digits):
        digits = digits.replace(".", "").replace(",", ".")
    try:
        return float(digits.replace(",", ""))
    except ValueError:
        return None
