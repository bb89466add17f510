"""Models whose random weights are made where they go, without a checkpoint: 120b's 61 GiB do not fit every machine's disk."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from training.model import share as loading
from training.model.attention import install_attention
from training.model.load import DTYPES, _skeleton
from training.worker import train_loop


def train_on_random_weights(settings: dict[str, Any]) -> None:
    """`train_loop` over a base of which only configuration and tokenizer exist. For a process of its own: it replaces the loader."""
    loading.load = random_model  # type: ignore[assignment]
    train_loop(settings)


def random_model(
    directory: Path, *, weights: str, precision: str, attention: str, experts: str | None, device: str, **_: Any
) -> PreTrainedModel:
    """What `training.model.load.load` gives, with weights that mean nothing."""
    config, dtype = AutoConfig.from_pretrained(directory), DTYPES[precision]
    install_attention()
    model = _skeleton(config, attention, weights, experts or "eager", dtype)
    for name, parameter in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        value = _random(leaf, module, parameter.shape, dtype, device)
        setattr(model.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
    nn.Module.to(model, device)  # the buffers
    return model.requires_grad_(False).eval()


def _random(leaf: str, module: str, shape: torch.Size, dtype: torch.dtype, device: str) -> Tensor:
    if leaf.endswith(("_blocks", "_scales")):
        low, high = (0, 256) if leaf.endswith("_blocks") else (117, 121)
        stored = torch.randint(low, high, (shape[0], 2 * shape[1]), dtype=torch.uint8, device=device)
        return stored.view(torch.bfloat16)
    if module.endswith("norm"):
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
