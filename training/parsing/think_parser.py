"""Reasoning between think tags, from token ids."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from training.parsing.parsers import THINK_TAGS, Channel, Delta, Parsed, TokenText, Transcript, join

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ThinkParser:
    """Reasoning between `<think>` and `</think>`, as Qwen 3 and DeepSeek write it; all else is the answer.

    White space around either part is left out.

    Args:
        thinking: whether the prompt opened the reasoning already.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, thinking: bool = False):
        self._text = TokenText(tokenizer)
        self._transcript = Transcript()
        self._thinking = thinking
        self._started = False  # whether the open part has text yet
        self._held = ""  # white space and beginnings of tags: what comes next decides

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        return join([delta for id in ids for delta in self._take(self._text.feed(int(id)))])

    def finish(self, finish_reason: str) -> Parsed:
        tail = self._take(self._text.reset()) + self._emit(self._held)
        return self._transcript.parsed(finish_reason, join(tail))

    def _take(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        self._held += text
        while tag := min((tag for tag in THINK_TAGS if tag in self._held), key=self._held.index, default=None):
            before, _, self._held = self._held.partition(tag)
            deltas += self._emit(before)
            self._transcript.end_message(self._channel)
            self._thinking, self._started = tag == "<think>", False
        keep = _held_back(self._held)
        ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return deltas + self._emit(ready, more=True)

    @property
    def _channel(self) -> Channel:
        return "analysis" if self._thinking else "final"

    def _emit(self, text: str, more: bool = False) -> list[Delta]:
        text = text if self._started else text.lstrip()
        text = text if more else text.rstrip()
        self._started = self._started or bool(text)
        return self._transcript.add(self._channel, text)


def _held_back(text: str) -> int:
    """Characters at the end of `text` that may be white space before a tag, or the beginning of one."""
    longest = min(len(text), len(THINK_TAGS[1]) - 1)
    partial = next((n for n in range(longest, 0, -1) if text.endswith(tuple(tag[:n] for tag in THINK_TAGS))), 0)
    body = text[: len(text) - partial]
    return partial + len(body) - len(body.rstrip())
