"""The sequences that are being continued, and one step of all of them."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from serving.engines.adapters import NO_ADAPTER, AdapterBank
from serving.engines.engine import Chunk, FinishReason, Sampling, TokenLogprobs
from serving.engines.kv_cache import KeyValueCache
from serving.engines.recorded import RecordedSteps, is_recordable
from serving.engines.sampling import Sampler, logprobs, sample

# Prompt tokens read per round, padding included: running sequences wait no longer than that for their next token, and
# a long prompt does not pad the short ones beside it to its length.
_PREFILL_TOKENS = 1024
_PREFILL_WIDTH = 32
# Attention scores of one layer, of all heads together: 2**28 take 3 GB, as three tensors in fp32. gpt-oss, of 64 heads,
# reads its 1,024 tokens up to position 4,096 and fewer beyond: 128 at 32,768, where 1,024 would take 26 GB.
_PREFILL_SCORES = 2**28


class RunningSequence:
    """One sequence from submission to its last token. Its chunks cross from the decoding thread to the caller's loop."""

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, device: torch.device, slot: int = NO_ADAPTER):
        self.prompt_ids = list(prompt_ids)
        self.sampling = sampling
        self.sampler = Sampler(sampling, device)
        self.slot = slot  # of its adapter
        self.read = 0  # prompt tokens in the cache
        self.generated = 0
        self.last_id = -1
        self.abandoned = False  # set by the caller's loop: nobody reads any more
        self.loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

    @property
    def most_tokens(self) -> int:
        """Prompt and output together, at most."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens

    @property
    def position(self) -> int:
        """Where the next decoded token's keys go."""
        return len(self.prompt_ids) + self.generated - 1

    @property
    def in_cache(self) -> bool:
        return self.read > 0

    def append(self, token: int) -> FinishReason | None:
        """Takes the next token; says why the sequence ends with it, if it does."""
        self.last_id = token
        self.generated += 1
        if token in self.sampling.stop_ids:
            return "stop"
        return "length" if self.generated == self.sampling.max_new_tokens else None

    def put(self, item: Chunk | Exception) -> None:
        self._inbox.put_nowait(item)

    async def next_chunk(self) -> Chunk:
        """Everything that has arrived, as one chunk; waits for the first token."""
        items = [await self._inbox.get()]
        while not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        ids: list[int] = []
        scores: list[TokenLogprobs] = []
        reason: FinishReason | None = None
        for item in items:
            if isinstance(item, Exception):
                raise item
            ids += item.ids
            scores += item.logprobs
            reason = item.finish_reason
        return Chunk(ids, reason, scores)


