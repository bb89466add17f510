"""Attention with gpt-oss's sinks, in transformers' attention interface: flex, and for sliding windows kernels of our own."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from training.model.kernels import is_hopper
from training.model.windowed import takes_shapes, windowed_attention

TILE = {
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
"""Options of flex attention's kernels for full layers with bf16 heads of 64 on Hopper: the fastest of 21 tried on an H200 at 8 rows of
2,048 tokens. Backward 2.7 ms, with torch 2.11's own choice 3.1."""

_tile: dict[str, int] = {}


class Window(NamedTuple):
    """What a sliding layer's tokens see, where no mask is needed for it."""

    width: int
    """Newest tokens, the own one among them."""
    starts: Tensor | None
    """int32 `[B, T]` position where each token's document begins; None is 0."""


def takes_windows(config: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attend` takes a `Window` for a model's sliding layers: gpt-oss in bf16 on Hopper, where that was proven."""
    if config.model_type != "gpt_oss" or config.attention_dropout or not config.sliding_window:
        return False
    shapes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return takes_shapes(*shapes) and dtype == torch.bfloat16 and is_hopper(device)


_OTHERS = ("softcap", "position_bias")
"""What some models ask of attention besides a mask and sinks; what is not there is None."""


def install_attention() -> None:
    """Makes `attn_implementation="flex_attention"` mean `attend` in this process."""
    AttentionInterface.register("flex_attention", attend)
    if torch.cuda.is_available() and is_hopper(torch.device("cuda")):
        _tile.update(TILE)  # looked up here, since compiled code cannot ask for the card


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | Window,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention under a block mask or within a window, in the terms of transformers' interface.

    A sink is one more score that takes its share of the softmax and gives nothing: the output without it times
    `sigmoid(logsumexp(scores) - sink)`. transformers' own rounds the log-sum-exp to bf16 before that, which puts outputs off by up
    to 1.6 % where it is 8; here it stays in fp32.

    Args:
        query: `[B, heads, T, D]`.
        key: `[B, KV heads, T, D]`; value likewise.
        s_aux: `[heads]` sinks; None is an ordinary softmax.

    Returns:
        `[B, T, heads, D]`, and None in the place of weights.
    """
    if isinstance(attention_mask, Window):
        assert s_aux is not None
        assert scaling is not None
        return windowed_attention(query, key, value, s_aux, attention_mask.width, scaling, attention_mask.starts), None
    heads = query.shape[1]
    powers_of_two = heads & (heads - 1) == 0  # what flex's grouped heads need; transformers repeats the others' keys
    asks_more = others.get("dropout") or any(others.get(name) is not None for name in _OTHERS)
    if not isinstance(attention_mask, BlockMask) or asks_more or not powers_of_two:
        return flex_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, s_aux=s_aux, **others
        )[0], None  # fmt: skip
    suits = query.shape[-1] == 64 and query.dtype == torch.bfloat16 and not others.get("sliding_window")
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    output, aux = flex(
        query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=heads != key.shape[1],
        kernel_options=_tile if suits else {}, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if s_aux is not None:
        share = torch.sigmoid(aux.lse - s_aux.float()[:, None])
        output = (output * share[..., None]).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
