"""Attention within a sliding window, with gpt-oss's sinks: Triton kernels on CUDA, torch elsewhere. The torch version is the definition.

All query heads of a KV head at some consecutive positions make one tile, so that a tile of 64 rows needs `window + 16` keys at
gpt-oss's 8 query heads a KV head, where a tile of 64 positions of one head needs `window + 64`. Nothing is summed by atomics:
gradients are the same bits every time.

B rows, T tokens, G query heads a KV head, D head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor

from training.model.kernels import triton

if triton is not None:
    import triton.language as tl

FORWARD = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 1, "maxnreg": 128}
QUERY_GRAD = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
KEY_GRAD = {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}
"""Each kernel's tile: rows are queries, G to a position. The fastest of 24 tried on an H200 at 8 rows of 2,048 tokens: forward 0.18 ms,
backward 0.46, where flex attention takes 0.45 and 1.17."""


def takes_shapes(heads: int, kv_heads: int, width: int) -> bool:
    """Whether `windowed_attention` takes so many heads of such a dimension."""
    return heads in [group * kv_heads for group in (1, 2, 4, 8, 16)] and width in (16, 32, 64, 128)


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, scale: float, starts: Tensor | None = None
) -> Tensor:
    """Causal attention to the last `window` tokens, the own one among them.

    A sink is one more score that takes its share of the softmax and gives nothing; it gets no gradient.

    Args:
        query: `[B, heads, T, D]` with any strides, copied if the last is not 1; D a power of two from 16 to 128. On CUDA in bf16.
        key: `[B, KV heads, T, D]`, value likewise; G = heads / KV heads is a power of two up to 16.
        sinks: `[heads]`, frozen.
        scale: what scores are multiplied by, above 0.
        starts: int32 `[B, T]` position where each token's document begins, before which it sees nothing; None is 0.

    Returns:
        `[B, T, heads, D]`, contiguous.
    """
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[-1]
    assert takes_shapes(heads, kv_heads, width), (heads, kv_heads, width)
    assert key.shape[2] == query.shape[2], "keys of earlier tokens alone are not told apart"
    assert starts is None or starts.shape == (len(query), query.shape[2]), starts
    assert min(window, scale) > 0, (window, scale)
    assert not sinks.requires_grad, "sinks get no gradient here"
    if not query.is_cuda:
        return _reference(query, key, value, sinks, window, scale, starts)
    output: Tensor = _attend(query, key, value, sinks, window, scale, starts)[0]
    return output


def _reference(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, scale: float, starts: Tensor | None
) -> Tensor:
    heads, length = query.shape[1:3]
    key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
    position = torch.arange(length, device=query.device)
    oldest = (position - window + 1).expand(len(query), -1)
    if starts is not None:
        oldest = torch.maximum(oldest, starts)
    seen = (position <= position[:, None]) & (position >= oldest[..., None])
    scores = (query @ key.mT).float().mul(scale).masked_fill(~seen[:, None], -torch.inf)
    sink = sinks.float()[:, None, None].expand(len(query), -1, length, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()


@torch.library.custom_op("polythink::windowed_attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, scale: float, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output, and the base-2 logarithm of each softmax's denominator, fp32 `[B, KV heads, T, G]`."""
    output, lse = _like_output(query), _like_lse(query, key)
    query, key, value = _with_unit_stride(query, key, value)
    _forward_kernel[_grid(query, key, FORWARD["ROWS"] * key.shape[1] // query.shape[1])](
        query, key, value, sinks, query if starts is None else starts.contiguous(), output, lse,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], query.shape[2], scale * math.log2(math.e),
        **_constants(query, key, window, starts), **FORWARD,
    )  # fmt: skip
    return output, lse


@_attend.register_fake
def _(query, key, value, sinks, window, scale, starts):  # type: ignore[no-untyped-def]
    return _like_output(query), _like_lse(query, key)


