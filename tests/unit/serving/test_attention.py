"""Attention without repeated keys equals transformers' eager attention."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from serving.engines.attention import grouped_attention


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("width", [1, 5])
def test_it_equals_eager(heads, kv_heads, width):
    generator = torch.Generator().manual_seed(0)
    batch, length, dim = 2, 9, 8
    query = torch.randn(batch, heads, width, dim, generator=generator)
    key, value = (torch.randn(batch, kv_heads, length, dim, generator=generator) for _ in range(2))
    distance = torch.arange(length - width, length)[:, None] - torch.arange(length)
    mask = torch.zeros(batch, 1, width, length).masked_fill_(
        (distance < 0) | (distance > 3), torch.finfo(torch.float32).min
    )
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    module.sinks = torch.randn(heads, generator=generator)
    module.training = False
    ours, _ = grouped_attention(module, query, key, value, mask, scaling=dim**-0.5, s_aux=module.sinks)
    theirs, _ = eager_attention_forward(module, query, key, value, mask, scaling=dim**-0.5)
    assert torch.allclose(ours, theirs, atol=1e-6)
