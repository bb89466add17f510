"""Ending a text before the first of some strings, when the text comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string; holds back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.met = False
        """A stop string was found; nothing is passed on any more."""

    def feed(self, text: str) -> str:
        """The part of all text so far that has become certain."""
        if self.met:
            return ""
        text = self._held + text
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back and turned out to be no stop string, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
