"""Our experts, packed and dense, against transformers': outputs and gradients, with experts that get no token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.config import LoraConfig
from training.model.experts import DenseExperts, PackedExperts
from training.model.load import load
from training.model.lora import attach
from training.model.recompute import checkpoint_arguments, recompute_of

OURS = {"packed": {"weights": "mxfp4"}, "frozen": {"weights": "bf16", "experts": "frozen"}}
"""Arguments of `load`, by what the layer calls itself."""


def relative(difference: Tensor, reference: Tensor) -> float:
    return (difference.norm() / reference.norm().clamp_min(1e-12)).item()


def experts_of(model: nn.Module, layer: int = 0) -> nn.Module:
    return model.model.layers[layer].mlp.experts  # type: ignore[union-attr,index,return-value]


@pytest.fixture(scope="module")
def both(random_base: Path) -> tuple[nn.Module, nn.Module]:
    """Layer 0's experts, packed and dequantised."""
    return experts_of(load(random_base, weights="mxfp4")), experts_of(load(random_base, weights="bf16"))


@pytest.mark.parametrize("held", OURS)
@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [1, 3], [2, 0]], ids=["all", "two", "two-reversed"])
def test_outputs_and_input_gradients_equal(
    random_base: Path, both: tuple[nn.Module, nn.Module], chosen: list[int], held: str
) -> None:
    ours, reference = experts_of(load(random_base, **OURS[held])), both[1]  # type: ignore[arg-type]
    assert ours.held == held
    generator = torch.Generator().manual_seed(3)
    tokens = 24
    choice = torch.stack([torch.randperm(len(chosen), generator=generator)[:2] for _ in range(tokens)])
    indices = torch.tensor(chosen)[choice]
    weights = torch.rand(tokens, 2, generator=generator)
    outputs, gradients = [], []
    for experts in (ours, reference):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(4)).requires_grad_()
        w = weights.clone().requires_grad_()
        y = experts(x, indices, w)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
        outputs.append(y.detach())
        assert x.grad is not None
        assert w.grad is not None
        gradients.append((x.grad, w.grad))
    assert relative(outputs[0] - outputs[1], outputs[1]) < 1e-5
    for one, other in zip(*gradients, strict=True):
        assert relative(one - other, other) < 1e-5


def test_the_dequantised_weight_is_the_references(both: tuple[nn.Module, nn.Module]) -> None:
    packed, reference = both
    assert isinstance(packed, PackedExperts)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(packed.weight(name, torch.float32).mT, getattr(reference, name))


def test_packed_weights_are_a_quarter_of_bf16(both: tuple[nn.Module, nn.Module]) -> None:
    packed, reference = both
    held = sum(value.nbytes for name, value in packed.named_parameters() if not name.endswith("bias"))
    values = sum(value.numel() for name, value in reference.named_parameters() if not name.endswith("bias"))
    assert held == values * (4 + 8 / 32) / 8


def test_autograd_keeps_the_packed_weight_only(both: tuple[nn.Module, nn.Module]) -> None:
    packed, _ = both
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    x = torch.randn(4, 64, requires_grad=True)
    with hooks:
        packed(x, torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    dequantised = 4 * 64 * 64  # values of the smallest weight matrix
    assert all(tensor.numel() < dequantised for tensor in saved if tensor.dtype == torch.float32)


def test_autograd_keeps_a_dense_weight_as_it_is(random_base: Path) -> None:
    experts = experts_of(load(random_base, weights="bf16", experts="frozen"))
    assert isinstance(experts, DenseExperts)
    held = {value.data_ptr() for value in experts.parameters()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(torch.randn(4, 64, requires_grad=True), torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    large = [tensor for tensor in saved if tensor.numel() >= 4 * 64 * 64]
    assert len(large) == 2
    assert all(tensor.data_ptr() in held for tensor in large)


@pytest.mark.parametrize("held", OURS)
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_whole_model_and_all_adapter_gradients_equal(random_base: Path, targets: str, held: str) -> None:
    ids = torch.arange(60).view(2, 30) * 7 % 500
    losses, gradients = [], []
    for settings in (OURS[held], {"weights": "bf16"}):
        torch.manual_seed(0)
        model = attach(load(random_base, **settings), LoraConfig(r=4, targets=targets), "base")  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(6)
        for value in model.parameters():
            if value.requires_grad:
                value.data = 0.05 * torch.randn(value.shape, generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.requires_grad})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, reference in gradients[1].items():
        assert reference is not None
        assert reference.norm() > 0, name
        assert relative(gradients[0][name] - reference, reference) < 1e-3, name


def test_a_second_backward_is_refused(both: tuple[nn.Module, nn.Module]) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    y = both[0](x, torch.tensor([[0, 1]] * 4), torch.rand(4, 2)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        y.backward()


@pytest.mark.parametrize(("recompute", "dequantised"), [("none", 4), ("selective", 4), ("full", 5)])
def test_recomputation_ends_with_what_the_backward_needs(
    random_base: Path, monkeypatch: pytest.MonkeyPatch, recompute: str, dequantised: int
) -> None:
    """Two weights forward and two backward; `full` needs the first once more, and never the second."""
    from training.model import experts as module

    model = attach(load(random_base, weights="mxfp4"), LoraConfig(r=4), "base").train()
    arguments = checkpoint_arguments(recompute)
    if arguments:
        model.gradient_checkpointing_enable(arguments)
    counted: list[int] = []
    unpack = module.unpack
    monkeypatch.setattr(module, "unpack", lambda *a: counted.append(1) or unpack(*a))
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert recompute_of(model) == recompute
    assert len(counted) == 2 * dequantised  # layers
