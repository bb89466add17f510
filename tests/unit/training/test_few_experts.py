"""Decoding unpacks only the experts that have a row, and computes the same bits as with all of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training.model import experts as module
from training.model.experts import LowRank, PackedExperts
from training.model.load import load

EXPERTS, TOP = 4, 2
"""Of the random base."""


@pytest.fixture
def experts(random_base: Path) -> PackedExperts:
    """With more experts than tokens choose in these tests: the base's, four times over with biases of their own."""
    experts = load(random_base, weights="mxfp4").model.layers[0].mlp.experts
    assert isinstance(experts, PackedExperts)
    assert experts.num_experts == EXPERTS
    generator = torch.Generator().manual_seed(0)
    for name, value in list(experts.named_parameters()):
        many = value.data.repeat(4, 1)[torch.randperm(4 * EXPERTS, generator=generator)]
        if name.endswith("bias"):
            many = torch.randn(many.shape, generator=generator)
        setattr(experts, name, nn.Parameter(many, requires_grad=False))
    experts.num_experts = 4 * EXPERTS
    return experts


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts each call unpacked."""
    counts: list[int] = []
    unpack = module.unpack

    def counted(blocks: Tensor, *rest: object) -> Tensor:
        counts.append(len(blocks))
        return unpack(blocks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "unpack", counted)
    return counts


def adapters(experts: PackedExperts) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(1)

    def half(*shape: int) -> Tensor:
        return 0.1 * torch.randn(experts.num_experts, *shape, generator=generator)

    return {name: LowRank(half(inner, 8), half(8, outer)) for name, (_, inner, outer) in shapes(experts).items()}


def shapes(experts: PackedExperts) -> dict[str, tuple[int, int, int]]:
    return {name: experts.shape(name) for name in module.WEIGHTS}


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "chosen",
    [
        [[7, 3]],
        [[0, 15], [15, 0], [3, 0]],
        [[9, 2]] * 7,
        [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12], [13, 14]],
    ],
    ids=["one-token", "shared", "same", "all-different"],
)
def test_the_experts_used_give_the_same_bits(
    experts: PackedExperts, unpacked: list[int], chosen: list[list[int]], dtype: torch.dtype, adapted: bool
) -> None:
    for name in module.WEIGHTS:  # blocks and scales are bytes, whatever the dtype
        getattr(experts, f"{name}_bias").data = getattr(experts, f"{name}_bias").to(dtype)
    indices = torch.tensor(chosen)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(chosen), 64, generator=generator).to(dtype)
    weights = torch.rand(len(chosen), TOP, generator=generator).to(dtype)
    extra = {n: LowRank(*(h.to(dtype) for h in a)) for n, a in adapters(experts).items()} if adapted else {}
    with_all = experts(x, indices, weights, **extra)
    assert unpacked == [experts.num_experts] * 2
    with torch.no_grad():
        with_used = experts(x, indices, weights, **extra)
    assert unpacked[2:] == [len(indices.unique())] * 2
    assert torch.equal(with_used, with_all)


def test_as_many_choices_as_experts_unpack_all(experts: PackedExperts, unpacked: list[int]) -> None:
    with torch.no_grad():
        experts(torch.randn(8, 64), torch.tensor([[0, 1]] * 8), torch.rand(8, TOP))
    assert unpacked == [experts.num_experts] * 2
