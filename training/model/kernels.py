"""What an expert layer is made of: dequantise, multiply by group, activate, combine. Triton and grouped_mm on CUDA, torch elsewhere.

Both versions of an operation are in this module and take the same arguments; the torch one is the definition. N = T * k rows are
sorted by expert: row n belongs to token `order[n] // k` and expert `chosen[n]`. H hidden, F intermediate, E experts.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model.mxfp4 import BLOCK, dequantize

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

ALPHA = 1.702
"""Slope of the sigmoid in gpt-oss's gated activation."""

_BYTES = BLOCK // 2


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is of the kind that the choices between kernels were measured on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def unpack(blocks: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Packed views (see `experts.pack`) `[E, …]` as the weight `[E, out, columns]` in `dtype`."""
    groups = columns // BLOCK
    blocks, scales = blocks.view(torch.uint8), scales.view(torch.uint8)
    if not blocks.is_cuda or dtype != torch.bfloat16:
        return dequantize(blocks.unflatten(1, (-1, groups, _BYTES)), scales.unflatten(1, (-1, groups)), dtype)
    weight = torch.empty(blocks.shape[0], scales.shape[1] // groups, columns, dtype=dtype, device=blocks.device)
    count = scales.numel()
    _dequantize_kernel[(triton.cdiv(count, 128),)](blocks, scales, weight, count, GROUPS=128, num_warps=4)
    return weight


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, ends: Sequence[int] | None = None) -> Tensor:
    """`x[offsets[e-1]:offsets[e]] @ weight[e]` for every expert: x `[N, in]`, weight `[E, in, out]` → `[N, out]`.

    Args:
        ends: `offsets` on the host, with which each expert is a product of its own, on CUDA as well.
    """
    if x.is_cuda and ends is None:
        return F.grouped_mm(x, weight, offs=offsets)
    output = x.new_empty(len(x), weight.shape[-1])
    for expert, rows in _groups(offsets.tolist() if ends is None else ends):
        torch.mm(x[rows], weight[expert], out=output[rows])
    return output


def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """`x[group].T @ y[group]` for every expert, zero where it has no rows: x `[N, in]`, y `[N, out]` → `[E, in, out]`."""
    if x.is_cuda:
        empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
        # a product over no rows is not written on every version of torch
        return F.grouped_mm(x.mT, y, offs=offsets).masked_fill_(empty[:, None, None], 0)
    output = x.new_zeros(len(offsets), x.shape[1], y.shape[1])
    for expert, rows in _groups(offsets.tolist()):
        torch.mm(x[rows].mT, y[rows], out=output[expert])
    return output


def activate(gate_up: Tensor, bias: Tensor, chosen: Tensor, limit: float) -> Tensor:
    """gpt-oss's gated activation of `gate_up + bias[chosen]`.

    Args:
        gate_up: `[N, 2F]`, gate and up interleaved.
        bias: `[E, 2F]`.
        chosen: `[N]` expert of each row.
        limit: where gate (above) and up (both sides) are clamped.

    Returns:
        `[N, F]`.
    """
    if not gate_up.is_cuda:
        return _activate(gate_up + bias[chosen], limit)
    rows, width = gate_up.shape
    output = gate_up.new_empty(rows, width // 2)
    _activate_kernel[(rows, triton.cdiv(width // 2, 1024))](
        gate_up, bias, chosen, output, width // 2, limit, ALPHA, COLUMNS=1024, num_warps=4
    )
    return output


def activate_backward(
    grad: Tensor, gate_up: Tensor, bias: Tensor, chosen: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `sum(weights * (activate(gate_up, …) * grad))`.

    Args:
        grad: `[N, F]` gradient of the activated rows before they are weighted.
        weights: `[N]` routing weight of each row.

    Returns:
        The gradient of `gate_up` `[N, 2F]`, written over `gate_up`, and of `weights` `[N]` in fp32.
    """
    if not grad.is_cuda:
        gate_up_grad, weight_grad = _activate_backward(grad, gate_up, bias, chosen, weights, limit)
        return gate_up.copy_(gate_up_grad), weight_grad
    rows, width = gate_up.shape
    weight_grad = torch.empty(rows, dtype=torch.float32, device=grad.device)
    columns = triton.next_power_of_2(width // 2)
    _activate_backward_kernel[(rows,)](
        grad,
        gate_up,
        bias,
        chosen,
        weights,
        gate_up,
        weight_grad,
        width // 2,
        limit,
        ALPHA,
        COLUMNS=min(columns, 1024),
        num_warps=8,
    )
    return gate_up, weight_grad


SORTED_AT_ONCE = 1024
"""Rows that `route`'s kernel sorts, by comparing each with each."""


def route(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sorts slots by expert, keeping their order within each.

    Args:
        indices: `[N]` expert of each slot.

    Returns:
        The slot of each row `[N]`, the row of each slot `[N]`, the expert of each row `[N]`, and where each expert's rows end `[E]`
        int32.
    """
    count = len(indices)
    if indices.is_cuda and count <= SORTED_AT_ONCE:  # one launch instead of a dozen, which decoding would wait for
        order, place, chosen = (torch.empty_like(indices) for _ in range(3))
        offsets = torch.empty(experts, dtype=torch.int32, device=indices.device)
        rows, columns = max(16, triton.next_power_of_2(count)), triton.next_power_of_2(experts)
        _route_kernel[(1,)](
            indices, order, place, chosen, offsets, count, experts, ROWS=rows, EXPERTS=columns, CHUNK=16, num_warps=8
        )
        return order, place, chosen, offsets
    narrow = torch.uint8 if experts <= 256 else indices.dtype  # a radix sort takes a pass a byte
    chosen, order = indices.to(narrow).sort(stable=True)
    chosen = chosen.to(indices.dtype)
    offsets = torch.searchsorted(chosen, torch.arange(1, experts + 1, device=chosen.device)).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(count, device=order.device)
    return order, place, chosen, offsets


def dispatch(x: Tensor, place: Tensor, k: int) -> Tensor:
    """Each token's row to the k places of its slots: `[T, H]` → `[N, H]`, sorted by expert."""
    if not x.is_cuda:
        rows = x.new_empty(len(place), x.shape[1])
        rows[place] = x.repeat_interleave(k, 0)
        return rows
    tokens, hidden = x.shape
    rows = x.new_empty(len(place), hidden)
    _dispatch_kernel[(tokens, triton.cdiv(hidden, 1024))](x, place, rows, hidden, K=k, COLUMNS=1024, num_warps=4)
    return rows


def combine(
    rows: Tensor, place: Tensor, k: int, weights: Tensor | None, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """Each token's sum of its k rows, weighted and with the expert's bias where given.

    Args:
        rows: `[N, H]` sorted by expert.
        place: `[N]` where the row of slot `t * k + j` lies in `rows`.
        weights: `[N]` by slot; None weighs 1.
        bias: `[E, H]`, added before weighing; None adds nothing.
        experts: `[N]` expert by slot; goes with `bias`.

    Returns:
        `[T, H]`.
    """
    tokens, hidden = len(place) // k, rows.shape[1]
    if not rows.is_cuda:
        ordered = rows[place]
        if bias is not None:
            ordered = ordered + bias[experts]
        if weights is not None:
            ordered = ordered * weights.unsqueeze(-1)
        return ordered.unflatten(0, (-1, k)).sum(1)
    output = rows.new_empty(tokens, hidden)
    weighted, biased = weights is not None, bias is not None
    _combine_kernel[(tokens, triton.cdiv(hidden, 1024))](
        rows,
        place,
        weights if weighted else rows,
        bias if biased else rows,
        experts if biased else place,
        output,
        hidden,
        K=k,
        WEIGHTED=weighted,
        BIASED=biased,
        COLUMNS=1024,
        num_warps=4,
    )
    return output


def _groups(ends: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with them."""
    return ((expert, slice(*span)) for expert, span in enumerate(pairwise([0, *ends])) if span[0] < span[1])


def _activate(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(gate * ALPHA)


def _activate_backward(
    grad: Tensor, gate_up: Tensor, bias: Tensor, chosen: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    biased = gate_up + bias[chosen]
    raw_gate, raw_up = biased[..., ::2], biased[..., 1::2]
    gate, up = raw_gate.clamp(max=limit), raw_up.clamp(min=-limit, max=limit)
    sigmoid = torch.sigmoid(gate * ALPHA)
    swish = gate * sigmoid
    weight_grad = (grad * (up + 1) * swish).float().sum(-1)
    weighted = grad * weights.unsqueeze(-1)
    output = torch.empty_like(gate_up)
    output[..., ::2] = torch.where(
        raw_gate <= limit, weighted * (up + 1) * (sigmoid + ALPHA * swish * (1 - sigmoid)), 0
    )
    output[..., 1::2] = torch.where(raw_up.abs() <= limit, weighted * swish, 0)
    return output, weight_grad


if triton is not None:

    @triton.jit
    def _decode(code):
        """A 4-bit e2m1 code as fp32: exponent and mantissa moved into place, subnormal 0.5 apart."""
        magnitude = (code & 7).to(tl.int32)
        exponent = magnitude >> 1
        mantissa = magnitude & 1
        normal = ((exponent + 126) << 23) | (mantissa << 22)
        bits = tl.where(exponent > 0, normal, mantissa * 0x3F000000) | ((code & 8).to(tl.int32) << 28)
        return bits.to(tl.float32, bitcast=True)

    @triton.jit
    def _dequantize_kernel(blocks, scales, weight, count, GROUPS: tl.constexpr):
        group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
        inside = group < count
        # 2**(s-127) as a bit pattern; s = 0 means 2**-127, a subnormal that flushes to 0 either way
        scale = (tl.load(scales + group, mask=inside, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        byte = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        packed = tl.load(blocks + byte, mask=inside[:, None], other=0)
        low = _decode(packed & 15) * scale[:, None]
        high = _decode(packed >> 4) * scale[:, None]
        values = tl.reshape(tl.join(low, high), (GROUPS, 32)).to(tl.bfloat16)
        place = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(weight + place, values, mask=inside[:, None])

    @triton.jit
    def _activate_kernel(gate_up, bias, chosen, output, width, limit, alpha, COLUMNS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pair = tl.program_id(1) * COLUMNS * 2 + tl.arange(0, 2 * COLUMNS)
        inside = pair < 2 * width
        expert = tl.load(chosen + row).to(tl.int64)
        x = tl.load(gate_up + row * 2 * width + pair, mask=inside, other=0).to(tl.float32)
        x += tl.load(bias + expert * 2 * width + pair, mask=inside, other=0).to(tl.float32)
        gate, up = tl.split(tl.reshape(x, (COLUMNS, 2)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        value = (up + 1) * gate * tl.sigmoid(gate * alpha)
        tl.store(output + row * width + column, value.to(output.dtype.element_ty), mask=column < width)

    @triton.jit
    def _activate_backward_kernel(
        grad, gate_up, bias, chosen, weights, output, weight_grad, width, limit, alpha, COLUMNS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        expert = tl.load(chosen + row).to(tl.int64)
        weight = tl.load(weights + row).to(tl.float32)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            pair = 2 * start + tl.arange(0, 2 * COLUMNS)
            inside = pair < 2 * width
            x = tl.load(gate_up + row * 2 * width + pair, mask=inside, other=0).to(tl.float32)
            x += tl.load(bias + expert * 2 * width + pair, mask=inside, other=0).to(tl.float32)
            raw_gate, raw_up = tl.split(tl.reshape(x, (COLUMNS, 2)))
            gate = tl.minimum(raw_gate, limit)
            up = tl.minimum(tl.maximum(raw_up, -limit), limit)
            sigmoid = tl.sigmoid(gate * alpha)
            swish = gate * sigmoid
            g = tl.load(grad + row * width + column, mask=column < width, other=0).to(tl.float32)
            total += g * (up + 1) * swish
            g *= weight
            d_gate = tl.where(raw_gate <= limit, g * (up + 1) * (sigmoid + alpha * swish * (1 - sigmoid)), 0.0)
            d_up = tl.where(tl.abs(raw_up) <= limit, g * swish, 0.0)
            d = tl.reshape(tl.join(d_gate, d_up), (2 * COLUMNS,))
            tl.store(output + row * 2 * width + pair, d.to(output.dtype.element_ty), mask=inside)
        tl.store(weight_grad + row, tl.sum(total, 0))

    @triton.jit
    def _route_kernel(
        indices, order, place, chosen, offsets, count, experts,
        ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        slot = tl.arange(0, ROWS)
        inside = slot < count
        mine = tl.load(indices + slot, mask=inside, other=experts)
        rank = tl.zeros((ROWS,), dtype=tl.int32)
        for begin in range(0, ROWS, CHUNK):
            others = begin + tl.arange(0, CHUNK)
            theirs = tl.load(indices + others, mask=others < count, other=experts)[None, :]
            first = (theirs < mine[:, None]) | ((theirs == mine[:, None]) & (others[None, :] < slot[:, None]))
            rank += tl.sum(first.to(tl.int32), 1)
        tl.store(place + slot, rank, mask=inside)
        tl.store(order + rank, slot, mask=inside)
        tl.store(chosen + rank, mine, mask=inside)
        expert = tl.arange(0, EXPERTS)
        ends = tl.sum((mine[:, None] <= expert[None, :]).to(tl.int32), 0)
        tl.store(offsets + expert, ends, mask=expert < experts)

    @triton.jit
    def _dispatch_kernel(x, place, rows, width, K: tl.constexpr, COLUMNS: tl.constexpr):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        value = tl.load(x + token * width + column, mask=inside)
        for j in tl.static_range(K):
            row = tl.load(place + token * K + j).to(tl.int64)
            tl.store(rows + row * width + column, value, mask=inside)

    @triton.jit
    def _combine_kernel(
        rows,
        place,
        weights,
        bias,
        experts,
        output,
        width,
        K: tl.constexpr,
        WEIGHTED: tl.constexpr,
        BIASED: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for j in tl.static_range(K):
            slot = token * K + j
            value = tl.load(rows + tl.load(place + slot).to(tl.int64) * width + column, mask=inside, other=0).to(
                tl.float32
            )
            if BIASED:
                expert = tl.load(experts + slot).to(tl.int64)
                value += tl.load(bias + expert * width + column, mask=inside, other=0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + slot).to(tl.float32)
            total += value
        tl.store(output + token * width + column, total.to(output.dtype.element_ty), mask=inside)
