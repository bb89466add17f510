"""Sliding-window attention's definition against eager attention, and its Triton kernels against the definition through Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from training.model.windowed import windowed_attention


def eager(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, documents: Tensor | None = None
) -> Tensor:
    """transformers' own attention of gpt-oss under an additive mask; `documents` `[B, T]` numbers each token's document."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = torch.nn.Module()
    module.sinks = sinks
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    position = torch.arange(query.shape[2])
    apart = position[:, None] - position
    seen = ((apart >= 0) & (apart < window)).expand(len(query), 1, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return eager_attention_forward(module.eval(), query, key, value, mask, scaling=0.3)[0]


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [1, 7, 100])
def test_is_gpt_oss_attention(window: int, packed: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 33, 16, requires_grad=True) for heads in (8, 2, 2))
    sinks = torch.randn(8)
    documents = (torch.rand(2, 33) < 0.2).cumsum(-1) if packed else None
    starts = torch.searchsorted(documents, documents).int() if documents is not None else None
    found = windowed_attention(query, key, value, sinks, window, 0.3, starts)
    expected = eager(query, key, value, sinks, window, documents)
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    grad = torch.randn_like(expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(x, (query, key, value), grad) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


KERNELS = """
import torch
from torch import Tensor
from training.model import windowed

torch.manual_seed(0)
windowed.FORWARD |= {"ROWS": 32, "KEYS": 16}
windowed.QUERY_GRAD |= {"ROWS": 32, "KEYS": 16}
windowed.KEY_GRAD |= {"ROWS": 16, "KEYS": 16}


def amid_nan(*shape):
    around = torch.full((shape[0] + 2, *shape[1:]), float("nan"))
    around[1:-1] = torch.randn(shape)
    return around[1:-1]


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int, starts: Tensor | None) -> Tensor:
    return windowed._attend(query, key, value, sinks, window, 0.3, starts)[0] * 1


compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
for rows, length, heads, kv_heads, width, window, packed in (
    (2, 45, 8, 2, 16, 24, False),  # a ragged end
    (2, 45, 8, 2, 16, 24, True),
    (1, 40, 2, 2, 32, 100, True),  # a window longer than the row; a head of keys for each of queries
    (1, 19, 16, 1, 16, 17, False),
    (3, 1, 8, 2, 16, 24, False),
    (1, 33, 4, 1, 16, 1, True),
):
    parts = [amid_nan(rows, length, size, width).transpose(1, 2).requires_grad_() for size in (heads, kv_heads, kv_heads)]
    sinks, grad = torch.randn(heads), amid_nan(rows, length, heads, width)
    sinks[0] = -torch.inf  # no sink
    starts = None
    if packed:
        begins = torch.rand(rows, length) < 0.1
        starts = torch.where(begins, torch.arange(length), 0).cummax(1).values.int()
    expected = windowed.windowed_attention(*parts, sinks, window, 0.3, starts)
    expected_grads = torch.autograd.grad(expected, parts, grad)
    for run in (attend, compiled) if rows == 2 and packed else (attend,):
        found = run(*parts, sinks, window, starts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(torch.autograd.grad(found, parts, grad), expected_grads, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    if rows == 3:
        torch.library.opcheck(windowed._attend, (*parts, sinks, window, 0.3, starts))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="torch's CPU build comes without triton")
def test_kernels_equal_their_definition() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported
    outcome = subprocess.run(
        [sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=240
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