class Batch:
    """The sequences that run, one cache row each: first those that decode, then those whose prompt is being read.

    Used by one thread. Shapes: B rows, T tokens per row, L visible positions.
    """

    def __init__(self, model: PreTrainedModel, cache_tokens: int, adapters: AdapterBank | None = None):
        self.device = model.device
        self._model = model
        self._adapters = adapters
        self._cache = KeyValueCache(model.config, model.dtype, model.device, cache_tokens)
        self._recorded: RecordedSteps | None = None  # elsewhere rows in excess would only cost
        if self.device.type == "cuda" and is_recordable(model):
            self.record()
        self._rows: list[RunningSequence] = []
        self._decoding = 0

    @property
    def size(self) -> int:
        return len(self._rows)

    def has_room_for(self, sequence: RunningSequence) -> bool:
        return self._cache.fits(*self._need(sequence))

    def add(self, sequence: RunningSequence) -> None:
        """Takes a sequence there is room for. All that it may ever need is reserved now: it never fails half way."""
        rows, length = self._need(sequence)
        self._cache.trim(rows, length)
        self._cache.reserve(rows, length)
        self._rows.append(sequence)

    def _need(self, sequence: RunningSequence) -> tuple[int, int]:
        """Rows and length of the cache with `sequence` in it."""
        return self.size + 1, max(row.most_tokens for row in [*self._rows, sequence])

    def step(self) -> None:
        """Reads one piece of the new prompts, then decodes one token of every sequence that is ready."""
        self._drop_abandoned()
        if self._decoding < self.size:
            self._prefill()
        if self._decoding:
            self._decode()

    def clear(self) -> list[RunningSequence]:
        """Drops all sequences and the cache, which a failure may have left half grown; returns the sequences."""
        dropped, self._rows, self._decoding = self._rows, [], 0
        self._cache.drop()
        if self._recorded:
            self._recorded.forget()
        return dropped

    def record(self) -> None:
        """Decodes in steps of few shapes, which on CUDA are recorded."""
        self._recorded = RecordedSteps(self._next_logits, self._cache, self.device, record=self.device.type == "cuda")

    def release(self) -> None:
        """Lets go of the model, at the end: whoever still holds this batch shall not keep it in memory."""
        del self._model, self._adapters, self._recorded

    @torch.inference_mode()
    def _prefill(self) -> None:
        first = self._decoding
        rows = self._rows[first:]
        longest = max(len(row.prompt_ids) - row.read for row in rows)
        heads = self._model.config.num_attention_heads
        width = min(longest, prefill_width(len(rows), max(row.read for row in rows), heads))
        pieces = [row.prompt_ids[row.read : row.read + width] for row in rows]
        logits = self._forward(first, pieces, [row.read for row in rows])
        ready = []
        for index, (row, piece) in enumerate(zip(rows, pieces, strict=True)):
            row.read += len(piece)
            if row.read == len(row.prompt_ids):
                self._swap(first + index, self._decoding)
                self._decoding += 1
                ready.append(index)
        if ready:
            self._append(first, logits[ready])

    @torch.inference_mode()
    def _decode(self) -> None:
        rows = self._rows[: self._decoding]
        tokens, positions = [row.last_id for row in rows], [row.position for row in rows]
        if self._recorded is None:
            logits = self._forward(0, [[token] for token in tokens], positions)
        else:
            logits = self._recorded(tokens, positions, [row.slot for row in rows])
        self._append(0, logits)

    def _forward(self, first_row: int, pieces: list[list[int]], starts: list[int]) -> Tensor:
        """Logits [B, vocabulary] after each of `pieces`, which rows from `first_row` on continue at positions `starts`."""
        width = max(len(piece) for piece in pieces)
        visible = min(max(starts) + width, self._cache.length)
        tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        # Padding may reach beyond the cache. Its last position is free for it: the last token is never fed to the model.
        positions = positions.clamp(max=self._cache.length - 1)  # [B, T]
        slots = [row.slot for row in self._rows[first_row : first_row + len(pieces)]]
        adapters = torch.tensor(slots, device=self.device) if any(slots) else None
        hidden = self._hidden(first_row, tokens, positions, visible, adapters)
        last = torch.tensor([len(piece) - 1 for piece in pieces], device=self.device)
        return self._model.lm_head(hidden[torch.arange(len(pieces), device=self.device), last]).float()

    def _next_logits(self, tokens: Tensor, positions: Tensor, visible: int, adapters: Tensor | None) -> Tensor:
        """See `serving.engines.recorded.Step`."""
        hidden = self._hidden(0, tokens[:, None], positions[:, None], visible, adapters)
        return self._model.lm_head(hidden[:, 0]).float()

    def _hidden(
        self, first_row: int, tokens: Tensor, positions: Tensor, visible: int, adapters: Tensor | None
    ) -> Tensor:
        """Hidden states [B, T, hidden] of tokens [B, T]; only launches work where there is a GPU."""
        self._cache.focus(first_row, positions, visible)
        if self._adapters is not None:
            self._adapters.select(adapters)
        return self._model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=attention_masks(self._model.config, positions, visible, self._model.dtype),
            past_key_values=self._cache,
            use_cache=True,
            output_router_logits=False,
        ).last_hidden_state

    def _append(self, first_row: int, logits: Tensor) -> None:
        """Gives the rows from `first_row` on their next token, chosen from `logits` [B, vocabulary]."""
        rows = self._rows[first_row : first_row + len(logits)]
        samplers = [row.sampler for row in rows]
        ids = sample(logits, samplers)
        chunks = []
        for row, token, scores in zip(rows, ids, logprobs(logits, ids, samplers), strict=True):
            chunks.append(Chunk([token], row.append(token), [scores] if scores else []))
        deliver(zip(rows, chunks, strict=True))
        for index in reversed(range(len(rows))):
            if chunks[index].finish_reason:
                self._remove(first_row + index)

    def _drop_abandoned(self) -> None:
        for index in reversed(range(self.size)):
            if self._rows[index].abandoned:
                self._remove(index)

    def _remove(self, index: int) -> None:
        """Frees a row; the last decoding row, then the last row of all, moves up into the hole."""
        if index < self._decoding:
            self._decoding -= 1
            self._move(self._decoding, index)
            index = self._decoding
        self._move(self.size - 1, index)
        self._rows.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self._rows[target] = self._rows[source]
            if self._rows[source].in_cache:
                self._cache.copy_row(source, target)

    def _swap(self, one: int, other: int) -> None:
        self._rows[one], self._rows[other] = self._rows[other], self._rows[one]
        self._cache.swap_rows(one, other)


def prefill_width(rows: int, read: int, heads: int) -> int:
    """Tokens per row of the next piece of prompts of which up to `read` tokens are in the cache."""
    width = max(_PREFILL_WIDTH, _PREFILL_TOKENS // rows)
    return max(1, min(width, _PREFILL_SCORES // (rows * heads * (read + width))))


def attention_masks(config: Any, positions: Tensor, visible: int, dtype: torch.dtype) -> dict[str, Tensor] | Tensor:
    """What layers add to their scores [B, 1, T, visible]: 0 where a query may look, the lowest number elsewhere. By kind of
    layer where a model has several; where it names none, all slide if it has a window (Mistral, Mixtral, Phi 3).

    Args:
        positions: of the queries, [B, T].
        visible: number of key positions, from 0 on.
    """
    distance = positions[:, :, None] - torch.arange(visible, device=positions.device)  # [B, T, visible]

    def mask(allowed: Tensor) -> Tensor:
        lowest = torch.finfo(dtype).min
        return torch.zeros_like(distance, dtype=dtype).masked_fill_(~allowed, lowest)[:, None]

    past = distance >= 0
    window = getattr(config, "sliding_window", None)
    slides = past & (distance < window) if window else past
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return mask(slides)
    if "sliding_attention" not in kinds:
        return mask(past)
    return {"full_attention": mask(past), "sliding_attention": mask(slides)}


def deliver(items: Iterable[tuple[RunningSequence, Chunk | Exception]]) -> None:
    """Hands each sequence its item on its caller's event loop: one wake-up per loop, not per token."""
    by_loop = defaultdict(list)
    for sequence, item in items:
        by_loop[sequence.loop].append((sequence, item))
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, group)
        except RuntimeError:  # the loop is closed: its callers are gone
            for sequence, _ in group:
                sequence.abandoned = True


def _put_all(items: list[tuple[RunningSequence, Chunk | Exception]]) -> None:
    for sequence, item in items:
        sequence.put(item)
