"""Packing: bins are full and lose nothing, and no document sees another, under our masks only."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from training.model.attention import Window
from training.model.load import load
from training.rows.batches import Collator
from training.rows.packing import _masks, install_masks, pack

Example = dict[str, list[int]]


def examples(*lengths: int) -> list[Example]:
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, 500, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in rows]


class TestBins:
    def test_every_token_once_and_no_bin_overfull(self) -> None:
        rows = examples(*(torch.randint(2, 64, (200,), generator=torch.Generator().manual_seed(1)).tolist()))
        packed = pack(rows, 64)
        assert max(len(item["input_ids"]) for item in packed) <= 64
        assert sum(item["position_ids"].count(0) for item in packed) == len(rows)
        expected = sorted(token for row in rows for token in row["input_ids"])
        assert sorted(token for item in packed for token in item["input_ids"]) == expected

    def test_best_fit_decreasing_fills_what_it_can(self) -> None:
        assert [len(item["input_ids"]) for item in pack(examples(6, 4, 5, 5, 3, 7), 10)] == [10, 10, 10]

    def test_labels_of_a_rows_first_token_are_not_trained(self) -> None:
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
        (packed,) = pack(rows, 8)
        assert packed["labels"] == [-100, 2, 3, -100, 5]
        assert packed["position_ids"] == [0, 1, 2, 0, 1]

    def test_deterministic(self) -> None:
        rows = examples(9, 3, 3, 4, 8, 2)
        assert pack(rows, 12) == pack(rows, 12)

    def test_a_row_as_long_as_a_bin(self) -> None:
        assert [len(item["input_ids"]) for item in pack(examples(8, 8, 2), 8)] == [8, 8, 2]


@pytest.fixture(scope="module")
def model(random_base: Path) -> PreTrainedModel:
    """With a sliding window of 8, so that both kinds of mask matter."""
    model = load(random_base)
    model.config.sliding_window = 8
    install_masks(model.get_decoder(), packed=True)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, *batch: Example) -> torch.Tensor:
    inputs = Collator(0)(batch)
    return model(**{key: value for key, value in inputs.items() if key != "labels"}).logits


def test_each_row_has_the_logits_it_has_alone(model: PreTrainedModel) -> None:
    rows = examples(20, 13, 31)
    (packed,) = pack(rows, 64)
    together = logits(model, packed)[0].split([20, 13, 31])
    for row, of_row in zip(rows, together, strict=True):
        alone = logits(model, row | {"position_ids": list(range(len(row["input_ids"])))})[0]
        assert (of_row - alone).abs().max() < 1e-4


def test_each_row_has_the_loss_it_has_alone(model: PreTrainedModel) -> None:
    rows = examples(20, 13, 31)
    (packed,) = pack(rows, 64)
    start = 0
    packed_logits = logits(model, packed)[0]
    for row in rows:
        size = len(row["input_ids"])
        target = torch.tensor(row["labels"][1:])
        inside = cross_entropy(packed_logits[start : start + size - 1], target)
        alone = cross_entropy(logits(model, row)[0, :-1], target)
        assert inside.item() == pytest.approx(alone.item(), abs=1e-4)
        start += size


def test_changing_one_document_leaves_the_others_alone(model: PreTrainedModel) -> None:
    rows = examples(20, 24)
    (packed,) = pack(rows, 64)
    (changed,) = pack([{"input_ids": [9] * 20, "labels": [9] * 20}, rows[1]], 64)
    # not bit for bit: other tokens share the experts' matrix products
    assert (logits(model, packed)[0, 20:] - logits(model, changed)[0, 20:]).abs().max() < 1e-5
    assert not torch.allclose(logits(model, packed)[0, :20], logits(model, changed)[0, :20])


def test_padding_after_packed_rows_changes_nothing(model: PreTrainedModel) -> None:
    (short,), (long,) = pack(examples(10, 8), 18), pack(examples(30, 20), 50)
    both = logits(model, short, long)
    assert (both[0, :18] - logits(model, short)[0]).abs().max() < 1e-4


def test_without_our_masks_transformers_leaks(random_base: Path) -> None:
    """Why `install_masks` exists: if this fails, transformers masks documents itself and the hook can go."""
    plain = load(random_base)
    rows = examples(20, 24)
    (packed,) = pack(rows, 64)
    (changed,) = pack([{"input_ids": [9] * 20, "labels": [9] * 20}, rows[1]], 64)
    assert not torch.allclose(logits(plain, packed)[0, 20:], logits(plain, changed)[0, 20:], atol=1e-3)


def test_unpacked_masks_equal_transformers_own(random_base: Path) -> None:
    rows = examples(20, 13)
    plain, hooked = load(random_base), load(random_base)
    for each in (plain, hooked):
        each.config.sliding_window = 8
    install_masks(hooked.get_decoder(), packed=False)
    ours, theirs = logits(hooked, *rows), logits(plain, *rows)
    assert (ours[0] - theirs[0]).abs().max() < 1e-5
    assert (ours[1, :13] - theirs[1, :13]).abs().max() < 1e-5  # beyond lies padding


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_sees_what_its_mask_does(packed: bool) -> None:
    begins = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1, 1, 0]])
    documents = begins.cumsum(-1) if packed else None
    of = (10, 4, True, torch.bfloat16, torch.device("cpu"), documents)
    window = _masks(*of, bare=True)["sliding_attention"]
    assert isinstance(window, Window)
    position = torch.arange(10)
    oldest = (position - window.width + 1).expand(2, -1)
    if packed:
        oldest = torch.maximum(oldest, window.starts)
    seen = (position <= position[:, None]) & (position >= oldest[..., None])
    masked = _masks(10, 4, False, *of[3:])["sliding_attention"] != 0
    assert torch.equal(~seen, masked[:, 0].expand(2, -1, -1))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 8}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_rows_of_other_models_are_kept_apart_too(family: str, more: dict[str, Any]) -> None:
    """Those whose layers are of named kinds, and those with one mask for all."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 500, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = AutoConfig.for_model(family, **(sizes | heads | more))
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = copy.deepcopy(plain)
    install_masks(model.get_decoder(), packed=True)
    rows = examples(20, 13, 31)
    (packed,) = pack(rows, 64)
    for row, together in zip(rows, logits(model, packed)[0].split([20, 13, 31]), strict=True):
        assert (together - logits(plain, row)[0]).abs().max() < 1e-4
