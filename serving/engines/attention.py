"""Attention over a cache with fewer key-value heads than queries, without copying keys and values once per query head.

transformers' eager attention repeats keys and values for each query head (8 times on gpt-oss) and concatenates the sinks
to the scores: at decoding, copies of the whole cache for each token. Here the queries of one key-value head are rows of
one product, and a sink is one more term of the softmax's sum.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "grouped_sinks"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """
    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, L, D]; query head h belongs to key-value head h // (Hq / Hkv).
        attention_mask: [B, 1, T, L], added to the scores.
        s_aux: the sinks, [Hq].

    Returns:
        [B, T, Hq, D].
    """
    batch, heads, width, dim = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, group * width, dim)
    scores = (grouped @ key.transpose(2, 3)).view(batch, kv_heads, group, width, length).float()
    scores = scores * scaling + attention_mask[:, :, None]
    sinks = s_aux.float().view(1, kv_heads, group, 1, 1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = torch.exp(scores - highest)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - highest))
    seen = weights.to(value.dtype).view(batch, kv_heads, group * width, length) @ value
    return seen.view(batch, heads, width, dim).transpose(1, 2).contiguous(), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Makes a gpt-oss model attend so. The masks must be given with each forward pass."""
    AttentionInterface.register(NAME, grouped_attention)
    model.config._attn_implementation = NAME
