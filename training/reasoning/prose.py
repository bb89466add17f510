"""What of a text is prose, the part that says which language its writer writes. Takes linear time on any text.

A span ends where another could begin, runs are bounded or anchored: hostile text is no slower than other text.
"""

import re
import unicodedata
from functools import lru_cache

MAX_CHARACTERS = 400_000
"""What is read of a text: about 100,000 tokens."""

SPANS = (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"))
"""Delimiters of mathematics that may hold several lines."""

QUOTATION_MARKS = ('""', "“”", "„“", "„”", "«»", "»«", "‘’", "「」", "『』", "《》")

NOT_PROSE = re.compile(
    "|".join(
        [
            r"`[^`\n]*`",
            r"\$(?=\S)[^$\n]*(?<=\S)\$(?!\d)",  # TeX; not "$3 and $23"
            r"\\[A-Za-z]+(?:\{[^{}\n]*\})*",
            r"<[A-Za-z/!][^<>\n]*>",  # markup
            r"\b[a-z][a-z0-9+.-]{1,15}://\S+|\bwww\.\S+|[\w.+-]{1,64}@[\w-]+\.[\w.-]+",
            r"(?:[A-Za-z]:)?(?:[\\/][\w.-]+){2,}",  # paths
            *(rf"{re.escape(pair[0])}[^{re.escape(pair)}\n]{{1,300}}{re.escape(pair[1])}" for pair in QUOTATION_MARKS),
        ]
    )
)
"""Spans within a line that are no prose of the writer's."""

CODE_SIGN = re.compile(
    r"[={}<>]|\w[\[(]|::|->|[)\]}'\"\d];|\w_\w|//"
    r"|^[ \t]*(?:def|class|import|from|return|for|while|if|elif|else|try|except|public|private|const|let|var|function|#include|print"
    r"|SELECT|INSERT|UPDATE|DELETE|FROM|WHERE)\b(?!.*[.!?…]$)"
)
LETTERS_PER_SIGN = 15
"""A line with a sign of code for every so many letters is code: prose about code has far fewer."""

SYMBOL_WORD = re.compile(
    r"(?<![A-Za-z_])[A-Za-z_]*[\d_][A-Za-z\d_]*|\b[a-z]+[A-Z]\w*|\b[A-Za-z]\w*(?=\()|\b[A-Za-z](?=\s?[=+*/^<>-])"
)
"""Words with digits or underscores, camelCase, called functions, variables beside an operator."""

NAME = re.compile(r"(?<=[\w,;:)] )[A-ZÀ-ÖØ-ÞА-ЯЁІЇЄҐΑ-Ω][\w'’-]+")
"""Capitalised words that do not start a sentence."""

SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”“»)\]]*\s+|(?<=[。！？।॥؟۔።։])|\n+")


def prose(text: str) -> str:
    """`text` without mathematics, code, URLs, markup, quotations and symbols."""
    text = _without_spans(text[:MAX_CHARACTERS], "```", "```", to_end=True)  # a trace may be cut inside a code block
    text = re.sub(r"\\end\{\w*\*?\}", r"\\]", re.sub(r"\\begin\{\w*\*?\}", r"\\[", text))
    for opening, closing in SPANS:
        text = _without_spans(text, opening, closing)
    text = NOT_PROSE.sub(" ", text)
    text = "\n".join(line for line in text.split("\n") if not is_code(line))
    return SYMBOL_WORD.sub(" ", text)


def is_code(line: str) -> bool:
    signs = sum(1 for _ in CODE_SIGN.finditer(line))
    return signs > 0 and count_letters(line) <= LETTERS_PER_SIGN * signs


def without_names(text: str) -> str:
    """`text` without capitalised words inside sentences: names say little about the language. German loses its nouns, and has enough left."""
    return NAME.sub(" ", text)


def _without_spans(text: str, opening: str, closing: str, to_end: bool = False) -> str:
    """`text` without what is between delimiters; an unclosed span is left in, or is cut to the end."""
    kept = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        kept.append(text[position:start])
        position = end + len(closing)
    rest = text[position:start] if start >= 0 and to_end else text[position:]
    return " ".join([*kept, rest])


def split_sentences(text: str) -> list[str]:
    """Sentences and lines, blank ones left out."""
    return [part for part in SENTENCE_END.split(text) if part and not part.isspace()]


def count_letters(text: str) -> int:
    """Letters of a text, marks included; a Han character counts as three, kana and hangul as two: they say that much more."""
    return sum(_weight(character) for character in text)


def is_letter(character: str) -> bool:
    """Letters, and the marks that belong to them in many scripts."""
    return _weight(character) > 0


@lru_cache(maxsize=8192)
def _weight(character: str) -> int:
    if unicodedata.category(character)[0] not in "LM":
        return 0
    name = unicodedata.name(character, "")
    if name.startswith("CJK UNIFIED"):
        return 3
    return 2 if name.startswith(("HIRAGANA", "KATAKANA", "HANGUL")) else 1
