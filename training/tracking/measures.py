"""What a step was like on every rank: sums of the loss, tokens, waiting for data, memory. One collective per logged step."""

from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from training.model.loss import Sums
from training.planning.costs import GIB

_MEMORY = ("allocated_gpu_gib", "reserved_gpu_gib", "peak_gpu_gib", "host_rss_gib")


class Measures:
    """Adds up on this rank without waiting for the GPU; `gather` brings all ranks together.

    Args:
        device: where the sums are.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums = torch.zeros(2, dtype=torch.float32, device=device)  # entropy, correct
        self._counts = [0, 0]  # trained tokens, tokens
        self._waited_s = 0.0
        self.tokens = 0
        """Tokens of all ranks up to the last `gather`, padding left out."""
        self.last: dict[str, float] = {}
        """What the last `gather` found."""

    def add_loss(self, sums: Sums, trained: int) -> None:
        self._sums += torch.stack([sums.entropy, sums.correct])
        self._counts[0] += trained

    def add_tokens(self, tokens: int) -> None:
        self._counts[1] += tokens

    def add_wait(self, seconds: float) -> None:
        """Of the training, for a batch that was not there yet."""
        self._waited_s += seconds

    def gather(self) -> None:
        """Sums and memory of all ranks since the last call, into `last`. Collective."""
        own = [*self._sums.tolist(), *map(float, self._counts), self._waited_s, *_memory().values()]
        ranks = gathered(own, self._device)
        entropy, correct, trained, tokens = (sum(rank[part] for rank in ranks) for part in range(4))
        self.tokens += int(tokens)
        self.last = {"data_wait_s": max(rank[4] for rank in ranks), **by_rank([rank[5:] for rank in ranks])}
        if trained:
            self.last |= {"entropy": entropy / trained, "mean_token_accuracy": correct / trained}
        self._sums.zero_()
        self._counts, self._waited_s = [0, 0], 0.0


def memory_of_ranks(device: torch.device) -> dict[str, float]:
    """Memory of all ranks in GiB: the largest of each kind, and with several ranks each one's as `rank_0/peak_gpu_gib`. Collective."""
    return by_rank(gathered(list(_memory().values()), device))


def by_rank(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    names = _MEMORY if torch.cuda.is_available() else _MEMORY[-1:]
    found = {name: max(rank[index] for rank in ranks) for index, name in enumerate(names)}
    if len(ranks) > 1:
        for number, rank in enumerate(ranks):
            found |= {f"rank_{number}/{name}": rank[index] for index, name in enumerate(names)}
    return found


def gathered(values: list[float], device: torch.device) -> list[list[float]]:
    """`values` of every rank, by rank. Collective."""
    if not dist.is_initialized():
        return [values]
    own = torch.tensor(values, dtype=torch.float64, device=device)
    ranks: list[Tensor] = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return [rank.tolist() for rank in ranks]


def _memory() -> dict[str, float]:
    """This process's memory now and, of the GPU, at its peak."""
    gpu: dict[str, float] = {}
    if torch.cuda.is_available():
        gpu = {
            "allocated_gpu_gib": torch.cuda.memory_allocated() / GIB,
            "reserved_gpu_gib": torch.cuda.memory_reserved() / GIB,
            "peak_gpu_gib": torch.cuda.max_memory_allocated() / GIB,
        }
    return gpu | {"host_rss_gib": psutil.Process().memory_info().rss / GIB}
