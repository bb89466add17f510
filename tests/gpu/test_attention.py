"""Flex attention with sinks and sliding window at gpt-oss's shapes, against eager attention in float32: outputs, adapter gradients, packing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import DEVICE, ON_GPU, error, marks
from training.config import LoraConfig
from training.model.lora import attach
from training.rows.batches import Collator
from training.rows.packing import install_masks, pack

pytestmark = [*marks, pytest.mark.skipif(not ON_GPU, reason="torch has no attention sinks in flex on CPU")]


def model(attention: str, dtype: torch.dtype, *, packed: bool = False) -> Any:
    """Two layers, one of each kind, with true attention and few small experts; the same weights every time."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
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
    """640 tokens are five times the sliding window."""
    ids = torch.randint(512, (2, length), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids}
    expected = step(model("eager", torch.float32), batch)
    found = step(model("flex_attention", torch.bfloat16), batch)
    assert error(found[0], expected[0]) < 5e-3
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert error(found[1][name], gradient) < 5e-2, name


def test_packed_rows_do_not_see_each_other() -> None:
    rows = [torch.randint(512, (size,)).tolist() for size in (70, 300, 129, 141)]
    examples = [{"input_ids": row, "labels": row} for row in rows]
    packed = {key: value.to(DEVICE) for key, value in Collator(0, 128)(pack(examples, 640)).items()}
    with torch.no_grad():
        together = model("flex_attention", torch.float32, packed=True)(
            input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=False
        ).logits
        alone = model("eager", torch.float32)
        start = 0
        for row in rows:
            expected = alone(input_ids=torch.tensor([row], device=DEVICE), use_cache=False).logits
            assert error(together[:, start : start + len(row)], expected) < 1e-3
            start += len(row)
