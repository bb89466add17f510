"""Prompts to evaluate on: held-out rows, MGSM's tsv files, or any JSONL, crossed with the reasoning languages to ask for."""

import hashlib
import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.data import is_longer
from training.errors import DataError
from training.language import detect, language_code
from training.rows.duplicates import NearDuplicates

if TYPE_CHECKING:
    from training.data import Row
    from training.harmony import Renderer

Message = dict[str, Any]

INSTRUCTION_LINE = re.compile(r"^[ \t]*reasoning language:[^\n]*\n*", re.IGNORECASE | re.MULTILINE)

_INSTRUCTION_TOKENS = 32
"""Room for the line on the reasoning language, which a row need not have."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A conversation up to the question, without a word on the language to think in.

    Attributes:
        messages: system, user and earlier turns.
        language: code of the question's language; None when it is too short to tell.
        answer: what a right answer holds, where that is known.
    """

    messages: list[Message]
    language: str | None = None
    answer: str | None = None

    @property
    def text(self) -> str:
        """The last user turn."""
        return next((message["content"] for message in reversed(self.messages) if message["role"] == "user"), "")


@dataclass(frozen=True)
class Prompt:
    """A question, and the code of the language to think in."""

    question: Question
    reasoning_language: str

    @property
    def id(self) -> str:
        """The same for the same content, wherever it stands in a set."""
        content = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def prompts_for(rows: "Sequence[Row]", languages: Sequence[str] | None, n: int, seed: int) -> list[Prompt]:
    """`n` prompts from held-out `rows`; `languages` None asks for those of the rows.

    Raises:
        ConfigError: an unknown language.
        DataError: no rows, or none that names a language while `languages` is None.
    """
    asked = languages or sorted({row.reasoning_language for row in rows if row.reasoning_language})
    return cross([Question(without_instruction(row.messages[:-1])) for row in rows], asked, n, seed)


def answerable(rows: "Sequence[Row]", renderer: "Renderer", context: int | None, max_new_tokens: int) -> "list[Row]":
    """`rows` whose prompt leaves `max_new_tokens` of a `context` to the answer; the others are logged. None is any length.

    Raises:
        DataError: a row that the template refuses.
    """
    room = math.inf if context is None else context - max_new_tokens - _INSTRUCTION_TOKENS
    fits = [_prompt_fits(row, renderer, room) for row in rows]
    left_out = [row.source for row, fit in zip(rows, fits, strict=True) if not fit]
    if left_out:
        logger.warning(
            "%d of %d held-out rows are left out: prompt and evaluation.max_new_tokens=%d exceed the model's context of %d "
            "tokens, first: %s",
            *(len(left_out), len(rows), max_new_tokens, context, ", ".join(left_out[:5])),
        )
    return [row for row, fit in zip(rows, fits, strict=True) if fit]


def _prompt_fits(row: "Row", renderer: "Renderer", room: float) -> bool:
    messages = row.messages[:-1]
    if is_longer(renderer.tokenizer, [message["content"] for message in messages], room):
        return False
    try:
        return len(renderer.prompt_ids(messages)) <= room
    except DataError as error:
        raise DataError(f"{row.source}: {error.message}", hint=error.hint, field="data.held_out_path") from error


def read_questions(path: Path) -> list[Question]:
    """Questions of a set: `.tsv` with a question and an answer a line (MGSM), else JSONL with `messages`, `prompt` or `question`.

    Raises:
        DataError: unreadable, empty, or a line without a question; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompts in {path}: {error}", field="set") from error
    read = _from_tsv if path.suffix == ".tsv" else _from_json
    questions = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                questions.append(read(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{path.name}:{number} holds no question: {error}", field="set") from error
    if not questions:
        raise DataError(f"{path} holds no prompts", field="set")
    return questions


def cross(questions: Sequence[Question], languages: Sequence[str], n: int, seed: int) -> list[Prompt]:
    """`n` prompts, as evenly as they go over `languages` and, within each, over the languages of the questions.

    Near-duplicate questions are left out. With fewer distinct questions than `n` over the languages there are fewer prompts.

    Raises:
        ConfigError: an unknown language.
        DataError: no questions or no languages.
    """
    asked = list(dict.fromkeys(language_code(language) for language in languages))
    if not questions or not asked:
        missing = "no questions" if not questions else "no reasoning language"
        raise DataError(f"there are {missing} to evaluate on", hint="Name evaluation.languages and a held-out set.")
    seen = NearDuplicates()
    distinct = with_languages([question for question in questions if seen.add(question.text)])
    random.Random(seed).shuffle(distinct)
    groups: dict[str, list[Question]] = {}
    for question in distinct:
        groups.setdefault(question.language or "", []).append(question)
    prompts = []
    for index, language in enumerate(asked):
        quota = n // len(asked) + (index < n % len(asked))
        shift = index * math.ceil(quota / len(groups))  # so that languages share few questions when there are many
        ordered = _interleaved([_rotated(groups[key], shift) for key in sorted(groups)])
        prompts += [Prompt(question, language) for question in ordered[:quota]]
    return prompts


def with_languages(questions: Sequence[Question]) -> list[Question]:
    """`questions` with their languages detected where unset, among the languages that the set is in as a whole.

    A single short question may look like a rare neighbour of its language; two of them in a set seldom do.
    """
    first = [question.language or detect(question.text) for question in questions]
    counts = Counter(language for language in first if language)
    likely = {language for language, count in counts.items() if count >= max(2, len(questions) / 50)}
    second = [
        found if found in likely or not likely else detect(question.text, likely, min_letters=8)
        for question, found in zip(questions, first, strict=True)
    ]
    return [replace(question, language=found) for question, found in zip(questions, second, strict=True)]


def _interleaved(groups: Sequence[Sequence[Question]]) -> list[Question]:
    """The first question of each group, then the second of each, and so on."""
    return [question for question in chain.from_iterable(zip_longest(*groups)) if question is not None]


def _rotated(questions: list[Question], shift: int) -> list[Question]:
    shift %= len(questions)
    return questions[shift:] + questions[:shift]


def without_instruction(messages: Sequence[Message]) -> list[Message]:
    """`messages` without the line that names the reasoning language, and without system messages that held nothing else."""
    kept = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            content = INSTRUCTION_LINE.sub("", message["content"]).strip()
            if content:
                kept.append({**message, "content": content})
        else:
            kept.append(message)
    return kept


def _from_tsv(line: str) -> Question:
    text, _, answer = line.rstrip("\r").partition("\t")
    return Question([{"role": "user", "content": text}], answer=answer.strip() or None)


def _from_json(line: str) -> Question:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"the line is a {type(record).__name__}, not an object")
    answer = record.get("answer")
    known = "" if answer is None else str(answer).strip()
    return Question(without_instruction(_messages_of(record)), answer=known or None)


def _messages_of(record: dict[str, Any]) -> list[Message]:
    if isinstance(record.get("messages"), list):
        messages = [dict(message) for message in record["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
    else:
        text = next((record[key] for key in ("prompt", "question", "user") if record.get(key)), None)
        messages = [{"role": "user", "content": text}]
    if not messages or any(not isinstance(message["content"], str) for message in messages):
        raise ValueError("give `messages`, `prompt` or `question` as text")
    return messages
