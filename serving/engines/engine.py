"""What an engine is: token ids in, token ids out, many sequences at once. Text and HTTP live elsewhere. Loads without torch.

Engines: `serving.engines.transformers_engine.TransformersEngine` (built in, everywhere) and `serving.engines.vllm_engine.VllmEngine`.
`tests/unit/serving/engine_contract.py` states what every engine must do.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from serving.errors import RequestError, UnavailableError
from training.errors import PolythinkError

FinishReason = Literal["stop", "length"]
EngineName = Literal["auto", "transformers", "vllm"]
"""`auto` is vLLM where it is installed and there is a GPU, else transformers."""


class OverloadedError(UnavailableError):
    """As many requests wait as may."""

    retry_after_s = 1


class EngineError(PolythinkError, RuntimeError):
    """The model failed while it answered, or was unloaded meanwhile."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence is continued."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    """Ids after which the sequence ends; the id itself is delivered."""
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens whose probabilities add up to this are drawn from."""
    seed: int | None = None
    """The same seed, prompt and settings give the same tokens, whatever else runs in the batch."""
    top_logprobs: int | None = None
    """None: no log-probabilities. k: those of each token and of the k most likely ones, of the model's own distribution."""


@dataclass(frozen=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (id, log-probability) at this place, best first."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that became available since the last chunk. Only the last chunk of a sequence has a finish reason."""

    ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per id when asked for, else empty."""


class Engine(Protocol):
    """Closing the iterator that `generate` returns (or cancelling the task that reads it) frees the sequence's place."""

    context_length: int
    """Most tokens that prompt and output may have together."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: Path | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Continues `prompt_ids` until a stop id or the token limit.

        Args:
            adapter: directory of a LoRA adapter to answer with, in PEFT's layout.

        Raises:
            OverloadedError: too many sequences wait already, or too many adapters answer.
            RequestError: the prompt is empty, or prompt and output exceed the context.
            ModelError: the adapter does not fit.
        """
        ...

    def check_health(self) -> None:
        """
        Raises:
            EngineError: nothing will be answered any more, such as after a fault of the GPU; only a new process helps.
        """
        ...

    def close(self) -> None:
        """Ends the sequences that run, with an error, and frees the model before it returns. Takes a round or more."""
        ...


def check_fits(prompt_ids: Sequence[int], sampling: Sampling, context_length: int) -> None:
    """
    Raises:
        RequestError: the prompt is empty, or prompt and output exceed the context.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty", field="prompt")
    if len(prompt_ids) + sampling.max_new_tokens > context_length:
        raise RequestError(
            f"{len(prompt_ids)} prompt tokens and {sampling.max_new_tokens} new ones exceed the context of {context_length}",
            hint="Ask for fewer tokens, or shorten the conversation.",
            field="max_new_tokens",
        )
