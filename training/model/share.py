"""A worker's share of the base: whole or sharded, packed where that is exact, checked against the plan, and what it took."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from training.config import ModelConfig, TrainConfig
from training.errors import TrainingError
from training.model.load import load
from training.model.weights import InexactError
from training.plan import check_memory
from training.planning.costs import GIB
from training.planning.sizes import find_sizes
from training.tracking.measures import gathered, memory_of_ranks


def load_share(config: TrainConfig, base: Path, *, progress: bool) -> tuple[PreTrainedModel, dict[str, float]]:
    """The model as `config` asks, and what loading took: seconds and memory of all ranks, GB of this rank's parameters. Collective.

    Raises:
        ConfigError: by the plan, it does not fit this worker's GPU.
        ModelError: the checkpoint is not what the model needs.
        TrainingError: some of it is not sharded, although that was asked for.
    """
    started = time.monotonic()
    device = torch.device("cpu")
    if config.scaling.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = torch.cuda.get_device_properties(device)
        sizes = find_sizes(ModelConfig(path=str(base.absolute())))
        check_memory(config, sizes, gpu.name, gpu.total_memory / GIB)
    mesh = _mesh(device) if config.scaling.strategy == "fsdp2" and _world_size() > 1 else None
    model = _load(config, base, device, mesh, progress)
    parameters = list(model.parameters())
    sharded = sum(isinstance(value, DTensor) for value in parameters)
    if mesh is not None and sharded != len(parameters):
        raise TrainingError(f"asked for fsdp2, but only {sharded} parameters of the base are sharded")
    held = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in parameters)
    seconds = [rank[0] for rank in gathered([time.monotonic() - started], device)]
    took = {"load_s": max(seconds), "load_gb": held / 1e9}
    if len(seconds) > 1:
        took |= {f"rank_{rank}/load_s": value for rank, value in enumerate(seconds)}
    took |= {f"load/{name}": value for name, value in memory_of_ranks(device).items()}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # what training's peaks are counted from
    return model, took


def _load(
    config: TrainConfig, base: Path, device: torch.device, mesh: DeviceMesh | None, progress: bool
) -> PreTrainedModel:
    """Packed if asked for and exact on every rank, else in bf16."""
    for weights in ("mxfp4", "bf16") if config.weights == "mxfp4" else ("bf16",):
        model, reason = None, None
        try:
            model = load(
                base,
                weights=weights,  # type: ignore[arg-type]
                precision=config.precision,  # type: ignore[arg-type]  # resolved: no "auto" is left
                attention=config.attention,  # type: ignore[arg-type]
                experts=config.experts,  # type: ignore[arg-type]
                device=str(device),
                mesh=mesh,
                progress=progress,
            )
        except InexactError as error:
            reason = error
        inexact = any(rank[0] for rank in gathered([float(reason is not None)], device))
        if not inexact:
            assert model is not None
            return model
        if progress:
            print(f"weights=bf16: {reason or 'another rank cannot pack its experts'}", flush=True)
    raise AssertionError("bf16 holds every checkpoint")


def _mesh(device: torch.device) -> DeviceMesh:
    """What the base is sharded over: all workers, or on several equal nodes this node's, so that gathers stay within it.

    That is HSDP without its second dimension: the base is frozen, so nodes have no gradients of it to exchange, and the
    adapters' go over all workers either way.
    """
    world_size = _world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    equal = len({rank[0] for rank in gathered([float(local)], device)}) == 1
    if equal and 1 < local < world_size and world_size % local == 0:
        node, _ = dist.new_subgroups(local)
        return DeviceMesh.from_group(node, device.type)
    return init_device_mesh(device.type, (world_size,))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
