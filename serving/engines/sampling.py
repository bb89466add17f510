"""Choosing the next tokens of a batch, each row by its own settings and its own random numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.engines.engine import Sampling, TokenLogprobs


class Sampler:
    """One sequence's settings and its random numbers, which do not depend on the batch it is in."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self.sampling = sampling
        self.generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self.generator = torch.Generator(device)
            if sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(sampling.seed)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next id of each row of `logits` [B, vocabulary], float32.

    Drawing is by the exponential race: argmax of p / Exp(1) is distributed as p.
    """
    ids = logits.argmax(dim=-1)
    drawn = [row for row, sampler in enumerate(samplers) if sampler.generator is not None]
    if drawn:
        settings = [samplers[row].sampling for row in drawn]
        temperatures = torch.tensor([s.temperature for s in settings], device=logits.device)
        probabilities = (logits[drawn] / temperatures[:, None]).softmax(dim=-1)
        if any(s.top_p < 1 for s in settings):
            probabilities = _nucleus(probabilities, torch.tensor([s.top_p for s in settings], device=logits.device))
        race = torch.stack(
            [torch.empty_like(logits[0]).exponential_(generator=samplers[row].generator) for row in drawn]
        )
        ids[drawn] = (probabilities / race).argmax(dim=-1)
    return ids.tolist()


def _nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """`probabilities` [B, V] with all but the smallest set of likeliest tokens that reaches `top_p` [B] set to 0."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p[:, None], 0.0)
    kept[:, 0] = ordered[:, 0]  # top_p of 0 still leaves the likeliest
    return torch.zeros_like(probabilities).scatter(-1, order, kept)


def logprobs(logits: Tensor, ids: Sequence[int], samplers: Sequence[Sampler]) -> list[TokenLogprobs | None]:
    """The log-probabilities that each row asked for, of the model's own distribution (temperature 1)."""
    wanted = [sampler.sampling.top_logprobs for sampler in samplers]
    if all(count is None for count in wanted):
        return [None] * len(samplers)
    scores = logits.log_softmax(dim=-1)
    return [
        None if count is None else _row_logprobs(row, token, count)
        for row, token, count in zip(scores, ids, wanted, strict=True)
    ]


def _row_logprobs(scores: Tensor, token: int, count: int) -> TokenLogprobs:
    top = scores.topk(count)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(float(scores[token]), tuple(pairs))
