"""The MXFP4 format of gpt-oss's experts: 32 values share a power-of-two scale, each value is a 4-bit e2m1 number.

Layout, as in OpenAI's checkpoints: for a weight `[..., out, in]`, `blocks` is uint8 `[..., out, in/32, 16]`, two values a
byte with the earlier one in the low nibble, and `scales` is uint8 `[..., out, in/32]`, meaning `2**(scale - 127)`.
Format: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 (e2m1) and 5.4.1 (e8m0).
"""

import torch
from torch import Tensor

BLOCK = 32
"""Values that share one scale."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 codes mean; the highest bit is the sign."""

_EXPONENT_BIAS = 127
_LARGEST_EXPONENT = 2  # of e2m1: 6 = 1.5 * 2**2
_DROPPED_BITS = 22  # of fp32's 23 bits of mantissa, e2m1 keeps one
_CACHED_VALUES = 1 << 18  # rounded at once on a CPU: the dozen temporaries then stay in its cache, 7 times as fast


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that `blocks` and `scales` stand for; exact in bf16 and fp32 while scales lie in 2**-124 … 2**120.

    Args:
        blocks: uint8 `[..., groups, 16]`.
        scales: uint8 `[..., groups]`.
        dtype: of the result.

    Returns:
        `[..., groups * 32]`.
    """
    values = torch.tensor(VALUES, dtype=dtype, device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pair_of = torch.stack((values[byte & 0x0F], values[byte >> 4]), dim=-1)  # [256, 2]: one look-up for two values
    packed = pair_of.view(torch.int64 if pair_of.element_size() == 4 else torch.int32).flatten()
    weight = packed.index_select(0, blocks.flatten().int()).view(dtype).view(*scales.shape, BLOCK)
    weight *= torch.exp2(scales.float() - _EXPONENT_BIAS).to(dtype).unsqueeze(-1)
    return weight.flatten(-2)


def quantize(weight: Tensor, *, search_scales: bool = False) -> tuple[Tensor, Tensor]:
    """`weight` rounded to MXFP4, each value to the nearest (ties to the even code), scales by the block's largest exponent.

    Args:
        weight: `[..., in]`, `in` a multiple of 32; finite.
        search_scales: take a block's next larger scale where that rounds with the smaller squared error. The usual one
            cuts values above 6 to 6, by up to a quarter; one still smaller would cut more and never pays.

    Returns:
        blocks uint8 `[..., in/32, 16]` and scales uint8 `[..., in/32]`.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    at_once = max(1, _CACHED_VALUES // weight.shape[-1]) if weight.device.type == "cpu" else len(rows)
    parts = [_quantize(part, search_scales) for part in rows.split(at_once)]
    blocks, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK)
    return blocks.view(*shape, BLOCK // 2), scales.view(shape)


def encode(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Values `[..., groups, 32]` as blocks and scales under the given integer exponents `[..., groups]`."""
    return _pack(_codes(_size(groups, exponent)), groups, exponent)


def _quantize(weight: Tensor, search_scales: bool) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT, 0)
    exponent = exponent.clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS)
    size = _size(groups, exponent)
    code = _codes(size)
    if search_scales:
        coarse = _codes(size / 2)
        coarser = 4 * _squared_error(coarse, size / 2) < _squared_error(code, size)
        exponent = (exponent + coarser).clamp(max=_EXPONENT_BIAS)
        code = torch.where(coarser.unsqueeze(-1), coarse, code)
    return _pack(code, groups, exponent)


def _size(groups: Tensor, exponent: Tensor) -> Tensor:
    return torch.ldexp(groups, -exponent.unsqueeze(-1)).abs_()


def _codes(size: Tensor) -> Tensor:
    """The codes 0 to 7 of the e2m1 magnitudes nearest to `size`, ties to the even code.

    From 1 on, e2m1 is fp32 cut to one bit of mantissa: adding just under half of that bit's weight, and one more where the bit is set,
    carries into it exactly when rounding half to even goes up. Below 1, steps are 1/2.
    """
    bits = size.view(torch.int32)
    last_bit = (bits >> _DROPPED_BITS) & 1
    rounded = (bits + ((1 << (_DROPPED_BITS - 1)) - 1) + last_bit) >> _DROPPED_BITS
    code = rounded - (2 * _EXPONENT_BIAS - 2)  # 1.0 has code 2
    return torch.where(size < 1, (2 * size).round_().int(), code).clamp_(max=7)


def _pack(code: Tensor, groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    code = (code + 8 * torch.signbit(groups)).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), (exponent + _EXPONENT_BIAS).to(torch.uint8)


def _squared_error(code: Tensor, size: Tensor) -> Tensor:
    """Of rounding each block `[..., 32]`."""
    values = torch.tensor(VALUES[:8], device=size.device)
    return (values.index_select(0, code.flatten()).view_as(size) - size).square_().sum(-1)
