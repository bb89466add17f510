"""A small, true gpt-oss checkpoint: the layout of OpenAI's files, with our own weights and tokenizer.

`write_checkpoint` writes what `openai/gpt-oss-20b` consists of, only smaller: MXFP4 blocks and scales for the experts, bf16
for the rest, sinks, sliding window, YaRN, the stop tokens, harmony's control tokens and OpenAI's chat template. Every
program that reads gpt-oss reads it. `training.tiny.pretrain` makes the one in `configs/tiny/base`.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from training.model import mxfp4

CONTROL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|endofprompt|>",
)
"""Harmony's, in the order of their ids in OpenAI's tokenizer; here they follow the ordinary tokens as well."""

STOP_TOKENS = ("<|return|>", "<|endoftext|>", "<|call|>")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

_SPECIAL = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}

_PACKED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from `texts`, with harmony's control tokens as its last ids.

    Args:
        texts: what to learn the merges from.
        vocab_size: tokens in all, at least 256 bytes and the control tokens; fewer when `texts` hold fewer merges.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


def chat_template() -> str:
    """OpenAI's template for gpt-oss (Apache-2.0), as TRL carries it: the one that TRL knows a training variant of."""
    return files("trl").joinpath("chat_templates/gptoss.jinja").read_text(encoding="utf-8")


def write_checkpoint(
    directory: Path,
    tokenizer: Tokenizer | Path,
    *,
    state: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Writes a gpt-oss checkpoint: configuration, weights in two shards or more with an index, tokenizer, template.

    Args:
        directory: made when missing; files in it are overwritten.
        tokenizer: one of ours, or a directory whose tokenizer files are copied.
        state: weights under transformers' names (experts `[E, in, out]`); None draws random ones from `seed`.
        seed: of the random weights.
        overrides: keys of `config.json` that differ from `model_config`'s.

    Returns:
        `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, Path):
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, directory / name)
        tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    else:
        _write_tokenizer(directory, tokenizer)
    config = model_config(tokenizer, **overrides)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": tokenizer.token_to_id(_SPECIAL["bos_token"]),
            "do_sample": True,
            "eos_token_id": [tokenizer.token_to_id(token) for token in STOP_TOKENS],
            "pad_token_id": config["pad_token_id"],
        },
    )
    _write_shards(directory, pack(random_state(config, seed) if state is None else state))
    return directory


def model_config(tokenizer: Tokenizer, **overrides: Any) -> dict[str, Any]:
    """The `config.json` of a small gpt-oss: the real one's keys and constants, with small sizes.

    Rope is written in both forms, `rope_theta` with `rope_scaling` and `rope_parameters`: a reader that knows only the other
    one would fall back to theta 10,000 without a word.
    """
    yarn = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    layers = overrides.get("num_hidden_layers", 2)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id("<|return|>"),
        "experts_per_token": 2,
        "head_dim": 64,  # vLLM serves 32, 64, 80 and up
        "hidden_act": "silu",
        "hidden_size": 64,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 64,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_parameters": {**yarn, "rope_theta": 150000},
        "rope_scaling": yarn,
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    return config | overrides


def random_state(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random weights under transformers' names, biases and sinks too, so that no term of the model is silently zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator) * config["initializer_range"]
        state[name] = 1 + noise if name.endswith("norm.weight") else noise
    return state


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every weight under transformers' names; those of the experts are `[E, in, out]`."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.sinks": (config["num_attention_heads"],),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    return {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        **{
            f"model.layers.{index}.{name}": shape
            for index in range(config["num_hidden_layers"])
            for name, shape in layer.items()
        },
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the checkpoint holds it: expert weights in MXFP4 along their input, everything else in bf16."""
    tensors = {}
    for name, weight in state.items():
        if _PACKED.search(name):
            blocks, scales = mxfp4.quantize(weight.detach().mT.contiguous())
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        else:
            tensors[name] = weight.detach().to(torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _write_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    total = sum(tensor.nbytes for tensor in tensors.values())
    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max(1, int(total * 0.6)))
    for filename, names in plan.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / filename, metadata={"format": "pt"})
        (directory / filename).chmod(0o644)  # safetensors makes it private
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in CONTROL_TOKENS
            },
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 131072,
            "tokenizer_class": "PreTrainedTokenizerFast",
            **_SPECIAL,
        },
    )
    _write_json(directory / "special_tokens_map.json", _SPECIAL)
    (directory / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
