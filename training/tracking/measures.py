"""What a step was like on every rank: sums of the loss, tokens, waiting for data, memory. One collective per logged step."""

import time
from collections.abc import Sequence

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from training.model.loss import Sums
from training.planning.costs import GIB

_MEMORY = ("allocated_gpu_gib", "reserved_gpu_gib", "peak_gpu_gib", "host_rss_gib")


class Measures:
    """Adds up on this rank, `gather` brings all ranks together, and `read` is the only one that waits for the GPU.

    Args:
        device: where the sums are.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._sums = torch.zeros(2, dtype=torch.float32, device=device)  # entropy, correct
        self._counts = [0, 0]  # trained tokens, tokens
        self._waited_s = 0.0
        self._coming: Tensor | None = None  # of all ranks, `[ranks, values]`; of a GPU there once `_arrived`
        self._arrived: torch.cuda.Event | None = None
        self.ended_s = 0.0
        """When the GPU was done with what the last `read` is about, by `time.monotonic`; it may have been read later."""
        self.tokens = 0
        """Tokens of all ranks up to the last `read`, padding left out."""
        self.last: dict[str, float] = {}
        """What the last `read` found."""

    def begin(self) -> None:
        """Training starts: from here on the GPU's own clock says when it was done with what."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.ended_s, self._arrived = time.monotonic(), torch.cuda.Event(enable_timing=True)
            self._arrived.record()

    def add_loss(self, sums: Sums, trained: int) -> None:
        self._sums += torch.stack([sums.entropy, sums.correct])
        self._counts[0] += trained

    def add_tokens(self, tokens: int) -> None:
        self._counts[1] += tokens

    def add_wait(self, seconds: float) -> None:
        """Of the training, for a batch that was not there yet."""
        self._waited_s += seconds

    def gather(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Sends `loss`, `grad_norm`, and sums and memory since the last call, of all ranks, on their way to the host. Collective."""
        known = torch.tensor([*self._counts, self._waited_s, *_memory().values()], dtype=torch.float64)
        found = torch.stack([loss, grad_norm, *self._sums]).double()
        ranks = _of_ranks(torch.cat([found, without_waiting(known, self._device)]))
        self._coming, self._gathered_s = ranks.to("cpu", non_blocking=True), time.monotonic()
        if self._device.type == "cuda":
            self._before, self._arrived = self._arrived, torch.cuda.Event(enable_timing=True)
            self._arrived.record()
        self._sums.zero_()
        self._counts, self._waited_s = [0, 0], 0.0

    def read(self) -> dict[str, float] | None:
        """Loss, mean over ranks, and gradient norm of what was gathered last, the rest of it into `last`; None if that was read before."""
        if self._coming is None:
            return None
        self.ended_s = self._wait()
        ranks: list[list[float]] = self._coming.tolist()
        self._coming = None
        loss, _, entropy, correct, trained, tokens = (sum(rank[part] for rank in ranks) for part in range(6))
        self.tokens += int(tokens)
        self.last = {"data_wait_s": max(rank[6] for rank in ranks), **by_rank([rank[7:] for rank in ranks])}
        if trained:
            self.last |= {"entropy": entropy / trained, "mean_token_accuracy": correct / trained}
        return {"loss": loss / len(ranks), "grad_norm": ranks[0][1]}

    def _wait(self) -> float:
        """Until what is coming is there; returns when that was, exact between two calls."""
        if self._arrived is None:
            return self._gathered_s
        self._arrived.synchronize()
        return self.ended_s + self._before.elapsed_time(self._arrived) / 1e3 if self._before else time.monotonic()


def without_waiting(value: Tensor, device: torch.device) -> Tensor:
    """`value` of the host on `device`. From pageable memory a copy to a GPU would wait until all work that was given to it is done."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value


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
    found: list[list[float]] = _of_ranks(torch.tensor(values, dtype=torch.float64, device=device)).tolist()
    return found


def _of_ranks(own: Tensor) -> Tensor:
    """`[n]` of every rank as `[ranks, n]`. Collective."""
    if not dist.is_initialized():
        return own[None]
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, own)
    return torch.stack(ranks)


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
