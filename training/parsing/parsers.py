"""What parsers of generated tokens share: `training.parsing.harmony_parser` for harmony's channels, `training.parsing.think_parser` for think tags.

They work on token ids, so that control tokens and text that looks like them are told apart, and are tolerant: output that
breaks the format keeps every whole piece and says in a warning what was wrong. They are fed as tokens arrive;
the deltas joined are the whole.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Channel = Literal["analysis", "commentary", "final"]
CHANNELS: tuple[Channel, ...] = ("analysis", "commentary", "final")
MESSAGE_BREAK = "\n\n"  # between two messages on one channel
MAX_WARNINGS = 10  # a model that babbles control tokens could make one at each
THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True)
class Delta:
    """A piece of text of one channel."""

    channel: Channel
    text: str


@dataclass(frozen=True)
class Parsed:
    """A whole response.

    `tail` is the text that only the end decided, which `feed` could not return; whoever streams sends it last.
    """

    reasoning: str
    answer: str
    finish_reason: str
    warnings: list[str] = field(default_factory=list)
    tail: list[Delta] = field(default_factory=list)


class Parser(Protocol):
    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Takes the next tokens; returns the text they complete."""
        ...

    def finish(self, finish_reason: str) -> Parsed:
        """Ends the response; `finish_reason` is `stop`, `length` or whatever else the engine says."""
        ...


class TokenText:
    """Text of token ids, one at a time, without special tokens. Bytes of a character that is not complete are held back."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        self._added = {
            id: b"" if token.special and token.content not in THINK_TAGS else token.content.encode()
            for id, token in tokenizer.added_tokens_decoder.items()
        }
        self._byte_level = "ByteLevel" in str(getattr(tokenizer.backend_tokenizer, "decoder", ""))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def reset(self) -> str:
        """Ends a piece of text; returns U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)

    def feed(self, id: int) -> str:
        return self._decoder.decode(self._bytes(id))

    def _bytes(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id]
        token = self._tokenizer.convert_ids_to_tokens([id])[0]
        if token is None:  # models have more rows in their embedding than the tokenizer has tokens
            return b""
        if self._byte_level:
            return bytes(BYTE_OF[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _byte_of() -> dict[str, int]:
    """Byte for each character of a byte-level vocabulary: printable Latin-1 stands for itself, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of()


class Transcript:
    """Text by channel, and what was wrong."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._texts: dict[Channel, list[str]] = {channel: [] for channel in CHANNELS}
        self._breaks: set[Channel] = set()

    def add(self, channel: Channel, text: str) -> list[Delta]:
        if not text:
            return []
        if channel in self._breaks:
            self._breaks.discard(channel)
            text = MESSAGE_BREAK + text
        self._texts[channel].append(text)
        return [Delta(channel, text)]

    def end_message(self, channel: Channel) -> None:
        """What comes next on `channel` is another message."""
        if self._texts[channel]:
            self._breaks.add(channel)

    def warn(self, warning: str) -> None:
        if warning not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(warning)

    def text(self, channel: Channel) -> str:
        return "".join(self._texts[channel])

    def parsed(self, finish_reason: str, tail: list[Delta]) -> Parsed:
        reasoning, answer = self.text("analysis"), self.text("final")
        if not answer.strip():
            why = {"length": "the token limit was reached before an answer"}
            self.warn(why.get(finish_reason, "the model stopped without an answer"))
        return Parsed(reasoning, answer, finish_reason, self.warnings, tail)


def join(deltas: list[Delta]) -> list[Delta]:
    """Neighbours on one channel as one."""
    joined: list[Delta] = []
    for delta in deltas:
        if joined and joined[-1].channel == delta.channel:
            joined[-1] = Delta(delta.channel, joined[-1].text + delta.text)
        else:
            joined.append(delta)
    return joined