@torch.library.custom_op("polythink::windowed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, window: int, scale: float,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, `[B, T, heads, D]` in memory."""
    query_grad, key_grad, value_grad = (_like_output(part) for part in (query, key, value))
    query, key, value = _with_unit_stride(query, key, value)
    grad, delta = grad.contiguous(), torch.empty_like(lse)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    numbers = (query.shape[2], scale, scale * math.log2(math.e))
    constants = _constants(query, key, window, starts)
    documents = query if starts is None else starts.contiguous()
    _query_grad_kernel[_grid(query, key, QUERY_GRAD["ROWS"] // constants["G"])](
        grad, query, key, value, documents, output, lse, delta, query_grad, *strides, *numbers, **constants, **QUERY_GRAD
    )  # fmt: skip
    _key_grad_kernel[_grid(query, key, KEY_GRAD["KEYS"])](
        grad, query, key, value, documents, lse, delta, key_grad, value_grad, *strides, *numbers, **constants, **KEY_GRAD
    )  # fmt: skip
    return query_grad.transpose(1, 2), key_grad.transpose(1, 2), value_grad.transpose(1, 2)


@_backward.register_fake
def _(grad, query, key, value, output, lse, window, scale, starts):  # type: ignore[no-untyped-def]
    return tuple(_like_output(part).transpose(1, 2) for part in (query, key, value))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, _, ctx.window, ctx.scale, starts = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, starts)


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, output, lse, starts = ctx.saved_tensors
    found = _backward(grad, query, key, value, output, lse, ctx.window, ctx.scale, starts)
    return *found, None, None, None, None


_attend.register_autograd(_gradients, setup_context=_setup_context)


def _like_output(part: Tensor) -> Tensor:
    """Room for `[B, T, heads, D]`, of `[B, heads, T, D]`."""
    batch, heads, length, width = part.shape
    return part.new_empty(batch, length, heads, width)


def _like_lse(query: Tensor, key: Tensor) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, key.shape[1], length, heads // key.shape[1], dtype=torch.float32)


def _with_unit_stride(*parts: Tensor) -> list[Tensor]:
    return [part if part.stride(-1) == 1 else part.contiguous() for part in parts]


def _grid(query: Tensor, key: Tensor, positions: int) -> tuple[int, int, int]:
    return -(-query.shape[2] // positions), key.shape[1], len(query)


def _constants(query: Tensor, key: Tensor, window: int, starts: Tensor | None) -> dict[str, Any]:
    return {
        "WINDOW": window, "PACKED": starts is not None, "G": query.shape[1] // key.shape[1], "D": query.shape[-1],
    }  # fmt: skip


if triton is not None:

    @triton.jit
    def _load(base, first, length, stride, head_stride, ROWS: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
        """`[ROWS, D]`, G rows to a position; 0 outside of the row."""
        row = tl.arange(0, ROWS)
        position = first + row // G
        place = (row // G) * stride + (row % G) * head_stride
        pointers = base + first.to(tl.int64) * stride + place[:, None] + tl.arange(0, D)[None, :]
        return tl.load(pointers, mask=((position >= 0) & (position < length))[:, None], other=0.0)

    @triton.jit
    def _load_before(key, value, begin, length, k_token, v_token, oldest, KEYS: tl.constexpr, D: tl.constexpr):
        """Keys and values from `begin` on, all before the tile, and which of them each row sees."""
        k = _load(key, begin, length, k_token, 0, KEYS, 1, D)
        v = _load(value, begin, length, v_token, 0, KEYS, 1, D)
        return k, v, begin + tl.arange(0, KEYS)[None, :] >= oldest[:, None]

    @triton.jit
    def _store(base, first, length, stride, value, ROWS: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
        row = tl.arange(0, ROWS)
        place = (row // G) * stride + (row % G) * D
        pointers = base + first.to(tl.int64) * stride + place[:, None] + tl.arange(0, D)[None, :]
        tl.store(pointers, value.to(base.dtype.element_ty), mask=(first + row // G < length)[:, None])

    @triton.jit
    def _oldest(starts, position, length, WINDOW: tl.constexpr, PACKED: tl.constexpr):
        """First position that each of a row's positions sees."""
        oldest = tl.maximum(position - WINDOW + 1, 0)
        if PACKED:
            oldest = tl.maximum(oldest, tl.load(starts + position, mask=position < length, other=0))
        return oldest

    @triton.jit
    def _add_keys(peak, total, result, q, k, v, seen, scale):
        """The running softmax: its largest score, the sum of its weights, and the weighted sum of values, with these keys too."""
        scores = tl.where(seen, tl.dot(q, tl.trans(k)), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(peak - higher)
        result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None])
        return higher, total * shrink + tl.sum(weights, 1), result

    @triton.jit
    def _forward_kernel(
        query, key, value, sinks, starts, output, lse,
        q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, length, scale,
        WINDOW: tl.constexpr, PACKED: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        OWN: tl.constexpr = max(ROWS // G, 16)  # keys at the tile's own positions; 16 is the least that a product takes
        first = tl.program_id(0) * (ROWS // G)
        head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
        query += batch * q_batch + head * G * q_head
        key += batch * k_batch + head * k_head
        value += batch * v_batch + head * v_head
        q = _load(query, first, length, q_token, q_head, ROWS, G, D)
        own_k = _load(key, first, length, k_token, 0, OWN, 1, D)
        own_v = _load(value, first, length, v_token, 0, OWN, 1, D)
        row = tl.arange(0, ROWS)
        position = first + row // G
        oldest = _oldest(starts + batch * length, position, length, WINDOW, PACKED)
        sink = tl.load(sinks + head * G + row % G).to(tl.float32) * 1.4426950408889634  # log2(e)

        peak = tl.maximum(sink, -1e30)  # so that a sink of -inf weighs 0 and is not NaN
        total = tl.exp2(sink - peak)
        result = tl.zeros((ROWS, D), dtype=tl.float32)
        for block in range((WINDOW + KEYS - 2) // KEYS):
            begin = first - (block + 1) * KEYS
            k, v, seen = _load_before(key, value, begin, length, k_token, v_token, oldest, KEYS, D)
            peak, total, result = _add_keys(peak, total, result, q, k, v, seen, scale)
        place = first + tl.arange(0, OWN)[None, :]
        seen = (place <= position[:, None]) & (place >= oldest[:, None])
        peak, total, result = _add_keys(peak, total, result, q, own_k, own_v, seen, scale)

        token = heads * G * D
        output += batch * length * token + head * G * D
        _store(output, first, length, token, result * (1 / total)[:, None], ROWS, G, D)
        place = first * G + row
        logs = lse + (batch * heads + head) * length * G + place
        tl.store(logs, peak + tl.log2(total), mask=place < length * G)

    @triton.jit
    def _add_query_grad(total, q, grad, k, v, seen, log, delta, scale):
        scores = tl.dot(q, tl.trans(k))
        weights_grad = tl.dot(grad, tl.trans(v))
        weights = tl.where(seen, tl.exp2(scores * scale - log[:, None]), 0.0)
        scores_grad = weights * (weights_grad - delta[:, None])
        return tl.dot(scores_grad.to(k.dtype), k, total)

    @triton.jit
    def _query_grad_kernel(
        grad, query, key, value, starts, output, lse, delta, query_grad,
        q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, length, scale, scale_log2e,
        WINDOW: tl.constexpr, PACKED: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        """Also writes delta, each row's sum of output times its gradient, like lse."""
        OWN: tl.constexpr = max(ROWS // G, 16)
        first = tl.program_id(0) * (ROWS // G)
        head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
        token = heads * G * D
        here = batch * length * token + head * G * D
        key += batch * k_batch + head * k_head
        value += batch * v_batch + head * v_head
        d = _load(grad + here, first, length, token, D, ROWS, G, D)
        o = _load(output + here, first, length, token, D, ROWS, G, D)
        q = _load(query + batch * q_batch + head * G * q_head, first, length, q_token, q_head, ROWS, G, D)
        own_k = _load(key, first, length, k_token, 0, OWN, 1, D)
        own_v = _load(value, first, length, v_token, 0, OWN, 1, D)
        row = tl.arange(0, ROWS)
        position = first + row // G
        oldest = _oldest(starts + batch * length, position, length, WINDOW, PACKED)
        place = first * G + row
        logs = (batch * heads + head) * length * G + place
        log = tl.load(lse + logs, mask=place < length * G, other=float("inf"))
        row_delta = tl.sum(d.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(delta + logs, row_delta, mask=place < length * G)

        total = tl.zeros((ROWS, D), dtype=tl.float32)
        for block in range((WINDOW + KEYS - 2) // KEYS):
            begin = first - (block + 1) * KEYS
            k, v, seen = _load_before(key, value, begin, length, k_token, v_token, oldest, KEYS, D)
            total = _add_query_grad(total, q, d, k, v, seen, log, row_delta, scale_log2e)
        place = first + tl.arange(0, OWN)[None, :]
        seen = (place <= position[:, None]) & (place >= oldest[:, None])
        total = _add_query_grad(total, q, d, own_k, own_v, seen, log, row_delta, scale_log2e)
        _store(query_grad + here, first, length, token, total * scale, ROWS, G, D)

    @triton.jit
    def _key_grad_kernel(
        grad, query, key, value, starts, lse, delta, key_grad, value_grad,
        q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, length, scale, scale_log2e,
        WINDOW: tl.constexpr, PACKED: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
        ROWS: tl.constexpr, KEYS: tl.constexpr,
    ):  # fmt: skip
        """Scores are transposed here, keys by queries: weights and their gradients are then operands as they are."""
        begin = tl.program_id(0) * KEYS
        head, heads, batch = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
        query += batch * q_batch + head * G * q_head
        grad += batch * length * heads * G * D + head * G * D
        starts += batch * length
        lse += (batch * heads + head) * length * G
        delta += (batch * heads + head) * length * G
        k = _load(key + batch * k_batch + head * k_head, begin, length, k_token, 0, KEYS, 1, D)
        v = _load(value + batch * v_batch + head * v_head, begin, length, v_token, 0, KEYS, 1, D)
        row = tl.arange(0, ROWS)
        place = begin + tl.arange(0, KEYS)[:, None]
        k_total = tl.zeros((KEYS, D), dtype=tl.float32)
        v_total = tl.zeros((KEYS, D), dtype=tl.float32)
        for step in range(tl.cdiv(tl.minimum(KEYS + WINDOW - 1, length - begin), ROWS // G)):
            first = begin + step * (ROWS // G)
            q = _load(query, first, length, q_token, q_head, ROWS, G, D)
            d = _load(grad, first, length, heads * G * D, D, ROWS, G, D)
            logs = first * G + row
            log = tl.load(lse + logs, mask=logs < length * G, other=float("inf"))  # queries past the end weigh 0
            row_delta = tl.load(delta + logs, mask=logs < length * G, other=0.0)
            position = first + row // G
            apart = position[None, :] - place
            seen = (apart >= 0) & (apart < WINDOW)
            if PACKED:
                seen &= place >= tl.load(starts + position, mask=position < length, other=0)[None, :]
            scores = tl.dot(k, tl.trans(q))
            weights_grad = tl.dot(v, tl.trans(d))
            weights = tl.where(seen, tl.exp2(scores * scale_log2e - log[None, :]), 0.0)
            scores_grad = weights * (weights_grad - row_delta[None, :])
            v_total = tl.dot(weights.to(d.dtype), d, v_total)
            k_total = tl.dot(scores_grad.to(q.dtype), q, k_total)
        token = heads * D
        here = batch * length * token + head * D
        _store(key_grad + here, begin, length, token, k_total * scale, KEYS, 1, D)
        _store(value_grad + here, begin, length, token, v_total, KEYS, 1, D)
