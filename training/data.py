"""Rows in, tokenised rows out: read, validate with line numbers, split by prompt, render, count what is lost."""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from training.config import MAX_TOKENS, DataConfig
from training.errors import ConfigError, DataError
from training.harmony import Renderer, with_reasoning_language
from training.language import language_code, language_name
from training.rows.records import read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that is not trained, torch's and transformers' convention."""

_ROLES = ("system", "developer", "user", "assistant")
_THINKING_KEYS = ("thinking", "reasoning", "reasoning_content")
_FLAT_COLUMNS = ("user", "final")
_FAULTS_SHOWN = 50
_PIECE_CHARACTERS = 16_384
_CUT_TOKENS = 32  # more than a text's tokens grow where it is cut
_LANGUAGE_LINE = re.compile(r"^[ \t]*reasoning language:([^\n]*)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One conversation that ends with the assistant's turn to learn."""

    messages: list[dict[str, str]]
    reasoning_language: str | None
    """ISO 639-1 code that the row asks to think in; None when it asks for none."""
    source: str
    """Where it came from, for people: `rows.jsonl:17`."""

    @property
    def prompt(self) -> str:
        """The last user turn."""
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "user")

    @property
    def texts(self) -> list[str]:
        """What is rendered of it: templates leave out the thinking of earlier turns."""
        return [*(message["content"] for message in self.messages), self.messages[-1].get("thinking", "")]


def load_rows(data: DataConfig) -> list[Row]:
    """The validated rows of `data.path`.

    Raises:
        DataError: unreadable, empty, or any row is faulty; the message lists every fault with its line.
        ConfigError: there is no such file, or it is of an unknown kind.
    """
    return parse_rows(read(data.path, data.revision, data.split))


def held_out_rows(data: DataConfig) -> list[Row]:
    """The validated rows of `data.held_out_path`; [] when none is set. Raises as `load_rows`."""
    return parse_rows(read(data.held_out_path, None, data.split)) if data.held_out_path else []


def parse_rows(records: Iterable[tuple[str, Any]]) -> list[Row]:
    """Validated rows from `(source, record)` pairs; a record that is an Exception is a fault of its own.

    Raises:
        DataError: all faults in one report, or no rows at all.
    """
    rows, faults, count = [], [], 0
    for source, record in records:
        count += 1
        try:
            rows.append(_row(source, record))
        except (ValueError, ConfigError) as error:
            faults.append(f"{source}: {error}")
    if faults:
        shown = faults[:_FAULTS_SHOWN]
        if len(faults) > len(shown):
            shown.append(f"… and {len(faults) - len(shown)} more")
        raise DataError(
            f"{len(faults)} of {count} rows are faulty:\n" + "\n".join(shown),
            hint="Mend or remove these rows.",
            field="data.path",
        )
    if not rows:
        raise DataError("the data holds no rows", field="data.path")
    return rows


