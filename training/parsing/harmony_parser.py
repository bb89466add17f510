"""Harmony's channels, from token ids: analysis is the reasoning, final the answer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from training.parsing.parsers import CHANNELS, Channel, Delta, Parsed, TokenText, Transcript, join

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_ROLES = {"user", "system", "developer", "tool"}


class HarmonyParser:
    """Harmony messages, starting inside the header of an assistant message, as generation does.

    Headers are `role? [to=recipient]? <|channel|> name [to=recipient]? <|constrain|>…? <|message|>`. Messages of the analysis channel are
    the reasoning, of the final channel the answer. Text under no channel or an unknown one counts as the answer; a commentary to nobody
    is the answer when there is no other. Messages to a tool, or in a role that is not the assistant's, are left out with a warning.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        names = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._actions = {
            names[name]: action
            for name, action in {
                "<|start|>": self._end_message,
                "<|channel|>": self._on_channel,
                "<|message|>": self._on_message,
                "<|end|>": self._end_message,
                "<|return|>": self._end_message,
                "<|endoftext|>": self._end_message,
                "<|call|>": self._on_call,
            }.items()
            if name in names
        }
        self._text = TokenText(tokenizer)
        self._transcript = Transcript()
        self._preamble: list[str] = []  # commentary to nobody
        self._stray: list[str] = []  # text outside of messages
        self._finals = 0
        self._begin_header()

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for id in ids:
            action = self._actions.get(int(id))
            if action:
                deltas += self._take(self._text.reset())
                deltas += action()
            else:
                deltas += self._take(self._text.feed(int(id)))
        return join(deltas)

    def finish(self, finish_reason: str) -> Parsed:
        tail = self._take(self._text.reset()) + self._end_message()
        for source, texts in (("commentary", self._preamble), ("text outside of messages", self._stray)):
            if not self._transcript.text("final").strip() and texts:
                self._transcript.warn(f"no final message; the {source} is the answer")
                tail += self._transcript.add("final", "".join(texts))
        return self._transcript.parsed(finish_reason, join(tail))

    def _begin_header(self) -> None:
        self._role = ""  # text before <|channel|>, or before <|message|> when there is no channel
        self._header: str | None = None  # text after <|channel|>
        self._in_body = False
        self._channel: Channel | None = None  # None in the body of a message that is left out
        self._to_user = True

    def _take(self, text: str) -> list[Delta]:
        """Text that is not a control token."""
        if not self._in_body:
            if self._header is None:
                self._role += text
            else:
                self._header += text
            return []
        if self._channel is None:
            return []
        if self._channel == "commentary" and self._to_user:
            self._preamble.append(text)
        return self._transcript.add(self._channel, text)

    def _on_channel(self) -> list[Delta]:
        deltas = self._end_message() if self._in_body else []
        if self._header:
            self._transcript.warn(f"a second channel in one header, after {self._header!r}")
        self._header = ""
        return deltas

    def _on_message(self) -> list[Delta]:
        if self._in_body:
            self._transcript.warn("<|message|> inside a message")
        else:
            self._begin_body(self._header)
        return []

    def _on_call(self) -> list[Delta]:
        self._transcript.warn("the model called a tool; there are none")
        return self._end_message()

    def _begin_body(self, header: str | None) -> None:
        words = (header or "").split()
        role, stray = self._split_role()
        self._stray += stray
        self._to_user = not any(word.startswith("to=") for word in [*role, *words])
        self._in_body = True
        self._channel = self._known_channel(words[0] if words else "")
        if OTHER_ROLES.intersection(role):
            self._transcript.warn(f"a message in the role of {' '.join(role)} is left out")
            self._channel = None
        self._finals += self._channel == "final"
        if self._finals > 1:
            self._transcript.warn("more than one final message")

    def _split_role(self) -> tuple[list[str], list[str]]:
        """The words before <|channel|> when they are a role and a recipient, and the text when they are not."""
        words = self._role.split()
        if all(word == "assistant" or word in OTHER_ROLES or word.startswith("to=") for word in words):
            return words, []
        text = self._role.lstrip().removeprefix("assistant").lstrip()
        self._transcript.warn(f"text outside of messages: {_short(text)}")
        return [], [text]

    def _known_channel(self, name: str) -> Channel:
        for channel in CHANNELS:
            if name == channel:
                return channel
        self._transcript.warn(f"unknown channel {_short(name)}" if name else "a message without a channel")
        return next((channel for channel in CHANNELS if name.startswith(channel)), "final")

    def _end_message(self) -> list[Delta]:
        """Closes what is open: a body, or a header whose <|message|> never came."""
        deltas = [] if self._in_body else self._recover_header()
        if self._in_body and self._channel:
            self._transcript.end_message(self._channel)
        self._begin_header()
        return deltas

    def _recover_header(self) -> list[Delta]:
        """Text of a message without <|message|>, such as `<|channel|>final Hello`; text without any header is kept aside."""
        if self._header is None:
            self._stray += self._split_role()[1]
            return []
        header = self._header.lstrip()
        for channel in CHANNELS:
            if header.startswith(channel) and header != channel:
                self._transcript.warn("a message without <|message|>")
                self._begin_body(channel)
                return self._take(header.removeprefix(channel).lstrip())
        if header and header not in CHANNELS:
            self._transcript.warn(f"the output ends inside a header: {_short(header)}")
        return []


def _short(text: str, limit: int = 100) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}…")
