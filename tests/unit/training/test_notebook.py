"""What a training function of one's own is told: blocks to wrap, parameters, connected ranks, GPU memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from training.config import LoraConfig
from training.errors import ModelError, TrainingError
from training.model.load import load
from training.model.lora import attach
from training.notebook import block_classes, gpu_memory, require_process_group, trainable_parameters

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "block"),
    [
        ("gpt_oss", "GptOssDecoderLayer"),
        ("llama", "LlamaDecoderLayer"),
        ("mistral", "MistralDecoderLayer"),
        ("mixtral", "MixtralDecoderLayer"),
        ("qwen2", "Qwen2DecoderLayer"),
        ("qwen3", "Qwen3DecoderLayer"),
        ("gemma", "GemmaDecoderLayer"),
        ("phi", "PhiDecoderLayer"),
        ("gpt_neox", "GPTNeoXLayer"),
        ("gpt2", "GPT2Block"),  # any that names its blocks
    ],
)
def test_blocks_of_each_family(family: str, block: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL))
    assert [kind.__name__ for kind in block_classes(model)] == [block]


def test_blocks_are_found_under_an_adapter(random_base: Path) -> None:
    model = attach(load(random_base), LoraConfig(), "base")
    assert [kind.__name__ for kind in block_classes(model)] == ["GptOssDecoderLayer"]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no decoder layers found in Sequential"):
        block_classes(nn.Sequential(nn.Linear(2, 2)))


def test_trained_parameters_are_counted_and_shown(random_base: Path) -> None:
    model, shown = attach(load(random_base), LoraConfig(r=2), "base"), list[str]()
    count = trainable_parameters(model, shown.append)
    assert count.trained == 2 * 2 * (64 + 128 + 2 * (64 + 64) + 128 + 64)
    assert count.total > count.trained
    assert shown == [f"{count.trained:,} of {count.total:,} parameters are trained ({count.trained / count.total:.4%})"]


def test_ranks_that_are_not_connected_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert require_process_group() == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TrainingError, match="rank 1: 1 of 2 ranks are connected"):
        require_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_show() -> None:
    shown: list[str] = []
    assert gpu_memory("after loading", shown.append) is None
    assert shown == []
