"""The MXFP4 format against hand-computed bytes, against transformers' own decoder, and against brute-force rounding."""

import pytest
import torch

from training.model.mxfp4 import BLOCK, VALUES, dequantize, encode, quantize


def test_low_nibble_first_and_scale_bias() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x72  # low nibble 2 = 1.0, high nibble 7 = 6.0
    blocks[0, 0, 1] = 0xF9  # low nibble 9 = -0.5, high nibble 15 = -6.0
    weight = dequantize(blocks, torch.tensor([[129]], dtype=torch.uint8), torch.float32)  # 2**(129 - 127)
    assert weight.shape == (1, 32)
    assert weight[0, :4].tolist() == [4.0, 24.0, -2.0, -24.0]
    assert weight[0, 4:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 8, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [E, in, out]
    assert torch.equal(dequantize(blocks, scales, dtype).transpose(-2, -1), expected)


def test_every_representable_weight_survives() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (4, 6, 3, BLOCK), generator=generator)
    codes[..., 0] = 7  # the largest magnitude, so that the block's exponent is its own
    values = torch.tensor(VALUES)[codes] * 2.0 ** torch.randint(-20, 20, (4, 6, 3, 1), generator=generator)
    weight = values.flatten(-2)
    assert torch.equal(dequantize(*quantize(weight), torch.float32), weight)


def test_rounds_to_the_nearest_with_ties_to_even() -> None:
    # midpoints of e2m1 and where they go: the neighbour whose code is even
    given = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    weight = torch.zeros(32)
    weight[: len(given)] = torch.tensor(given)
    weight[8 : 8 + len(given)] = -torch.tensor(given)
    weight[16] = 6.0
    rounded = dequantize(*quantize(weight), torch.float32)
    assert rounded[: len(given)].tolist() == expected
    assert rounded[8 : 8 + len(given)].tolist() == [-value for value in expected]


def test_rounding_is_nearest_by_brute_force() -> None:
    weight = torch.randn(64, 4 * BLOCK, generator=torch.Generator().manual_seed(2))
    blocks, scales = quantize(weight)
    size = (2.0 ** (scales.int() - 127)).repeat_interleave(BLOCK, -1)
    choices = torch.tensor(VALUES) * size.unsqueeze(-1)
    nearest = (weight.unsqueeze(-1) - choices).abs().amin(-1)
    assert torch.equal((weight - dequantize(blocks, scales, torch.float32)).abs(), nearest)


def test_zero_blocks_stay_zero_and_saturation_is_at_six() -> None:
    weight = torch.zeros(2, BLOCK)
    weight[1, 0] = 7.9  # exponent 2, above 6 * 2**0
    back = dequantize(*quantize(weight), torch.float32)
    assert back[0].eq(0).all()
    assert back[1, 0] == 6.0


def test_encode_under_given_exponents() -> None:
    groups = torch.full((1, BLOCK), 8.0)
    blocks, scales = encode(groups, torch.tensor([1]))
    assert scales.item() == 128
    assert dequantize(blocks.unsqueeze(0), scales.unsqueeze(0), torch.float32).eq(8.0).all()
