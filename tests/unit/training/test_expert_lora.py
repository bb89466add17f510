"""Adapters of packed experts against PEFT's own over dequantised ones: values, gradients, files, merge."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from tests.unit.training.adapters import load as plain
from tests.unit.training.adapters import logits, with_adapter
from training.config import LoraConfig
from training.merge import merge
from training.model.load import load
from training.model.lora import attach, load_adapter, save_adapter

IDS = torch.arange(60).view(2, 30) * 7 % 500


def adapted(base: Path, weights: str, *, r: int = 4, seed: int = 1) -> PeftModel:
    """`weights` as in `load`, or `frozen`: bf16 in our layer."""
    torch.manual_seed(seed)
    model = load(base, experts="frozen") if weights == "frozen" else load(base, weights=weights)  # type: ignore[arg-type]
    return attach(model, LoraConfig(r=r, targets="attention+experts"), "org/base")


def trained(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def fill(model: PeftModel) -> PeftModel:
    """Random A and B: every expert its own."""
    generator = torch.Generator().manual_seed(2)
    for value in trained(model).values():
        value.data = 0.05 * torch.randn(value.shape, generator=generator)
    return model


def loss_and_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in trained(model).items() if value.grad is not None}


@pytest.mark.parametrize("held", ["mxfp4", "frozen"])
def test_a_fresh_adapter_is_pefts(random_base: Path, held: str) -> None:
    ours, theirs = (trained(adapted(random_base, weights)) for weights in (held, "bf16"))
    assert list(ours) == list(theirs)
    assert all(ours[name].dtype == torch.float32 and torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("held", ["mxfp4", "frozen"])
@pytest.mark.parametrize("r", [1, 4, 8])
def test_loss_and_all_gradients_are_pefts(random_base: Path, r: int, held: str) -> None:
    ours, theirs = (loss_and_gradients(fill(adapted(random_base, weights, r=r))) for weights in (held, "bf16"))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, expected in theirs[1].items():
        assert expected.norm() > 0, name
        assert (ours[1][name] - expected).norm() < 1e-4 * expected.norm(), name


def test_experts_without_tokens_get_no_gradient(random_base: Path) -> None:
    from training.model.experts import LowRank, PackedExperts

    experts = load(random_base, weights="mxfp4").model.layers[0].mlp.experts
    assert isinstance(experts, PackedExperts)
    pairs = {
        name: LowRank(
            torch.randn(4, experts.shape(name)[1], 8, requires_grad=True),
            torch.randn(4, 8, experts.shape(name)[2], requires_grad=True),
        )
        for name in ("gate_up_proj", "down_proj")
    }
    experts(torch.randn(7, 64), torch.tensor([[3, 1]] * 7), torch.rand(7, 2), **pairs).sum().backward()
    for half in (half for pair in pairs.values() for half in pair):
        assert half.grad is not None
        assert [bool(part.any()) for part in half.grad] == [False, True, False, True]


def test_switched_off_it_is_the_base(random_base: Path) -> None:
    model = fill(adapted(random_base, "mxfp4")).eval()
    base = logits(load(random_base, weights="mxfp4"))
    assert not torch.equal(logits(model), base)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)


def test_peft_reads_it_and_we_merge_it(random_base: Path, tmp_path: Path) -> None:
    model = fill(adapted(random_base, "mxfp4")).eval()
    save_adapter(model, tmp_path / "adapter")
    ours = logits(model)
    torch.testing.assert_close(logits(with_adapter(random_base, tmp_path / "adapter")), ours, rtol=1e-4, atol=1e-4)
    again = adapted(random_base, "mxfp4", seed=5).eval()
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), ours)
    merge(random_base, tmp_path / "adapter", tmp_path / "merged", format="bf16", progress=False)
    base = logits(plain(random_base))
    lost = logits(plain(tmp_path / "merged")) - ours
    assert lost.norm() < 0.02 * (ours - base).norm(), "the merge rounds to bf16, and loses no more than that"
