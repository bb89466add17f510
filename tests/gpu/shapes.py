"""Where these tests run and at which sizes: gpt-oss-20b's on CUDA; small ones on a CPU, to try the tests themselves.

`POLYTHINK_GPU_TESTS_ON=cpu pytest -m gpu tests/gpu` is that trial; it proves nothing about a GPU.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.benchmarks.training import kernels as benched
from training.model.experts import PackedExperts

DEVICE = os.environ.get("POLYTHINK_GPU_TESTS_ON", "cuda")
ON_GPU = DEVICE == "cuda"
SIZES = (
    SimpleNamespace(num_local_experts=32, hidden_size=2880, intermediate_size=2880, vocab_size=201_088)
    if ON_GPU
    else SimpleNamespace(num_local_experts=6, hidden_size=96, intermediate_size=64, vocab_size=512)
)
marks = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # compilers warn of what differs between cards and versions
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def poison() -> None:
    """Leaves NaN in the memory that the allocator gives next: what a kernel does not write shows."""
    if ON_GPU:
        for size in (2**20, 2**26, 2**30, 2**31):
            torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF)


def random_experts(scale: float = 0.5) -> PackedExperts:
    """A packed layer of random bytes."""
    return benched.random_experts(SIZES, DEVICE, scales=(118, 122), bias_std=scale)


def routed(tokens: int, only: int | None = None, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and a choice among the first `only` experts with its weights."""
    hidden = torch.randn(tokens, SIZES.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    scores = torch.randn(tokens, only or SIZES.num_local_experts, device=DEVICE)
    weights, indices = scores.topk(k, dim=-1)
    return hidden, indices, weights.softmax(-1).to(torch.bfloat16)


def error(value: Tensor, expected: Tensor) -> float:
    """Relative, of the whole tensor; not finite where anything is."""
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()
