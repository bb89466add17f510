"""The chunked cross-entropy against torch's, whole models against transformers' own loss."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as reference

from training.config import LoraConfig
from training.model import loss as module
from training.model.load import load
from training.model.lora import attach
from training.model.loss import Sums, cross_entropy, has_plain_head, install_loss, trained_positions

TOKENS, HIDDEN, VOCAB = 23, 16, 97


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_TOKENS", 5)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    positions = torch.randperm(TOKENS, generator=generator)[:13].sort().values
    return hidden, head, positions, torch.randint(VOCAB, (13,), generator=generator)


def test_sums_and_gradient_are_those_of_whole_logits() -> None:
    hidden, head, positions, targets = inputs()
    sums = cross_entropy(hidden, head, positions, targets)
    (3.5 * sums.loss).backward()
    ours, hidden.grad = hidden.grad, None
    logits = hidden[positions] @ head.T
    expected = reference(logits, targets, reduction="sum")
    (3.5 * expected).backward()
    assert ours is not None
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(ours, hidden.grad)
    torch.testing.assert_close(sums.entropy, torch.distributions.Categorical(logits=logits).entropy().sum())
    assert sums.correct == (logits.argmax(-1) == targets).sum()
    assert not sums.entropy.requires_grad


def test_nothing_trained_is_zero_and_has_a_gradient() -> None:
    hidden, head, _, _ = inputs()
    sums = cross_entropy(hidden, head, torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
    sums.loss.backward()
    assert sums.loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = module._logits_to_gradient
    monkeypatch.setattr(module, "_logits_to_gradient", lambda *a: seen.append(len(a[0])) or inner(*a))
    cross_entropy(*inputs())
    assert seen == [5, 5, 3]


def test_positions_are_those_before_trained_tokens() -> None:
    labels = torch.tensor([[-100, 4, 5, -100], [7, -100, -100, 9]])
    assert trained_positions(labels).tolist() == [0, 1, 6]


def test_the_models_own_loss_and_its_adapters_gradients(random_base: Path) -> None:
    ids = torch.arange(60).view(2, 30) * 7 % 500
    labels = ids.masked_fill(ids % 3 == 0, -100)
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = attach(load(random_base), LoraConfig(r=4), "base")
        assert has_plain_head(model.get_base_model())
        install_loss(model.get_base_model())
        positions = trained_positions(labels)
        if ours:
            sums = model(input_ids=ids, labels=labels, trained=positions, use_cache=False)
            assert isinstance(sums, Sums)
            loss = sums.loss / len(positions)
        else:
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1].keys() == found[0][1].keys()
    for name, expected in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], expected, rtol=1e-4, atol=1e-7)


def test_generation_is_as_it_was(random_base: Path) -> None:
    ids = torch.arange(10)[None]
    plain, patched = load(random_base), load(random_base)
    install_loss(patched)
    expected = plain.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(patched.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_other_heads_are_left_to_the_library(random_base: Path) -> None:
    model = load(random_base)
    model.config.final_logit_softcapping = 30.0
    assert not has_plain_head(model)
    del model.config.final_logit_softcapping
    model.lm_head = nn.Linear(64, 512, bias=True)
    assert not has_plain_head(model)
