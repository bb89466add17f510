"""The built-in engine: continuous batching over a transformers model, on a thread of its own.

Each round admits waiting sequences, reads one piece of the new prompts, and decodes one token of every running sequence, so
that a sequence joins and leaves the batch at any token. transformers' own continuous batching exists for gpt-oss's sinks
only with eager paged attention and was slower than a padded batch there; this one keeps a row per sequence instead of pages.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from transformers import PreTrainedModel

from serving.engines.adapters import NO_ADAPTER, AdapterBank
from serving.engines.batch import Batch, RunningSequence, deliver
from serving.engines.engine import Chunk, EngineError, OverloadedError, Sampling, check_fits
from serving.engines.kv_cache import bytes_per_token
from training.errors import ModelError

SICK_AFTER = 3
"""Rounds that failed one after the other: more than a request or two that need too much memory."""


class TransformersEngine:
    """Continues many sequences at once with `model`.

    Args:
        model: in eval mode, on its device.
        max_sequences: rows decoded together; more wait.
        max_waiting: sequences that may wait before new ones are refused.
        context_length: most tokens per sequence; None takes the model's.
        cache_bytes: memory for keys and values of all sequences together; a sequence waits until its part is free.
        adapters: the model's adapters; None serves the model alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int = 32,
        max_waiting: int = 128,
        context_length: int | None = None,
        cache_bytes: int = 2 * 1024**3,
        adapters: AdapterBank | None = None,
    ):
        cache_tokens = cache_bytes // bytes_per_token(model.config, model.dtype)
        longest = model.config.max_position_embeddings
        self.context_length = min(context_length or longest, longest, cache_tokens)
        self._adapters = adapters
        self._batch = Batch(model, cache_tokens, adapters)
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._waiting: queue.SimpleQueue[RunningSequence | None] = queue.SimpleQueue()  # None wakes the thread to end
        self._head: RunningSequence | None = None  # the next in the queue, when there was no room for it yet
        self._closed = False
        self._failed_rounds = 0  # since the last that did not fail
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: Path | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `serving.engines.engine.Engine`."""
        self._check(prompt_ids, sampling)
        slot = NO_ADAPTER
        if adapter is not None:
            if self._adapters is None:
                raise ModelError(
                    "this engine serves no adapters",
                    hint="Ask for job:ID, its merged model, or raise generator.max_adapters.",
                    field="model",
                )
            slot = await self._take(self._adapters, adapter)
        sequence = RunningSequence(prompt_ids, sampling, self._batch.device, slot)
        self._waiting.put(sequence)
        try:
            finished = False
            while not finished:
                chunk = await sequence.next_chunk()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            sequence.abandoned = True
            if self._adapters is not None:
                self._adapters.give_back(slot)

    def check_health(self) -> None:
        """See `serving.engines.engine.Engine`."""
        if self._failed_rounds >= SICK_AFTER:
            raise EngineError(f"the model failed in each of its last {self._failed_rounds} rounds")

    def close(self) -> None:
        """Ends the thread; sequences that still run get an `EngineError`."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join()

    async def _take(self, adapters: AdapterBank, adapter: Path) -> int:
        """A slot with `adapter`; the thread that reads it cannot be stopped, so one whose caller has left gives it back."""

        def give_back(taken: asyncio.Future[int]) -> None:
            if not taken.cancelled() and taken.exception() is None:
                adapters.give_back(taken.result())

        taking = asyncio.get_running_loop().run_in_executor(None, adapters.take, adapter)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(give_back)
            raise

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        if self._closed:
            raise EngineError("this model is being unloaded", hint="Send the request again.")
        check_fits(prompt_ids, sampling, self.context_length)
        if self._waiting.qsize() >= self._max_waiting:
            raise OverloadedError(f"{self._waiting.qsize()} requests wait already", hint="Try again shortly.")

    def _run(self) -> None:
        while not self._closed:
            try:
                self._admit()
                self._batch.step()
                self._failed_rounds = 0
            except Exception as error:
                # Whatever it is (memory, a kernel): those who wait for tokens hear it, and later requests may pass.
                self._failed_rounds += 1
                self._fail(EngineError(f"the model failed: {error}".splitlines()[0]))
        self._fail(EngineError("this model was unloaded", hint="Send the request again."))
        while not self._waiting.empty():
            self._head = self._waiting.get()
            self._fail(EngineError("this model was unloaded", hint="Send the request again."))
        self._batch.release()
        self._adapters = None

    def _fail(self, error: EngineError) -> None:
        """Ends the sequences that run, and the one that was to be next, with `error`."""
        ended = self._batch.clear()
        if self._head is not None:
            ended.append(self._head)
            self._head = None
        deliver((sequence, error) for sequence in ended)

    def _admit(self) -> None:
        """Takes what waits, in order, while there is room; with nothing to do, sleeps until something comes."""
        while self._batch.size < self._max_sequences:
            if self._head is None:
                try:
                    self._head = self._waiting.get(block=not self._batch.size)
                except queue.Empty:
                    return
                if self._head is None:  # the engine is being closed
                    return
            if not self._head.abandoned:
                if not self._batch.has_room_for(self._head):
                    return
                self._batch.add(self._head)
            self._head = None
