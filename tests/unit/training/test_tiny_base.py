"""The small checkpoint has the real one's layout, is the same every time, and loads whole."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from training.tiny.base import CONTROL_TOKENS, build_tokenizer, model_config, random_state, write_checkpoint

REAL = Path(__file__).resolve().parents[4] / "shared" / "data" / "gpt-oss-20b"

LAYER = {
    "input_layernorm.weight": "bf16 H",
    "self_attn.q_proj.weight": "bf16 Q,H",
    "self_attn.q_proj.bias": "bf16 Q",
    "self_attn.k_proj.weight": "bf16 K,H",
    "self_attn.k_proj.bias": "bf16 K",
    "self_attn.v_proj.weight": "bf16 K,H",
    "self_attn.v_proj.bias": "bf16 K",
    "self_attn.o_proj.weight": "bf16 H,Q",
    "self_attn.o_proj.bias": "bf16 H",
    "self_attn.sinks": "bf16 heads",
    "post_attention_layernorm.weight": "bf16 H",
    "mlp.router.weight": "bf16 E,H",
    "mlp.router.bias": "bf16 E",
    "mlp.experts.gate_up_proj_blocks": "u8 E,2I,H/32,16",
    "mlp.experts.gate_up_proj_scales": "u8 E,2I,H/32",
    "mlp.experts.gate_up_proj_bias": "bf16 E,2I",
    "mlp.experts.down_proj_blocks": "u8 E,H,I/32,16",
    "mlp.experts.down_proj_scales": "u8 E,H,I/32",
    "mlp.experts.down_proj_bias": "bf16 E,H",
}
"""gpt-oss-20b's tensors of one layer."""

OUTSIDE = {"model.embed_tokens.weight": "bf16 V,H", "model.norm.weight": "bf16 H", "lm_head.weight": "bf16 V,H"}


def read(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def described(tensor: torch.Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.uint8: "u8"}[tensor.dtype] + f" {list(tensor.shape)}"


def expected(form: str, config: dict[str, int]) -> str:
    sizes = {
        "H": config["hidden_size"],
        "I": config["intermediate_size"],
        "E": config["num_local_experts"],
        "V": config["vocab_size"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "heads": config["num_attention_heads"],
        "16": 16,
    }
    sizes |= {"2I": 2 * sizes["I"], "H/32": sizes["H"] // 32, "I/32": sizes["I"] // 32}
    dtype, names = form.split()
    return f"{dtype} {[sizes[name] for name in names.split(',')]}"


def test_every_tensor_has_the_real_name_shape_and_type(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(["eins zwei drei"], 512)
    # Every size differs, so that no two axes can be swapped unseen.
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3, "num_hidden_layers": 3}
    directory = write_checkpoint(tmp_path, tokenizer, **sizes)
    config = json.loads((directory / "config.json").read_text())
    forms = OUTSIDE | {f"model.layers.{i}.{name}": form for i in range(3) for name, form in LAYER.items()}
    found = {name: described(tensor) for name, tensor in read(directory).items()}
    assert found == {name: expected(form, config) for name, form in forms.items()}


def test_index_names_the_shard_of_every_tensor(random_base: Path) -> None:
    index = json.loads((random_base / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2
    by_shard = defaultdict(set)
    for name, shard in index["weight_map"].items():
        by_shard[shard].add(name)
    for shard, names in by_shard.items():
        with safe_open(random_base / shard, "pt") as file:
            assert set(file.keys()) == names
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(random_base).values())


@pytest.mark.skipif(not REAL.exists(), reason="the real model's files are not here")
def test_names_and_config_keys_are_the_real_models(random_base: Path) -> None:
    def without_layer(path: Path) -> set[str]:
        names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        return {re.sub(r"layers\.\d+", "layers.N", name) for name in names}

    def config(path: Path) -> dict[str, object]:
        return json.loads((path / "config.json").read_text())

    assert without_layer(random_base) == without_layer(REAL)
    ours, real = config(random_base), config(REAL)
    assert set(ours) - set(real) == {"dtype", "rope_parameters"}
    assert set(real) - set(ours) == {"transformers_version"}
    sizes = {
        "eos_token_id", "experts_per_token", "hidden_size", "intermediate_size", "layer_types", "num_attention_heads",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts", "pad_token_id", "vocab_size",
    }  # fmt: skip
    assert {key for key in real.keys() & ours.keys() if ours[key] != real[key]} == sizes | {"initializer_range"}
    assert (random_base / "chat_template.jinja").read_bytes() == (REAL / "chat_template.jinja").read_bytes()


def test_plain_transformers_loads_it_whole_and_generates(random_base: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(
        random_base,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not any(report.values())
    tokenizer = AutoTokenizer.from_pretrained(random_base)
    stops = {tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")}
    assert set(model.generation_config.eos_token_id) == stops
    assert model.config.rope_parameters["rope_theta"] == 150000
    assert model.config.rope_parameters["rope_type"] == "yarn"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "¿Qué día es?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > prompt["input_ids"].shape[1]


def test_a_state_is_kept_up_to_mxfp4_and_bf16(tmp_path: Path) -> None:
    tokenizer = build_tokenizer([], 512)
    config = model_config(tokenizer)
    state = random_state(config, seed=3)
    directory = write_checkpoint(tmp_path, tokenizer, state=state)
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    for name, weight in state.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            # The worst of MXFP4: a block's largest may be 8 times its scale, and is held as 6 times it.
            assert (loaded[name] - weight).abs().max() <= weight.abs().max() / 4
            assert torch.corrcoef(torch.stack((loaded[name].flatten(), weight.flatten())))[0, 1] > 0.99
        else:
            assert torch.equal(loaded[name], weight.to(torch.bfloat16).float())


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    texts = ["Der Schnee ist weiß.", "La nieve es blanca.", "La neige est blanche."]
    first, second, other = (
        write_checkpoint(tmp_path / name, build_tokenizer(texts, 300), seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    assert any(path.read_bytes() != (other / path.name).read_bytes() for path in first.glob("*.safetensors"))


def test_control_tokens_are_single_ids_and_text_round_trips() -> None:
    tokenizer = build_tokenizer(["Grüße aus Köln, ¿qué tal?"], 512)
    assert [len(tokenizer.encode(token).ids) for token in CONTROL_TOKENS] == [1] * len(CONTROL_TOKENS)
    text = "Grüße, 1234 Äpfel!\n\tпривет 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
