"""Adapters made by PEFT itself over a base, for the tests of merge, proof and export."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model by plain transformers, MXFP4 experts dequantised."""
    config = json.loads((directory / "config.json").read_text())
    extra = {"quantization_config": Mxfp4Config(dequantize=True)} if "quantization_config" in config else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager", **extra)
    return model.to(dtype).eval()  # dequantised experts are bf16 whatever dtype was asked for


def make_adapter(
    base: Path, out: Path, *, experts: bool = False, seed: int = 0, std: float = 0.05, **options: Any
) -> Path:
    """A LoRA adapter whose A and B are random, saved by PEFT: every expert has its own B."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION} | options
    if experts:
        options["target_parameters"] = EXPERTS
    model = get_peft_model(load(base), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * std
    model.save_pretrained(out)
    return out


def with_adapter(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    return PeftModel.from_pretrained(load(base, dtype), adapter).eval()


def edit_weights(adapter: Path, edit: Any) -> None:
    """Rewrites the adapter's tensors by `edit(dict) -> dict`."""
    path = adapter / "adapter_model.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})


def logits(model: torch.nn.Module, vocab: int = 500) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24) * 7 % vocab
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL of each token's distribution, in nats, as a flat vector."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).flatten()
