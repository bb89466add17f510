"""A candidate: a grouped matrix product that reads MXFP4 itself, instead of dequantising into memory and calling grouped_mm.

Each program multiplies a tile of one expert's rows by a tile of its weight, decoding blocks and scales on the way in. It saves the
write and the read of the dequantised weight; whether it is faster is what `--profile` measures.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from training.model.experts import Frozen
from training.model.kernels import _decode, triton

if triton is not None:
    import triton.language as tl

ROWS = 128  # of a tile


class Tile(NamedTuple):
    """How the rest of the work is cut: columns of the result, depth of a step, warps, steps on their way at once."""

    n: int
    k: int
    num_warps: int
    num_stages: int


TILES = (Tile(128, 64, 8, 3), Tile(256, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 64, 4, 4), Tile(256, 32, 8, 4))
"""Those that `--profile` tries; which is best is not known before."""


def fused_mm(
    x: Tensor, weight: Frozen, columns: int, offsets: Tensor, *, transposed: bool, tile: Tile = TILES[0]
) -> Tensor:
    """`x[group] @ W[e].T` (`transposed`, the forward) or `x[group] @ W[e]` (the gradient of the input).

    Args:
        x: `[N, in]`, or `[N, out]` if not `transposed`; bf16.
        weight: packed, `[E, out, in]`.
        columns: its `in`.
        offsets: `[E]` where each expert's rows end.
    """
    out = weight.bias.shape[1]
    inner, width = (columns, out) if transposed else (out, columns)
    result = x.new_empty(len(x), width)
    first, last, expert = tiles(offsets, len(x))
    grid = (len(expert), triton.cdiv(width, tile.n))
    _fused_kernel[grid](
        x, weight.blocks.view(torch.uint8), weight.scales.view(torch.uint8), result, first, last, expert, inner, width,
        columns, out, TRANSPOSED=transposed, M=ROWS, N=tile.n, K=tile.k, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return result


def tiles(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """First row, end and expert of each tile, without waiting for the GPU: as many as could be, the spare ones empty."""
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    per_expert = (counts + ROWS - 1) // ROWS
    ends = per_expert.cumsum(0)
    tile = torch.arange(rows // ROWS + len(offsets), device=offsets.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp(max=len(offsets) - 1)
    first = (offsets - counts)[expert] + (tile - (ends - per_expert)[expert]) * ROWS
    last = torch.where(tile < ends[-1], offsets[expert], first)
    return first.int(), last.int(), expert.int()


if triton is not None:

    @triton.jit
    def _fused_kernel(
        x, blocks, scales, result, first, last, expert, inner, width, columns, out,
        TRANSPOSED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        start, end = tl.load(first + tile), tl.load(last + tile)
        if start >= end:
            return
        matrix = tl.load(expert + tile).to(tl.int64) * out * columns  # of values; 32 of them share a scale
        row = start + tl.arange(0, M)
        column = tl.program_id(1) * N + tl.arange(0, N)
        total = tl.zeros((M, N), dtype=tl.float32)
        for begin in range(0, inner, K):
            k = begin + tl.arange(0, K)
            values = tl.load(
                x + row[:, None].to(tl.int64) * inner + k[None, :],
                mask=(row[:, None] < end) & (k[None, :] < inner),
                other=0.0,
            )
            if TRANSPOSED:  # rows of the weight are columns of the result
                weight = tl.trans(_load_weight(blocks, scales, matrix, tl.program_id(1) * N, begin, out, columns, N, K))
            else:
                weight = _load_weight(blocks, scales, matrix, begin, tl.program_id(1) * N, out, columns, K, N)
            total = tl.dot(values, weight.to(values.dtype), total)
        place = result + row[:, None].to(tl.int64) * width + column[None, :]
        tl.store(place, total.to(result.dtype.element_ty), mask=(row[:, None] < end) & (column[None, :] < width))

    @triton.jit
    def _load_weight(
        blocks, scales, matrix, first_row, first_column, out, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
    ):
        """`[HEIGHT, WIDTH]` of one expert's weight in bf16, zero outside of it."""
        row = (first_row + tl.arange(0, HEIGHT))[:, None].to(tl.int64)
        byte = (first_column // 2 + tl.arange(0, WIDTH // 2))[None, :]
        inside = (row < out) & (2 * byte < columns)
        packed = tl.load(blocks + (matrix + row * columns) // 2 + byte, mask=inside, other=0)
        scale = tl.load(scales + (matrix + row * columns) // 32 + byte // 16, mask=inside, other=0).to(tl.int32) << 23
        scale = scale.to(tl.float32, bitcast=True)
        low, high = _decode(packed & 15) * scale, _decode(packed >> 4) * scale
        return tl.reshape(tl.join(low, high), (HEIGHT, WIDTH)).to(tl.bfloat16)
