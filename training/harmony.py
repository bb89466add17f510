"""The one renderer: messages to token ids, the same for training and for serving, with the model's own chat template.

Text of users and data never becomes a control token. Where a text holds the literal of one (`<|end|>`), a mark, a character
that occurs nowhere in the conversation, is put after the literal's first character; the template is rendered,
and the rendered text is cut at the marks and encoded part by part: no part holds a whole literal but the template's own.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from training.errors import DataError, ModelError
from training.parsing.harmony_parser import HarmonyParser
from training.parsing.parsers import Delta, Parsed, Parser
from training.parsing.think_parser import ThinkParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Delta",
    "HarmonyParser",
    "Message",
    "Parsed",
    "Parser",
    "Renderer",
    "ThinkParser",
    "with_reasoning_language",
]

Message = dict[str, Any]
"""role, content, and for an assistant `thinking` (or `reasoning`, `reasoning_content`)."""

THINKING_KEYS = ("thinking", "reasoning_content", "reasoning")
HARMONY_TOKENS = ("<|channel|>", "<|message|>")
INSTRUCTION_ROLES = ("system", "developer")
MARKS = range(0xE000, 0x110000)  # the private-use characters first, then what else there is


class Renderer:
    """Renders conversations for one tokenizer and its chat template. Safe to share between threads.

    Templates differ: where one renders no reasoning, it goes into the answer between think tags; where one takes no system message,
    its text goes before the first user's.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        current_date: the date that the template prints, if it prints one; None is the day of rendering.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", current_date: date | None = None):
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template", hint="Put chat_template.jinja beside tokenizer.json."
            )
        self.tokenizer = tokenizer
        self._template = str(tokenizer.get_chat_template())
        self._template_kwargs: dict[str, Any] = {"strftime_now": current_date.strftime} if current_date else {}
        self._thinking_keys = [key for key in THINKING_KEYS if re.search(rf"\b{key}\b", self._template)]
        self._literals = {token.content for token in tokenizer.added_tokens_decoder.values() if self._is_control(token)}
        self._literal_start = _first_character_of(self._literals)
        self._harmony = all(token in self._literals and token in self._template for token in HARMONY_TOKENS)
        self._takes_system = self._shows([{"role": "system", "content": "Hi."}, {"role": "user", "content": "Ho."}])

    def _is_control(self, token: Any) -> bool:
        """Special tokens, and other added ones that the template writes itself, such as `<think>`."""
        return token.special or bool(token.content.strip() and token.content in self._template)

    def _shows(self, messages: list[Message]) -> bool:
        try:
            self._render(messages, add_generation_prompt=True)
        except DataError:
            return False
        return True

    def prompt_ids(self, messages: Sequence[Message], *, reasoning_effort: str | None = None) -> list[int]:
        """The conversation up to where the assistant starts.

        Args:
            messages: oldest first; leading system and developer messages are merged into one.
            reasoning_effort: low, medium or high; None is the template's default.

        Raises:
            DataError: a message that the template refuses or would leave out.
        """
        kwargs = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
        return self._ids([(messages, True)], **kwargs)[0]

    def training_ids(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A whole row, and which of its tokens are trained: the last assistant turn through its last stop token.

        In harmony its headers are trained as well: the model writes that of its answer itself. In other formats all that serving
        writes before the model starts is left out. A row whose template ends without a stop token gets the tokenizer's.

        Raises:
            DataError: the last message is not an assistant's, or what comes before it renders differently without it.
        """
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError("a training row must hold a question and end with an assistant message")
        before = messages[:-1]
        ids, *prompts = self._ids([(messages, False), (before, False), *([] if self._harmony else [(before, True)])])
        start = max((len(prompt) for prompt in prompts if ids[: len(prompt)] == prompt), default=len(ids))
        if start == len(ids):
            raise DataError(
                "the turns before the last one render differently without it",
                hint="Let a user or tool message come before the last assistant message.",
            )
        special = {id for id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        end = len(ids)
        while end > start and not str(self.tokenizer.decode([ids[end - 1]])).strip():
            end -= 1  # a line break after the stop token
        if ids[end - 1] not in special and self.tokenizer.eos_token_id is not None:
            ids, end = [*ids[:end], self.tokenizer.eos_token_id], end + 1
        return ids, [start <= position < end for position in range(len(ids))]

    def parser(self, prompt_ids: Sequence[int] = ()) -> Parser:
        """A fresh parser for what the model generates after `prompt_ids`: harmony channels, or think tags."""
        if self._harmony:
            return HarmonyParser(self.tokenizer)
        tail = str(self.tokenizer.decode(list(prompt_ids[-8:])))
        return ThinkParser(self.tokenizer, thinking=tail.rstrip().endswith("<think>"))

    def _ids(self, conversations: Sequence[tuple[Sequence[Message], bool]], **kwargs: Any) -> list[list[int]]:
        """Token ids of each conversation, with a generation prompt or without.

        All share their marks, so that a prefix stays one: a cut inside typed literals, and where think tags go.
        """
        prepared = [self._template_messages(messages) for messages, _ in conversations]
        cut, opening, closing = _unused_characters([self._template, *_strings([prepared, kwargs])], 3)

        def broken(value: Any) -> Any:
            return _map_strings(value, lambda text: self._literal_start.sub(lambda at: at.group() + cut, text))

        encoded = []
        for messages, (_, generation_prompt) in zip(prepared, conversations, strict=True):
            shown = broken(messages)
            if not self._thinking_keys and not generation_prompt:
                shown[-1] = _with_inline_thinking(shown[-1], opening, closing)
            text = self._render(shown, add_generation_prompt=generation_prompt, **broken(kwargs))
            text = text.replace(opening, "<think>\n").replace(closing, "\n</think>\n\n")
            encoded.append(self._encode(text.split(cut)))
        return encoded

    def _encode(self, parts: list[str]) -> list[int]:
        distinct = list(dict.fromkeys(parts))  # a megabyte of one literal is two distinct parts
        encoded = self.tokenizer(distinct, add_special_tokens=False, verbose=False)["input_ids"]
        ids_of = dict(zip(distinct, encoded, strict=True))
        return [id for part in parts for id in ids_of[part]]

    def _template_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form templates take: no null keys, thinking under the template's names, one system message."""
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content") or "", str):
                raise DataError(f"a message needs a role and a text as content: {str(message)[:200]}")
        prepared = []
        for message in merge_instructions(messages):
            thinking = next((message[key] for key in THINKING_KEYS if message.get(key)), None)
            kept = {key: value for key, value in message.items() if value is not None and key not in THINKING_KEYS}
            if thinking:
                kept |= dict.fromkeys(self._thinking_keys or ["thinking"], thinking)
            prepared.append({"content": "", **kept})
        if not self._takes_system and len(prepared) > 1 and prepared[0]["role"] == "system":
            instructions, first, *others = prepared
            prepared = [first | {"content": f"{instructions['content']}\n\n{first['content']}"}, *others]
        return _map_strings(prepared, _without_surrogates)

    def _render(self, messages: list[Message], *, add_generation_prompt: bool, **kwargs: Any) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:  # templates add whatever they are given to strings
            raise DataError(f"the chat template refuses the messages: {error}") from error
        text = str(rendered)
        for message in messages:
            for key in self._must_show(message, training=message is messages[-1] and not add_generation_prompt):
                if message[key].strip() not in text:
                    raise DataError(
                        f"the chat template leaves out the {key} of the {message['role']} message {message[key][:80]!r}",
                        hint="Put system messages first: gpt-oss's template renders no later ones.",
                    )
        return text

    def _must_show(self, message: Message, training: bool) -> list[str]:
        """Keys whose text must be found in what is rendered. Templates leave out earlier thinking, and quote tool results."""
        if message["role"] == "assistant":
            return [key for key in ("content", *THINKING_KEYS) if key in message] if training else []
        return [] if message["role"] == "tool" else ["content"]


def merge_instructions(messages: Sequence[Message]) -> list[Message]:
    """`messages` with the leading system and developer messages made one, their texts in order."""
    leading = 0
    while leading < len(messages) and messages[leading].get("role") in INSTRUCTION_ROLES:
        leading += 1
    if not leading:
        return list(messages)
    texts = [message["content"] for message in messages[:leading] if message.get("content")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[leading:]]


def with_reasoning_language(messages: Sequence[Message], name: str) -> list[Message]:
    """`messages` told to reason in the language `name`, worded as in the training data, before their own instructions."""
    return merge_instructions([{"role": "system", "content": f"reasoning language: {name}"}, *messages])


def _first_character_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of each place where a literal stands, overlapping ones included."""
    rests: dict[str, list[str]] = {}
    for literal in literals:
        rests.setdefault(literal[0], []).append(re.escape(literal[1:]))
    return re.compile("|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` done to every string in it, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _with_inline_thinking(message: Message, opening: str, closing: str) -> Message:
    """`message` with its thinking in front of its content, between the marks."""
    thinking = message.get("thinking")
    content = f"{opening}{thinking}{closing}{message['content']}" if thinking else message["content"]
    return {key: value for key, value in message.items() if key != "thinking"} | {"content": content}


def _unused_characters(texts: Iterable[str], count: int) -> list[str]:
    used = set().union(*texts)
    unused = list(itertools.islice((chr(code) for code in MARKS if chr(code) not in used), count))
    if len(unused) < count:
        raise DataError("the messages use every character there is; none is left to mark control tokens")
    return unused


def _without_surrogates(text: str) -> str:
    """`text` with halves of surrogate pairs, which UTF-8 cannot hold, joined or replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
