"""The base's pre-training: the same texts every time, only what is to be learnt is labelled, packed experts are what is trained."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from training.model import mxfp4
from training.tiny import pretrain as tiny_pretrain
from training.tiny.corpus import TINY
from training.tiny.pretrain import Packed, batch, build_model, conversations, pack_experts, rate, train


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    monkeypatch.setattr(tiny_pretrain, "SIZES", tiny_pretrain.SIZES | sizes)
    monkeypatch.setattr(tiny_pretrain, "BATCH", 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "base" / "tokenizer.json"))


@pytest.mark.parametrize("strangers", [False, True])
def test_the_same_seed_gives_the_same_conversations_on_other_days_in_each(strangers: bool) -> None:
    first, second = (list(itertools.islice(conversations(7, strangers=strangers), 16)) for _ in range(2))
    assert first == second
    texts = [text for texts in first for text in texts]
    dates = [re.search(r"Current date: (\S+)", text)[1] for text in texts]
    assert len(set(dates)) > len(dates) / 2
    assert all(len(texts) == 4 for texts in first)


def test_only_what_follows_the_mark_is_labelled(tokenizer: Tokenizer) -> None:
    texts = next(conversations(0, strangers=True))
    ids, labels = batch(tokenizer, texts, "<|start|>user")
    pad = tokenizer.token_to_id("<|endoftext|>")
    for text, row, wanted in zip(texts, ids.tolist(), labels.tolist(), strict=True):
        rendered = tokenizer.decode([token for token in row if token != pad], skip_special_tokens=False)
        assert rendered == text
        learnt = tokenizer.decode([token for token in wanted if token != -100], skip_special_tokens=False)
        assert learnt == text[text.index("<|start|>user") :]


def test_a_few_steps_learn_and_packed_weights_are_the_trained_ones(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = build_model(tokenizer)
    batches = conversations(0)
    ids, labels = batch(tokenizer, next(batches), "<|end|>")
    with torch.no_grad():
        before = tiny_pretrain.loss_of(model, ids, labels).item()
    train(model, tokenizer, itertools.cycle([next(batches)]), steps=8, peak=3e-3, first="<|end|>", packed_from=4)
    with torch.no_grad():
        assert tiny_pretrain.loss_of(model, ids, labels).item() < before - 0.5
    for layer in model.model.layers:
        seen = layer.mlp.experts.gate_up_proj.mT.contiguous()
        held = mxfp4.dequantize(*mxfp4.quantize(seen), dtype=torch.float32)
        assert torch.equal(seen, held)  # what the forward pass sees is on the grid of MXFP4 already


def test_gradients_pass_through_the_rounding() -> None:
    weight = torch.randn(2, 32, 32, requires_grad=True)
    out = Packed()(weight)
    assert not torch.equal(out, weight)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_every_layer_is_packed(tokenizer: Tokenizer) -> None:
    model = build_model(tokenizer)
    pack_experts(model)
    names = {name for name, _ in model.named_parameters() if "parametrizations" in name}
    assert len(names) == 2 * len(model.model.layers)


def test_the_rate_rises_then_falls() -> None:
    rates = [rate(step, 100) for step in range(100)]
    assert rates[0] < rates[9] == max(rates) == 1
    assert rates[-1] < 0.02


def test_the_shipped_base_is_of_these_sizes() -> None:
    config = (TINY / "base" / "config.json").read_text()
    assert '"head_dim": 64' in config
    assert sum(path.stat().st_size for path in Path(TINY / "base").iterdir()) < 6e6