def split_held_out(rows: Sequence[Row], data: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on, no prompt in both.

    With `data.held_out_path`, training rows that share a prompt with it are left out; else `held_out_share` of the prompts.
    """
    given = held_out_rows(data)
    if given:
        taken = {_normalised(row.prompt) for row in given}
        return [row for row in rows if _normalised(row.prompt) not in taken], given
    prompts = sorted({_normalised(row.prompt) for row in rows})
    count = round(len(prompts) * data.held_out_share)
    if data.held_out_share and len(prompts) > 1:
        count = min(max(count, 1), len(prompts) - 1)
    taken = set(random.Random(seed).sample(prompts, count))
    train = [row for row in rows if _normalised(row.prompt) not in taken]
    return train, [row for row in rows if _normalised(row.prompt) in taken]


@dataclass
class Tokenized:
    """Rows as token ids, and what became of them."""

    examples: list[dict[str, list[int]]]
    """`input_ids` and `labels` of equal length; labels are IGNORED where nothing is trained."""
    lengths: list[int]
    """Tokens of every row before anything was cut; no more than MAX_TOKENS are counted of one that was dropped unread."""
    truncated: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, int]:
        return {
            "rows": len(self.lengths),
            "trained": len(self.examples),
            "truncated": len(self.truncated),
            "dropped": len(self.dropped),
            "tokens": sum(len(example["input_ids"]) for example in self.examples),
            "trained_tokens": sum(label != IGNORED for example in self.examples for label in example["labels"]),
        }


def tokenize(rows: Sequence[Row], renderer: Renderer, data: DataConfig) -> Tokenized:
    """Renders every row and masks what is not trained; rows over `data.max_length` are cut, and dropped when nothing is left.

    A row of more than MAX_TOKENS, which no `data.max_length` takes, is dropped unread: rendering 6 MB takes minutes.

    Raises:
        DataError: no rows, a row that the template refuses, a trained mask that is empty, or more loss than
            `data.max_lost_share`.
    """
    if not rows:
        raise DataError(
            "no rows are left to train on: all of them are held out, or were dropped",
            hint="Look at data.held_out_path, data.held_out_share and data.drop_mismatched.",
            field="data.path",
        )
    result = Tokenized(examples=[], lengths=[])
    for row in rows:
        if is_longer(renderer.tokenizer, row.texts, MAX_TOKENS):
            result.lengths.append(MAX_TOKENS)
            result.dropped.append(row.source)
            continue
        try:
            ids, trained = renderer.training_ids(row.messages)
        except DataError as error:
            raise DataError(f"{row.source}: {error.message}", hint=error.hint, field="data.path") from error
        if data.train_on == "all":
            trained = [True] * len(ids)
        if not any(trained):
            raise DataError(f"{row.source}: no token of this row would be trained", field="data.path")
        result.lengths.append(len(ids))
        labels = [token if keep else IGNORED for token, keep in zip(ids, trained, strict=True)][: data.max_length]
        if not any(label != IGNORED for label in labels[1:]):  # the first token has nothing to be predicted from
            result.dropped.append(row.source)
            continue
        if len(ids) > data.max_length:
            result.truncated.append(row.source)
        result.examples.append({"input_ids": ids[: data.max_length], "labels": labels})
    _refuse_heavy_loss(result, data)
    return result


def is_longer(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], limit: float) -> bool:
    """Whether `texts` are surely more than `limit` tokens; encodes no more of them than it needs to know.

    4 MiB take 20 s to encode; this takes as long as the longest text that fits.
    """
    if sum(len(text.encode("utf-8", "replace")) for text in texts) <= limit:  # a token has a byte at least
        return False
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            tokens += len(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]) - _CUT_TOKENS
            if tokens > limit:
                return True
    return False


def _refuse_heavy_loss(result: Tokenized, data: DataConfig) -> None:
    lost = len(result.dropped) + len(result.truncated)
    if not result.examples or lost > data.max_lost_share * len(result.lengths):
        raise DataError(
            f"{lost} of {len(result.lengths)} rows are longer than data.max_length={data.max_length} tokens "
            f"({len(result.dropped)} would be dropped, {len(result.truncated)} cut before their end; "
            f"the longest has {max(result.lengths):,}{' or more' if max(result.lengths) == MAX_TOKENS else ''}), first: {', '.join((result.dropped + result.truncated)[:5])}",
            hint="Raise data.max_length, shorten the rows, or raise data.max_lost_share.",
            field="data.max_length",
        )


def _normalised(prompt: str) -> str:
    return " ".join(prompt.casefold().split())


# Validation


def _row(source: str, record: Any) -> Row:
    if isinstance(record, Exception):
        raise ValueError(str(record))
    if not isinstance(record, dict):
        raise ValueError(f"is a {type(record).__name__}, not an object with `messages`")
    raw = record.get("messages")
    if raw is None:
        raw = _messages_from_columns(record)
    if isinstance(raw, Exception):
        raise ValueError(f"messages: {raw}")
    if not isinstance(raw, list) or not raw:
        raise ValueError("messages must be a list that is not empty")
    messages = [_message(index, message) for index, message in enumerate(raw)]
    _check_order(messages)
    column, line = _language_of_column(record), _language_of_text(messages)
    if column and line and column != line:
        raise ValueError(
            f"reasoning_language is {language_name(column)}, but the messages ask for {language_name(line)}"
        )
    asked = column or line
    if asked and "thinking" not in messages[-1]:
        raise ValueError(f"asks for reasoning in {language_name(asked)}, and its last message has no `thinking`")
    if column and not line:
        messages = with_reasoning_language(messages, language_name(column))
    return Row(messages, asked, source)


def _messages_from_columns(record: dict[str, Any]) -> list[dict[str, Any]]:
    missing = [column for column in _FLAT_COLUMNS if not record.get(column)]
    if missing:
        raise ValueError(f"has neither messages nor the columns {' and '.join(missing)}")
    language, developer = record.get("reasoning_language"), record.get("developer")
    if developer is not None and not isinstance(developer, str):
        raise ValueError(f"developer is a {type(developer).__name__}, not a text")
    system = "\n\n".join(filter(None, (f"reasoning language: {language}" if language else None, developer)))
    return [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": record["user"]},
        {"role": "assistant", "content": record["final"], "thinking": record.get("analysis")},
    ]


def _message(index: int, message: Any) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise ValueError(f"{where} is a {type(message).__name__}, not an object")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; use one of {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"{where}.content is {'missing' if content is None else type(content).__name__}, not a text")
    if not content.strip():
        raise ValueError(f"{where}.content is empty")
    for key, text in message.items():
        if isinstance(text, str) and not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"{where}.{key} holds half of a surrogate pair, which is no text")
    thoughts = {key: message[key] for key in _THINKING_KEYS if message.get(key) is not None}
    if any(not isinstance(thought, str) for thought in thoughts.values()):
        raise ValueError(f"{where}.{next(iter(thoughts))} is not a text")
    distinct = {thought for thought in thoughts.values() if thought.strip()}
    if len(distinct) > 1:
        raise ValueError(f"{where} holds different texts in {' and '.join(thoughts)}")
    if distinct and role != "assistant":
        raise ValueError(f"{where}: only an assistant message may hold {next(iter(thoughts))}")
    return {"role": role, "content": content, **({"thinking": distinct.pop()} if distinct else {})}


def _check_order(messages: list[dict[str, str]]) -> None:
    roles = [message["role"] for message in messages]
    if roles[-1] != "assistant":
        raise ValueError(f"the last message is the {roles[-1]}'s; a row ends with the assistant's")
    if "user" not in roles:
        raise ValueError("has no user message")
    if roles[-2] == "assistant":
        raise ValueError("ends with two assistant messages: templates render the first otherwise; make them one")
    first_turn = next(index for index, role in enumerate(roles) if role in ("user", "assistant"))
    late = [index for index, role in enumerate(roles) if role in ("system", "developer") and index > first_turn]
    if late:
        raise ValueError(
            f"messages[{late[0]}] is a {roles[late[0]]} message after the conversation began; put it first"
        )


def _language_of_column(record: dict[str, Any]) -> str | None:
    name = record.get("reasoning_language")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"reasoning_language is a {type(name).__name__}, not a text")
    return language_code(name) if name else None


def _language_of_text(messages: list[dict[str, str]]) -> str | None:
    system = "\n".join(message["content"] for message in messages if message["role"] in ("system", "developer"))
    names = dict.fromkeys(filter(None, map(str.strip, _LANGUAGE_LINE.findall(system))))
    codes = list(dict.fromkeys(map(language_code, names)))
    if len(codes) > 1:
        raise ValueError(f"the messages ask for {' and for '.join(map(language_name, codes))}")
    return codes[0] if codes else None
