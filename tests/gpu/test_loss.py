"""The chunked cross-entropy at gpt-oss's vocabulary against float32 logits."""

import pytest
import torch

from tests.gpu.shapes import DEVICE, ON_GPU, SIZES, error, marks, poison
from training.model.loss import CHUNK_TOKENS, cross_entropy

pytestmark = marks


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(tokens, SIZES.hidden_size, device=DEVICE).bfloat16()
    head = (0.05 * torch.randn(SIZES.vocab_size, SIZES.hidden_size, device=DEVICE)).bfloat16()
    positions = torch.randperm(tokens, device=DEVICE)[: max(1, 2 * tokens // 3)].sort().values
    return hidden, head, positions, torch.randint(SIZES.vocab_size, (len(positions),), device=DEVICE)


@pytest.mark.parametrize("tokens", [1, 100, 2 * CHUNK_TOKENS + 13])
def test_sums_and_gradient(tokens: int) -> None:
    hidden, head, positions, targets = inputs(tokens)
    ours, exact = hidden.clone().requires_grad_(), hidden.float().requires_grad_()
    poison()
    sums = cross_entropy(ours, head, positions, targets)
    sums.loss.backward()
    logits = exact[positions] @ head.float().T
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    p = logits.detach().softmax(-1)
    assert error(sums.loss, expected) < 1e-3
    assert error(sums.entropy, -(p * p.clamp_min(1e-30).log()).sum()) < 1e-3
    assert error(ours.grad, exact.grad) < 1e-2
    # logits in bf16 may tie with the largest
    assert abs(sums.correct.item() - (logits.argmax(-1) == targets).sum().item()) <= 2


@pytest.mark.skipif(not ON_GPU, reason="counts a GPU's memory")
def test_logits_never_exist_whole() -> None:
    hidden, head, positions, targets = inputs(16 * CHUNK_TOKENS)
    hidden.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy(hidden, head, positions, targets).loss.backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 1.1 * CHUNK_TOKENS * SIZES.vocab_size * 2 + 4 * hidden.nbytes
