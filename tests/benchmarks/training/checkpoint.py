"""Checkpoints of gpt-oss's true shapes with random weights, in the files' own layout, and rows to train on."""

import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.config import TrainConfig
from training.rows.packing import Example, pack
from training.run_dir import RunDir, write_json

_GPT_OSS = {
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "sliding_window": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "tiny": {"num_hidden_layers": 2, "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 64},
}
"""`tiny` is for trying the bench itself, on a CPU."""

_ROW_TOKENS = (6.94, 0.45)
"""Mean and deviation of the logarithm of a row's tokens: median 1,030, 5 % over 2,048, as in Multilingual-Thinking."""


def write_random_base(
    directory: Path, shape: str, layers: int | None = None, *, weights: bool = True
) -> dict[str, Any]:
    """Writes a checkpoint, one shard a layer; its small tokenizer serves no purpose but its pad token.

    Args:
        layers: fewer than the real model's.
        weights: without them, only configuration and tokenizer are written.

    Returns:
        Its `config.json`.
    """
    from safetensors.torch import save_file

    from training.tiny.base import build_tokenizer, chat_template, model_config, shapes, write_checkpoint

    tokenizer = build_tokenizer([chat_template()], vocab_size=512)
    write_checkpoint(directory, tokenizer)  # for the tokenizer's files
    for shard in directory.glob("*.safetensors*"):
        shard.unlink()
    sizes = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(sizes["num_hidden_layers"])]
    config = model_config(tokenizer, **sizes, layer_types=kinds)
    write_json(directory / "config.json", config)
    if not weights:
        return config
    files: dict[str, str] = {}
    for part, members in groupby(shapes(config).items(), key=lambda item: _layer(item[0])):
        tensors = {name: value.cpu() for item in members for name, value in _random(*item)}
        file = f"model-{part}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})
    return config


def write_rows(run_dir: RunDir, config: TrainConfig, vocab: int, *, real_lengths: bool) -> None:
    """Rows of random tokens, enough for a step: full ones, or of the data set's lengths and packed."""
    import datasets

    draw = random.Random(0)
    length, count = config.data.max_length, config.optim.global_batch_size
    if real_lengths:
        sizes = (min(length, max(16, round(draw.lognormvariate(*_ROW_TOKENS)))) for _ in range(3 * count))
        examples = pack([_example(draw, size, vocab) for size in sizes], length)[:count]
    else:
        examples = random_rows(count, length, vocab)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(examples).save_to_disk(str(run_dir.data))


def random_rows(count: int, length: int, vocab: int) -> list[Example]:
    """Rows of `length` random tokens, all of them trained."""
    draw = random.Random(1)
    return [_example(draw, length, vocab) for _ in range(count)]


def _example(draw: random.Random, size: int, vocab: int) -> Example:
    tokens = [draw.randrange(vocab // 2, vocab) for _ in range(size)]
    return {"input_ids": tokens, "labels": tokens}


def _layer(name: str) -> str:
    parts = name.split(".")
    return f"layer-{int(parts[2]):02}" if parts[1] == "layers" else name


def _random(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name.endswith(("gate_up_proj", "down_proj")):
        experts, columns, rows = shape
        byte: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        yield f"{name}_blocks", torch.randint(0, 256, (experts, rows, columns // 32, 16), **byte)
        yield f"{name}_scales", torch.randint(117, 121, (experts, rows, columns // 32), **byte)
    elif name.endswith("norm.weight"):
        yield name, torch.ones(shape, dtype=torch.bfloat16, device=device)
    else:
        yield name, torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
