"""A grouped product that reads MXFP4 itself, for as few rows as decoding has.

With few rows an expert, a product takes as long as its weight takes to be read: packed that is 17/64 of bf16's bytes, and no
dequantised copy is written first. With many, decoding the weight again for each tile of rows costs more than that
(`tests/benchmarks/training/fused.py`). Nothing here waits for the GPU, so a decoding step can be recorded as a CUDA graph.
"""

import torch
from torch import Tensor

from training.model.kernels import triton

if triton is not None:
    import triton.language as tl

ROWS_PER_EXPERT = 64
"""On average, up to which this is used: beyond, dequantising and `grouped_mm` take as long on an H200."""

FEW = {"M": 16, "N": 64, "K": 128, "num_warps": 4, "num_stages": 3}
MORE = FEW | {"M": 64, "N": 128}
"""A program's rows, columns and depth: for up to 16 rows an expert, the fewest that tensor cores take, and for more. The best of six
to nine on an H200."""


def suits(x: Tensor, experts: int) -> bool:
    """Whether `fused_mm` takes `x` and is the faster way. Cards before Hopper cannot multiply bf16 in pairs."""
    few = x.dtype == torch.bfloat16 and len(x) <= ROWS_PER_EXPERT * experts
    return few and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def fused_mm(x: Tensor, blocks: Tensor, scales: Tensor, out: int, offsets: Tensor) -> Tensor:
    """`x[offsets[e-1]:offsets[e]] @ W[e].T` for every expert.

    Args:
        x: `[N, in]` bf16, sorted by expert.
        blocks: packed views (see `experts.pack`) of weights `[E, out, in]`; `scales` likewise.
        offsets: `[E]` int32, where each expert's rows end; the last is N.

    Returns:
        `[N, out]` bf16, summed in fp32.
    """
    rows, columns = x.shape
    result = x.new_empty(rows, out)
    tile = FEW if rows <= FEW["M"] * len(offsets) else MORE
    _fused_kernel[(triton.cdiv(out, tile["N"]), len(offsets))](
        as_unpacked(x),
        blocks.view(torch.int32),
        scales.view(torch.uint8),
        result,
        offsets,
        out,
        columns,
        PAIRS=True,
        **tile,
    )
    return result


def as_unpacked(x: Tensor) -> Tensor:
    """`x` `[N, in]` with each 8 values in the order in which `_fused_kernel` unpacks a weight's word: 0, 4, 1, 5, 2, 6, 3, 7."""
    return x.unflatten(1, (-1, 2, 4)).mT.contiguous()


if triton is not None:

    @triton.jit
    def _value(word, scale, j: tl.constexpr):
        """The j-th of a word's 8 values, fp32.

        e2m1's exponent and mantissa, put where fp32 has them, make 2**-126 times the value, also of its subnormal 0.5.
        """
        magnitude = word << (22 - 4 * j) if j < 6 else word >> (4 * j - 22)
        bits = (magnitude & 0x01C00000) | ((word << (28 - 4 * j)) & -0x80000000)
        # 2**(s-127) as a bit pattern; s = 0 means 2**-127, a subnormal that flushes to 0 either way
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * (scale << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def _pair(word, scale, j: tl.constexpr):
        """The j-th and the (j+4)-th of a word's values in bf16, likewise, but two at a time, as halves of 32 bits."""
        bits = (((word >> (4 * j)) << 6) & 0x01C001C0) | (((word >> (4 * j)) << 12) & -0x7FFF8000)
        both = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3; }",
            "=r,r,r,r",
            [bits, tl.full(bits.shape, 0x7E807E80, tl.int32), (scale << 7) | (scale << 23)],  # 2**126
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return both.to(tl.int16).to(tl.bfloat16, bitcast=True), (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def _fused_kernel(
        x, words, scales, result, offsets, out,
        COLUMNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PAIRS: tl.constexpr,
    ):  # fmt: skip
        width: tl.constexpr = COLUMNS // 8
        expert = tl.program_id(1)
        start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offsets + expert)
        column = tl.program_id(0) * N + tl.arange(0, N)
        weight_row = (expert.to(tl.int64) * out + column)[:, None]
        while start < end:
            row = start + tl.arange(0, M)
            total = tl.zeros((N, M), dtype=tl.float32)  # columns first: the weight is the operand that may be small
            for begin in range(0, width, K // 8):
                place = begin + tl.arange(0, K // 8)
                inside = (column < out)[:, None] & (place < width)[None, :]
                word = tl.load(words + weight_row * width + place[None, :], mask=inside, other=0)
                scale = tl.load(scales + weight_row * (width // 4) + place[None, :] // 4, mask=inside, other=0).to(
                    tl.int32
                )
                if PAIRS:
                    w0, w4 = _pair(word, scale, 0)
                    w1, w5 = _pair(word, scale, 1)
                    w2, w6 = _pair(word, scale, 2)
                    w3, w7 = _pair(word, scale, 3)
                else:  # Triton's interpreter knows no assembler
                    w0, w4 = _value(word, scale, 0), _value(word, scale, 4)
                    w1, w5 = _value(word, scale, 1), _value(word, scale, 5)
                    w2, w6 = _value(word, scale, 2), _value(word, scale, 6)
                    w3, w7 = _value(word, scale, 3), _value(word, scale, 7)
                low = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [N, K / 8, a, b] is value 2 a + b
                high = tl.join(tl.join(w4, w6), tl.join(w5, w7))
                weight = tl.reshape(tl.join(low, high), (N, K))
                k = begin * 8 + tl.arange(0, K)
                values = tl.load(
                    x + row[None, :].to(tl.int64) * COLUMNS + k[:, None],
                    mask=(row < end)[None, :] & (k < COLUMNS)[:, None],
                    other=0.0,
                )
                total = tl.dot(weight, values, total)
            target = result + row[None, :].to(tl.int64) * out + column[:, None]
            tl.store(target, total.to(result.dtype.element_ty), mask=(row < end)[None, :] & (column < out)[:, None])
            start += M
