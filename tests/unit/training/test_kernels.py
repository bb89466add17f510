"""The Triton kernels against their torch definitions, through Triton's interpreter on the CPU (`tests/gpu` has the real ones)."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import torch, triton
import training.model.fused as fused
import training.model.kernels as kernels
import training.model.loss as loss
from training.model.experts import pack

torch.manual_seed(0)
experts, hidden, inner, tokens, k = 4, 96, 64, 19, 2
rows = tokens * k


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


blocks = torch.randint(0, 256, (experts, 2 * inner, hidden // 32, 16), dtype=torch.uint8)
scales = torch.randint(4, 247, (experts, 2 * inner, hidden // 32), dtype=torch.uint8)
weight = poisoned(experts, 2 * inner, hidden, dtype=torch.bfloat16)
grid = (triton.cdiv(scales.numel(), 128),)
kernels._dequantize_kernel[grid](blocks.flatten(), scales.flatten(), weight, scales.numel(), GROUPS=128)
assert torch.equal(weight, kernels.unpack(pack(blocks), pack(scales), hidden, torch.bfloat16))

slots = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(tokens)]).flatten()  # the last expert gets no token
chosen, order = slots.sort(stable=True)
place = torch.empty_like(order)
place[order] = torch.arange(rows)
gate_up, bias = torch.randn(rows, 2 * inner) * 4, torch.randn(experts, 2 * inner)
activated = poisoned(rows, inner)
kernels._activate_kernel[(rows, 2)](gate_up, bias, chosen, activated, inner, 7.0, kernels.ALPHA, COLUMNS=32)
torch.testing.assert_close(activated, kernels.activate(gate_up, bias, chosen, 7.0))

grad, weights = torch.randn(rows, inner), torch.rand(rows)
gate_up_grad, weight_grad = poisoned(rows, 2 * inner), poisoned(rows)
kernels._activate_backward_kernel[(rows,)](
    grad, gate_up, bias, chosen, weights, gate_up_grad, weight_grad, inner, 7.0, kernels.ALPHA, COLUMNS=32
)
expected, expected_weight_grad = kernels.activate_backward(grad, gate_up, bias, chosen, weights, 7.0)
torch.testing.assert_close(gate_up_grad, expected)
torch.testing.assert_close(weight_grad, expected_weight_grad, rtol=1e-4, atol=1e-4)

routed = [torch.full((size,), -1, dtype=kind) for size, kind in ((rows, torch.int64),) * 3 + ((experts, torch.int32),)]
kernels._route_kernel[(1,)](slots, *routed, rows, experts, ROWS=64, EXPERTS=4, CHUNK=16)
for mine, expected in zip(routed, kernels.route(slots, experts), strict=True):
    assert torch.equal(mine, expected)

packed = torch.randint(0, 256, (experts, 70, hidden // 32, 16), dtype=torch.uint8)
powers = torch.randint(110, 130, (experts, 70, hidden // 32), dtype=torch.uint8)
wide, fused_out, ends = torch.randn(rows, hidden), poisoned(rows, 70), kernels.route(slots, experts)[3]
words = pack(packed).view(torch.int32)
for tile_rows in (16, 64):
    fused._fused_kernel[(2, experts)](
        fused.as_unpacked(wide), words, powers, fused_out, ends, 70, hidden, M=tile_rows, N=64, K=128, PAIRS=False
    )
    expected = kernels.grouped_mm(wide, kernels.unpack(pack(packed), pack(powers), hidden, torch.float32).mT, ends)
    torch.testing.assert_close(fused_out, expected, rtol=1e-4, atol=1e-3)

x, dispatched = torch.randn(tokens, hidden), poisoned(rows, hidden)
kernels._dispatch_kernel[(tokens, 2)](x, place, dispatched, hidden, K=k, COLUMNS=64)
assert torch.equal(dispatched, x[order // k])
assert torch.equal(dispatched, kernels.dispatch(x, place, k))

values, down_bias = torch.randn(rows, hidden), torch.randn(experts, hidden)
for on in (True, False):
    combined = poisoned(tokens, hidden)
    kernels._combine_kernel[(tokens, 2)](
        values, place, weights, down_bias, slots, combined, hidden, K=k, WEIGHTED=on, BIASED=on, COLUMNS=64
    )
    options = (weights, down_bias, slots) if on else (None, None, None)
    torch.testing.assert_close(combined, kernels.combine(values, place, k, *options))

for differentiable in (True, False):
    logits, targets = torch.randn(7, 301) * 5, torch.randint(301, (7,))
    expected_logits, sums = logits.clone(), poisoned(7, 3)
    expected_sums = loss._logits_to_gradient(expected_logits, targets, differentiable)
    loss._cross_entropy_kernel[(7,)](logits, targets, sums, 301, BACKWARD=differentiable, COLUMNS=64)
    torch.testing.assert_close(sums.sum(0), expected_sums, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)
"""

FUSED = """
import torch
from types import SimpleNamespace
from tests.benchmarks.training import fused
from tests.benchmarks.training.kernels import random_experts
from training.model.experts import Frozen, Routing
from training.model.kernels import grouped_mm

torch.manual_seed(0)
experts = random_experts(SimpleNamespace(num_local_experts=5, hidden_size=96, intermediate_size=160), "cpu")
indices = torch.stack([torch.randperm(4)[:2] for _ in range(150)])  # the last expert gets no token
indices[:, 0] = 0
offsets = Routing.of(indices, 5).offsets
up = Frozen(*(getattr(experts, f"gate_up_proj_{part}") for part in Frozen._fields))
dense = up.dense(96, torch.float32)
for transposed in (True, False):
    x = torch.randn(300, 96 if transposed else 320)
    found = fused.fused_mm(x, up, 96, offsets, transposed=transposed)
    torch.testing.assert_close(found, grouped_mm(x, dense.mT if transposed else dense, offsets), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize("program", [PROGRAM, FUSED], ids=["training", "candidate"])
@pytest.mark.skipif(find_spec("triton") is None, reason="torch's CPU build comes without triton")
def test_kernels_equal_their_torch_definitions(program: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported
    outcome = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert outcome.returncode == 0, outcome.stderr[-2000:]
