"""Logits of a model of any size, one decoder layer in memory at a time, in fp32.

The model's own forward runs; only its layers are stand-ins, which read their weights when their turn comes, pass all rows
through, and let the weights go. One pass over the checkpoint serves all rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import MergeError
from training.merging.adapter import Adapter, expert_shape
from training.merging.rewrite import read_expert
from training.merging.shards import Checkpoint

Weights = Callable[[str], Tensor]
"""A parameter's name to its fp32 value."""


@torch.no_grad()
def layerwise_logits(
    directory: Path,
    weights: Weights,
    rows_ids: list[list[int]],
    positions: list[list[int]],
    device: str = "cpu",
    watch: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """What the model of `directory`'s config answers under `weights`.

    Args:
        directory: for the configuration only.
        weights: where parameters come from; see `plain_weights` and `adapted_weights`.
        rows_ids: token ids, rows of any length.
        positions: of each row, the tokens whose logits are wanted.
        device: holds a layer, and the hidden states of all rows.
        watch: entered with all layers while they run; see `training.merging.routing`.

    Returns:
        fp32 `[tokens, vocab]` on the CPU.
    """
    model: Any = _skeleton(directory)
    layers = model.model.layers
    model.model.layers = nn.ModuleList(
        _StreamedLayer(layer, f"model.layers.{index}", weights, device) for index, layer in enumerate(layers)
    )
    for name in ("model.embed_tokens", "model.norm"):
        _fill(model.get_submodule(name), name, weights, device)
    model.model.rotary_emb.to(device)
    longest = max(map(len, rows_ids))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows_ids], device=device)
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows_ids], device=device)
    with watch(layers):
        hidden = model.model(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
    wanted = torch.cat([hidden[row, chosen] for row, chosen in enumerate(positions)])
    del hidden
    return (wanted @ weights(_head_name(model)).to(device).T).cpu()


def plain_weights(checkpoint: Checkpoint) -> Weights:
    """The checkpoint's own values, experts dequantised."""

    def read(name: str) -> Tensor:
        if name in checkpoint.entries:
            return checkpoint.entries[name].read().float()
        if f"{name}_blocks" not in checkpoint.entries:
            raise MergeError(f"{checkpoint.directory} lacks the weight {name}")
        experts, out, inputs = expert_shape(checkpoint, name)
        value = torch.empty(experts, inputs, out)
        for expert in range(experts):
            value[expert] = read_expert(checkpoint, name, expert).T
        return value

    return read


def adapted_weights(checkpoint: Checkpoint, adapter: Adapter) -> Weights:
    """The checkpoint's values plus the adapter's update, not rounded."""
    plain = plain_weights(checkpoint)

    def read(name: str) -> Tensor:
        value, update = plain(name), adapter.updates.get(name)
        if update is None:
            return value
        if update.experts is None:
            return value + update.delta(0, len(value))
        for expert in range(update.experts):
            value[expert] += update.expert_delta(expert).T
        return value

    return read


class _StreamedLayer(nn.Module):
    """A decoder layer that holds its weights only while it runs, and takes the rows of a batch one by one: eager
    attention's memory grows with the square of a row's length."""

    def __init__(self, layer: nn.Module, prefix: str, weights: Weights, device: str):
        super().__init__()
        self._layer = [layer]  # in a list, so that the module tree does not see it
        self._prefix, self._weights, self._device = prefix, weights, device

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        layer = self._layer[0]
        _fill(layer, self._prefix, self._weights, self._device)
        rows = []
        for row in range(len(hidden)):
            mask = None if attention_mask is None else attention_mask[row : row + 1]
            output = layer(hidden[row : row + 1], attention_mask=mask, **options)
            rows.append(output[0] if isinstance(output, tuple) else output)
        layer.to("meta")
        return torch.cat(rows)


def _fill(module: nn.Module, prefix: str, weights: Weights, device: str) -> None:
    for name, parameter in list(module.named_parameters()):
        value = weights(f"{prefix}.{name}")
        if value.shape != parameter.shape:
            raise MergeError(f"{prefix}.{name} has shape {list(value.shape)}, the model needs {list(parameter.shape)}")
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value.to(device), requires_grad=False))


def _head_name(model: Any) -> str:
    return "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"


def _skeleton(directory: Path) -> nn.Module:
    """The model with parameters that have no storage; its buffers, which no checkpoint holds, are real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    options = {"experts_implementation": "eager"} if config.model_type == "gpt_oss" else {}
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, **options
        ).eval()
