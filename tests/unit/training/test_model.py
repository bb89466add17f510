"""Loading is strict: each weight is there, of its shape, in the asked form; and equals what transformers loads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.training import adapters
from tests.unit.training.runs import dequantised
from training.errors import ModelError
from training.model import load as model_module
from training.model.experts import DenseExperts, PackedExperts
from training.model.load import decoder_layers, load
from training.model.weights import InexactError

IDS = torch.arange(40).view(2, 20) * 11 % 500


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize(("weights", "experts"), [("mxfp4", None), ("bf16", None), ("bf16", "frozen")])
def test_equals_plain_transformers(random_base: Path, weights: Any, experts: Any) -> None:
    model = load(random_base, weights=weights, experts=experts)
    assert (logits(model) - logits(adapters.load(random_base))).abs().max() < 1e-4
    assert all(not value.requires_grad for value in model.parameters())
    assert not model.training


def test_bf16_is_bf16(random_base: Path) -> None:
    model = load(random_base, precision="bf16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_packed_experts_are_used_when_asked_for(random_base: Path) -> None:
    packed = [isinstance(layer.mlp.experts, PackedExperts) for layer in load(random_base, weights="mxfp4").model.layers]
    assert packed == [True, True]


def test_nothing_is_left_without_storage(random_base: Path) -> None:
    for weights in ("mxfp4", "bf16"):
        model = load(random_base, weights=weights)  # type: ignore[arg-type]
        assert not [name for name, value in model.named_parameters() if value.is_meta]
        assert not [name for name, value in model.named_buffers() if value.is_meta]


def copy_with(base: Path, out: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of `base` in one file, its tensors passed through `change`."""
    for file in base.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            (out / file.name).write_bytes(file.read_bytes())
    state = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file(change(state), out / "model.safetensors", metadata={"format": "pt"})
    return out


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: value for key, value in state.items() if key != name}


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.sinks", BLOCKS, BLOCKS.replace("blocks", "scales")])
def test_a_missing_weight_is_named(random_base: Path, tmp_path: Path, name: str, weights: str) -> None:
    directory = copy_with(random_base, tmp_path, without(name))
    with pytest.raises(ModelError, match=name.removesuffix("_blocks").removesuffix("_scales")):
        load(directory, weights=weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
def test_an_unexpected_weight_is_named(random_base: Path, tmp_path: Path, weights: str) -> None:
    directory = copy_with(random_base, tmp_path, lambda state: state | {"model.layers.2.extra": torch.ones(1)})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.extra"):
        load(directory, weights=weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", ["mxfp4", "bf16"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", BLOCKS])
def test_a_misshapen_weight_is_named(random_base: Path, tmp_path: Path, name: str, weights: str) -> None:
    directory = copy_with(random_base, tmp_path, lambda state: state | {name: state[name][:-1].contiguous()})
    with pytest.raises(ModelError, match=name.removesuffix("_blocks")):
        load(directory, weights=weights)  # type: ignore[arg-type]


def test_a_dequantised_checkpoint_is_packed_again_exactly(random_base: Path, tmp_path: Path) -> None:
    again = load(dequantised(random_base, tmp_path / "bf16"), weights="mxfp4")
    assert isinstance(again.model.layers[0].mlp.experts, PackedExperts)
    assert torch.equal(logits(again), logits(load(random_base, weights="mxfp4")))


def test_frozen_experts_take_values_that_mxfp4_does_not_have(random_base: Path, tmp_path: Path) -> None:
    base = dequantised(random_base, tmp_path / "bf16", change=0.01)
    frozen = load(base, experts="frozen")
    assert isinstance(frozen.model.layers[0].mlp.experts, DenseExperts)
    assert (logits(frozen) - logits(load(base))).abs().max() < 1e-4


def test_values_that_mxfp4_does_not_have_are_not_packed(random_base: Path, tmp_path: Path) -> None:
    with pytest.raises(InexactError, match=r"layers\.1.*down_proj") as caught:
        load(dequantised(random_base, tmp_path / "bf16", change=0.01), weights="mxfp4")
    assert caught.value.field == "weights"


def test_dequantised_experts_that_are_absent_are_never_random(random_base: Path, tmp_path: Path) -> None:
    """A packed checkpoint that lost its experts: transformers alone would fill them with random values."""
    directory = copy_with(
        random_base, tmp_path, lambda state: {k: v for k, v in state.items() if not k.endswith(("_blocks", "_scales"))}
    )
    with pytest.raises(ModelError, match="experts"):
        load(directory, weights="bf16")


def test_an_attention_backend_that_was_swapped_is_refused(random_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = model_module._skeleton
    monkeypatch.setattr(model_module, "_skeleton", lambda config, attention, *rest: skeleton(config, "eager", *rest))
    with pytest.raises(ModelError) as caught:
        load(random_base, attention="flex_attention")
    assert caught.value.field == "attention"


class TestAnotherArchitecture:
    @pytest.fixture
    def llama(self, tmp_path: Path) -> Path:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        return tmp_path

    def test_loads_and_has_layers(self, llama: Path) -> None:
        model = load(llama)
        assert len(decoder_layers(model)) == 2
        plain = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32, attn_implementation="eager").eval()
        assert torch.equal(logits(model), logits(plain))

    def test_it_has_no_experts_to_pack(self, llama: Path) -> None:
        with pytest.raises(InexactError):
            load(llama, weights="mxfp4")

    def test_a_missing_weight_is_an_error(self, llama: Path) -> None:
        state = load_file(llama / "model.safetensors")
        del state["model.layers.1.mlp.up_proj.weight"]
        save_file(state, llama / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="up_proj"):
            load(llama)
