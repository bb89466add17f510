"""Flex attention with sinks and sliding window at gpt-oss's shapes, against eager attention in float32: outputs, adapter gradients, packing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import DEVICE, ON_GPU, error, marks, poison
from training.config import LoraConfig
from training.model.attention import attend, install_attention
from training.model.lora import attach
from training.rows.batches import Collator
from training.rows.packing import _masks, install_masks, pack

pytestmark = [*marks, pytest.mark.skipif(not ON_GPU, reason="torch has no attention sinks in flex on CPU")]


def model(attention: str, dtype: torch.dtype, *, packed: bool = False) -> Any:
    """Two layers, one of each kind, with true attention and few small experts; the same weights every time."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    install_attention()
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, vocab_size=512,
        attn_implementation=attention, experts_implementation="eager", output_router_logits=False,
    )  # fmt: skip
    made = GptOssForCausalLM(config).to(DEVICE, dtype)
    for layer in made.model.layers:
        layer.self_attn.sinks.data.normal_(std=2.0)  # sinks that matter
    adapted = attach(made.requires_grad_(False), LoraConfig(r=8), "base")
    for value in adapted.parameters():
        if value.requires_grad:
            value.data.normal_(std=0.02)
    if attention != "eager" or packed:
        install_masks(made.model, packed=packed)
    return adapted.to(DEVICE)


def step(made: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=made.dtype == torch.bfloat16):
        logits = made(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in made.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("length", [128, 640])
def test_loss_and_gradients_are_eager_attentions(length: int) -> None:
    """640 tokens are five times the sliding window. In fp32, where no rounding sends a token to another expert."""
    ids = torch.randint(512, (2, length), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids}
    expected = step(model("eager", torch.float32), batch)
    found = step(model("flex_attention", torch.float32), batch)
    assert error(found[0], expected[0]) < 1e-4
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert error(found[1][name], gradient) < 5e-3, name


@pytest.mark.parametrize(
    ("kind", "bare"), [("full_attention", False), ("sliding_attention", False), ("sliding_attention", True)]
)
@pytest.mark.parametrize("length", [128, 640, 2048])
def test_output_and_gradients_in_bf16(length: int, kind: str, bare: bool) -> None:
    """Of the tiles that train, at gpt-oss's heads, against float64."""
    shapes = [(1, heads, length, 64) for heads in (64, 8, 8)]
    exact = [torch.randn(shape, device=DEVICE).bfloat16().double().requires_grad_() for shape in shapes]
    ours = [value.detach().bfloat16().requires_grad_() for value in exact]
    sinks = (2 * torch.randn(64, device=DEVICE)).bfloat16()
    grad = torch.randn(1, length, 64, 64, device=DEVICE).bfloat16()
    masks = _masks(length, 128, True, torch.bfloat16, torch.device(DEVICE), None, bare)
    window = 128 if kind == "sliding_attention" else None
    install_attention()
    poison()
    output, _ = attend(torch.nn.Module(), *ours, masks[kind], scaling=0.125, s_aux=sinks, sliding_window=window)
    output.backward(grad)
    expected = reference(*exact, sinks, window or length)
    expected.backward(grad.double())
    assert error(output, expected) < 5e-3
    for mine, theirs in zip(ours, exact, strict=True):
        assert error(mine.grad, theirs.grad) < 1e-2


def reference(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int) -> Tensor:
    """The definition, every score at once: `[1, heads, T, D]` → `[1, T, heads, D]`."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    position = torch.arange(query.shape[2], device=query.device)
    apart = position[:, None] - position
    scores = (query @ key.mT * 0.125).masked_fill((apart < 0) | (apart >= window), -torch.inf)
    with_sink = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(1, -1, len(position), 1)], -1)
    return (with_sink.softmax(-1)[..., :-1] @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    rows = [torch.randint(512, (size,)).tolist() for size in (70, 300, 129, 141)]
    examples = [{"input_ids": row, "labels": row} for row in rows]
    packed = {key: value.to(DEVICE) for key, value in Collator(0, 128)(pack(examples, 640)).items()}
    with torch.no_grad():
        together = model("flex_attention", dtype, packed=True)(
            input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False
        ).logits
        alone = model("eager", torch.float32)
        start = 0
        for row in rows:
            expected = alone(input_ids=torch.tensor([row], device=DEVICE), use_cache=False).logits
            assert error(together[:, start : start + len(row)], expected) < (1e-3 if dtype == torch.float32 else 0.1)
            start += len(row)
