"""What a training function of one's own wants to know: memory by rank, blocks to wrap, what is trained, whether ranks are connected."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from training.errors import TrainingError
from training.model.load import decoder_layers

GIB = 2**30


@dataclass(frozen=True)
class GpuMemory:
    """Of the current device, in GiB."""

    rank: int
    allocated_gib: float
    reserved_gib: float
    peak_gib: float
    """Most allocated at once since the start or the last `torch.cuda.reset_peak_memory_stats`."""


def gpu_memory(tag: str, show: Callable[[str], object] = print) -> GpuMemory | None:
    """Shows what this rank holds of its GPU, as `tag`; None, and nothing is shown, where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    memory = GpuMemory(
        rank(),
        torch.cuda.memory_allocated() / GIB,
        torch.cuda.memory_reserved() / GIB,
        torch.cuda.max_memory_allocated() / GIB,
    )
    show(
        f"rank {memory.rank} {tag}: {memory.allocated_gib:.2f} GiB allocated, {memory.reserved_gib:.2f} GiB reserved, "
        f"{memory.peak_gib:.2f} GiB at the peak"
    )
    return memory


def block_classes(model: nn.Module) -> list[type[nn.Module]]:
    """Classes of the transformer blocks of `model`, bare or under an adapter: what FSDP wraps one by one.

    Raises:
        ModelError: the architecture names none (`_no_split_modules`), or none is found.
    """
    return list({type(layer): None for layer in decoder_layers(model)})


@dataclass(frozen=True)
class Parameters:
    trained: int
    total: int


def trainable_parameters(model: nn.Module, show: Callable[[str], object] = print) -> Parameters:
    """Counts the parameters, and shows them on rank 0. A sharded one counts whole."""
    values = list(model.parameters())
    count = Parameters(
        sum(value.numel() for value in values if value.requires_grad), sum(value.numel() for value in values)
    )
    if rank() == 0:
        show(f"{count.trained:,} of {count.total:,} parameters are trained ({count.trained / count.total:.4%})")
    return count


def rank() -> int:
    """This process's rank: the process group's, else RANK's, else 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def require_process_group(world_size: int | None = None) -> int:
    """The number of connected ranks.

    Args:
        world_size: how many there must be; None takes WORLD_SIZE.

    Raises:
        TrainingError: they are not connected, or not as many: each would train a model of its own, without a word.
    """
    expected = world_size or int(os.environ.get("WORLD_SIZE", "1"))
    connected = dist.get_world_size() if dist.is_initialized() else 1
    if connected != expected:
        raise TrainingError(
            f"rank {rank()}: {connected} of {expected} ranks are connected",
            hint="Start the function with `.distributed(…)` or torchrun, and call torch.distributed.init_process_group().",
        )
    return connected
