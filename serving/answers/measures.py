"""What a request cost: time to its model, to its first token, per token; and whether it kept its language."""

import time
from dataclasses import dataclass

from serving.answers.generation import GenerateAnswer, Started
from training.errors import PolythinkError


@dataclass(frozen=True)
class Measured:
    """One request, ended. Times in seconds; None where it did not come that far."""

    outcome: str
    """`stop`, `length`, or the error's class."""
    load_s: float | None = None
    first_token_s: float | None = None
    """From the model being there to the first token: waiting for a place and reading the prompt."""
    per_token_s: float | None = None
    """Mean time per token after the first."""
    total_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    language: str | None = None
    """The reasoning language asked for, if one was."""
    matches: bool | None = None
    """None when there was too little text to tell."""


class Stopwatch:
    """Times one request as it goes."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._loaded: float | None = None
        self._first: float | None = None

    def loaded(self) -> None:
        """The model is there."""
        self._loaded = time.monotonic()

    def started(self, event: Started) -> Started:
        """The first token is there; returns `event` with the times until now."""
        self._first = time.monotonic()
        return event.model_copy(update={"load_s": self._load_s, "first_token_s": self._first_token_s})

    def measured(self, answer: GenerateAnswer) -> Measured:
        now = time.monotonic()
        tokens = answer.usage.completion_tokens
        return Measured(
            outcome=answer.finish_reason,
            load_s=self._load_s,
            first_token_s=self._first_token_s,
            per_token_s=(now - self._first) / (tokens - 1) if self._first and tokens > 1 else None,
            total_s=now - self._begin,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=tokens,
            language=answer.reasoning_language.requested,
            matches=answer.reasoning_language.matches,
        )

    def failed(self, error: PolythinkError) -> Measured:
        return Measured(type(error).__name__, load_s=self._load_s, total_s=time.monotonic() - self._begin)

    @property
    def _load_s(self) -> float | None:
        return None if self._loaded is None else self._loaded - self._begin

    @property
    def _first_token_s(self) -> float | None:
        return None if self._first is None or self._loaded is None else self._first - self._loaded
