"""The packed expert layer at gpt-oss-20b's shapes against a float64 reference, on fresh random data."""

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import DEVICE, SIZES, error, marks, poison, random_experts, routed
from training.model import experts as expert_layer
from training.model.experts import WEIGHTS, DenseExperts, LowRank, PackedExperts
from training.model.kernels import _activate, unpack

pytestmark = marks

CASES = [(1, None), (37, None), (2048, None), (3001, 5)]
"""Tokens, and experts that get any: ragged counts, empty experts."""


def dense(experts: PackedExperts, name: str, adapter: LowRank | None) -> Tensor:
    """The weight `[E, in, out]` in float64, from the torch dequantiser on the CPU, with its adapter folded in."""
    blocks, scales = (getattr(experts, f"{name}_{part}").cpu() for part in ("blocks", "scales"))
    weight = unpack(blocks, scales, experts.shape(name)[1], torch.float32).to(DEVICE).double().mT
    return weight if adapter is None else weight + adapter.a @ adapter.b


def reference(experts: PackedExperts, hidden: Tensor, indices: Tensor, weights: Tensor, **adapters: LowRank) -> Tensor:
    """The layer expert by expert, in the dtype of `hidden`."""
    output = torch.zeros_like(hidden)
    up, down = (dense(experts, name, adapters.get(name)) for name in WEIGHTS)
    for expert in range(experts.num_experts):
        token, slot = torch.where(indices == expert)
        if len(token):
            x = hidden[token] @ up[expert] + experts.gate_up_proj_bias[expert]
            y = _activate(x, experts.limit) @ down[expert] + experts.down_proj_bias[expert]
            output = output.index_add(0, token, y * weights[token, slot, None])
    return output


def random_adapters(experts: PackedExperts, r: int) -> dict[str, LowRank]:
    def half(*shape: int) -> Tensor:
        return (0.05 * torch.randn(*shape, device=DEVICE)).bfloat16().requires_grad_()

    shapes = {name: experts.shape(name) for name in WEIGHTS}
    return {name: LowRank(half(e, i, r), half(e, r, o)) for name, (e, i, o) in shapes.items()}


def exactly(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("apart", [False, True], ids=["grouped", "apart"])
@pytest.mark.parametrize(("tokens", "only"), CASES)
def test_forward_and_gradients(monkeypatch: pytest.MonkeyPatch, tokens: int, only: int | None, apart: bool) -> None:
    """In grouped products, and in one of each expert's own."""
    for name in ("MANY_ROWS", "APART_FROM"):
        monkeypatch.setattr(expert_layer, name, 0 if apart else float("inf"))
    experts = random_experts()
    hidden, indices, weights = routed(tokens, only)
    grad = torch.randn_like(hidden)
    ours = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    poison()
    output = experts(ours[0], indices, ours[1])
    output.backward(grad)
    exact = exactly(hidden, weights)
    expected = reference(experts, exact[0], indices, exact[1])
    expected.backward(grad.double())
    assert error(output, expected) < 1e-2
    for mine, theirs in zip(ours, exact, strict=True):
        assert error(mine.grad, theirs.grad) < 1e-2


@pytest.mark.parametrize("r", [8, 16])
@pytest.mark.parametrize(("tokens", "only"), CASES)
def test_adapters(tokens: int, only: int | None, r: int) -> None:
    """Different A and B for every expert; those of experts without tokens get zero, not what memory held."""
    experts = random_experts()
    adapters = random_adapters(experts, r)
    hidden, indices, weights = routed(tokens, only)
    grad = torch.randn_like(hidden)
    x = hidden.clone().requires_grad_()
    poison()
    output = experts(x, indices, weights, **adapters)
    output.backward(grad)
    exact = {name: LowRank(*exactly(*adapter)) for name, adapter in adapters.items()}
    exact_x = exactly(hidden)[0]
    expected = reference(experts, exact_x, indices, weights.double(), **exact)
    expected.backward(grad.double())
    assert error(output, expected) < 1e-2
    assert error(x.grad, exact_x.grad) < 1e-2
    for name, adapter in adapters.items():
        for half, theirs in zip(adapter, exact[name], strict=True):
            assert error(half.grad, theirs.grad) < 2e-2, name
            used = torch.zeros(SIZES.num_local_experts, dtype=torch.bool, device=DEVICE)
            used[indices.unique()] = True
            assert not half.grad[~used].any()


@pytest.mark.parametrize(("tokens", "only"), CASES)
def test_dense_weights_do_as_packed_ones(tokens: int, only: int | None) -> None:
    packed = random_experts()
    with torch.device(DEVICE):
        dense_ones = DenseExperts(SIZES)
    for name in WEIGHTS:
        getattr(dense_ones, name).data.copy_(packed.weight(name, torch.bfloat16).mT)
        getattr(dense_ones, f"{name}_bias").data.copy_(getattr(packed, f"{name}_bias"))
    hidden, indices, weights = routed(tokens, only)
    grad = torch.randn_like(hidden)
    found = []
    for experts in (packed, dense_ones):
        inputs = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        poison()
        output = experts(inputs[0], indices, inputs[1])
        found.append([output.detach(), *torch.autograd.grad(output, inputs, grad)])
    for one, other in zip(*found, strict=True):
        assert error(other, one.double()) < 1e-2


def test_dequantiser_is_exact() -> None:
    blocks = torch.randint(0, 256, (3, 7 * 90 * 16), dtype=torch.uint8)
    scales = torch.randint(4, 247, (3, 7 * 90), dtype=torch.uint8)
    cpu = unpack(blocks, scales, 2880, torch.bfloat16)
    poison()
    gpu = unpack(blocks.to(DEVICE), scales.to(DEVICE), 2880, torch.bfloat16)
    assert torch.equal(gpu.cpu(), cpu)
