"""The adapter: every target in every layer or an error, saved and loaded whole, and readable by PEFT."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.config import LoraConfig
from training.errors import ConfigError, ModelError
from training.model.load import decoder_layers, load
from training.model.lora import WEIGHTS_FILE, adapter_state, attach, load_adapter, save_adapter

ATTENTION = LoraConfig(r=4, alpha=8)


def fill(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        if value.requires_grad:
            value.data = torch.randn(value.shape, generator=generator)


@pytest.mark.parametrize("targets", ["attention", "all-linear", ["q_proj", "v_proj"]])
def test_every_layer_is_adapted_in_fp32_and_only_the_adapter_trains(
    random_base: Path, targets: str | list[str]
) -> None:
    model = attach(load(random_base, precision="bf16"), LoraConfig(r=4, targets=targets), "org/base")  # type: ignore[arg-type]
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert all("lora_" in name and value.dtype == torch.float32 for name, value in trained.items())
    assert len(trained) == 2 * 2 * (4 if isinstance(targets, str) else 2)  # A and B, in 2 layers, of each target


@pytest.mark.parametrize("weights", ["bf16", "mxfp4"])
def test_expert_adapters_reach_the_experts(random_base: Path, weights: Literal["bf16", "mxfp4"]) -> None:
    model = attach(load(random_base, weights=weights), LoraConfig(r=4, targets="attention+experts"), "org/base")
    names = [name for name, value in model.named_parameters() if value.requires_grad and ".experts." in name]
    assert len(names) == 2 * 2 * 2  # A and B, in 2 layers, of gate_up and down


@pytest.mark.parametrize("targets", [["q_proj", "gate_up_proj"], ["q_prj"], ["q_proj", "experts"]])
def test_a_target_that_is_no_module_is_refused(random_base: Path, targets: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        attach(load(random_base), LoraConfig(targets=targets), "org/base")
    assert caught.value.field == "lora.targets"
    assert targets[-1] in caught.value.message


def test_a_target_missing_in_one_layer_is_refused(random_base: Path) -> None:
    model = load(random_base)
    layer = decoder_layers(model)[1]
    layer.self_attn.value = layer.self_attn.v_proj  # type: ignore[union-attr]
    del layer.self_attn.v_proj  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"layer 1 has no v_proj") as caught:
        attach(model, ATTENTION, "org/base")
    assert "q_proj" in caught.value.hint


def test_saved_and_loaded_whole(random_base: Path, tmp_path: Path) -> None:
    model = attach(load(random_base), ATTENTION, "org/base")
    fill(model)
    save_adapter(model, tmp_path)
    other = attach(load(random_base), ATTENTION, "org/base")
    load_adapter(other, tmp_path)
    ours, theirs = adapter_state(model), adapter_state(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_peft_reads_what_is_saved(random_base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = attach(load(random_base), ATTENTION, "org/base").eval()
    fill(model)
    save_adapter(model, tmp_path)
    record = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (record["base_model_name_or_path"], record["r"], record["lora_alpha"]) == ("org/base", 4, 8)
    assert record["inference_mode"] is True
    ids = torch.arange(20)[None]
    again = PeftModel.from_pretrained(load(random_base), str(tmp_path)).eval()
    assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)


def break_state(directory: Path, kind: str) -> None:
    state = load_file(directory / WEIGHTS_FILE)
    first = sorted(state)[0]
    value = state.pop(first)
    if kind == "renamed":
        state[first + "x"] = value
    elif kind == "misshapen":
        state[first] = value[:1].contiguous()
    save_file(state, directory / WEIGHTS_FILE)


@pytest.mark.parametrize("kind", ["missing", "renamed", "misshapen"])
def test_an_adapter_that_does_not_fit_is_refused(random_base: Path, tmp_path: Path, kind: str) -> None:
    model = attach(load(random_base), ATTENTION, "org/base")
    save_adapter(model, tmp_path)
    break_state(tmp_path, kind)
    with pytest.raises(ModelError):
        load_adapter(model, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_is_not_saved(random_base: Path, tmp_path: Path, value: float) -> None:
    model = attach(load(random_base), ATTENTION, "org/base")
    next(p for p in model.parameters() if p.requires_grad).data[0, 0] = value
    with pytest.raises(ModelError, match="not finite"):
        save_adapter(model, tmp_path)
    assert not (tmp_path / WEIGHTS_FILE).exists()
