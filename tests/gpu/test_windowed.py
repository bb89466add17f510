"""Sliding-window attention's Triton kernels at gpt-oss's shapes against float32: outputs, gradients, packing, compiling, the same bits twice."""

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import DEVICE, ON_GPU, error, marks, poison
from training.model.windowed import _reference, windowed_attention

pytestmark = [*marks, pytest.mark.skipif(not ON_GPU, reason="its kernels are Triton's")]

HEADS, KV_HEADS, HEAD_DIM, SCALE = 64, 8, 64, 0.125


def amid_nan(rows: int, length: int, heads: int) -> Tensor:
    """Random bf16 `[rows, heads, length, HEAD_DIM]` as a view of `[rows, length, heads, HEAD_DIM]`, with NaN before and after."""
    around = torch.full((rows + 2, length, heads, HEAD_DIM), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    around[1:-1] = torch.randn(rows, length, heads, HEAD_DIM, device=DEVICE)
    return around[1:-1].transpose(1, 2)


class Case:
    """One layer's tensors, fresh random numbers each."""

    def __init__(self, rows: int, length: int, packed: bool, window: int = 128, kv_heads: int = KV_HEADS):
        self.parts = [amid_nan(rows, length, heads).requires_grad_() for heads in (HEADS, kv_heads, kv_heads)]
        self.sinks = (2 * torch.randn(HEADS, device=DEVICE)).bfloat16()
        self.grad = amid_nan(rows, length, HEADS).transpose(1, 2)
        self.window = window
        self.starts = None
        if packed:
            begins = torch.rand(rows, length, device=DEVICE) < 1 / 100
            self.starts = torch.where(begins, torch.arange(length, device=DEVICE), 0).cummax(1).values.int()

    def run(self, attend=windowed_attention) -> list[Tensor]:
        """Output and gradients of query, key and value."""
        output = attend(*self.parts, self.sinks, self.window, SCALE, self.starts)
        return [output.detach(), *torch.autograd.grad(output, self.parts, self.grad)]

    def expected(self) -> list[Tensor]:
        exact = [part.detach().float().requires_grad_() for part in self.parts]
        output = _reference(*exact, self.sinks, self.window, SCALE, self.starts)
        return [output.detach(), *torch.autograd.grad(output, exact, self.grad.float())]

    def check(self, found: list[Tensor]) -> None:
        for name, mine, theirs in zip(("output", "query", "key", "value"), found, self.expected(), strict=True):
            assert mine.shape == theirs.shape
            assert mine.dtype == torch.bfloat16
            assert error(mine, theirs) < (5e-3 if name == "output" else 1e-2), name


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(("rows", "length"), [(2, 2048), (3, 1000), (1, 127), (4, 1)])
def test_output_and_gradients(rows: int, length: int, packed: bool) -> None:
    case = Case(rows, length, packed)
    poison()
    case.check(case.run())


@pytest.mark.parametrize("window", [1, 100, 512])
def test_other_windows(window: int) -> None:
    case = Case(1, 700, packed=True, window=window)
    poison()
    case.check(case.run())


@pytest.mark.parametrize("kv_heads", [64, 16, 4])
def test_other_groups(kv_heads: int) -> None:
    """1, 4 and 16 query heads a KV head."""
    case = Case(1, 300, packed=False, kv_heads=kv_heads)
    poison()
    case.check(case.run())


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_compiles_without_graph_break(packed: bool) -> None:
    case = Case(2, 640, packed)
    compiled = torch.compile(windowed_attention, fullgraph=True, dynamic=False)
    poison()
    for mine, theirs in zip(case.run(compiled), case.run(), strict=True):
        assert torch.equal(mine, theirs)


def test_same_bits_twice() -> None:
    case = Case(4, 2048, packed=True)
    for one, other in zip(case.run(), case.run(), strict=True):
        assert torch.equal(one, other)
