"""How large a model is, from its `config.json` alone. Loads without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from training.config import ModelConfig, is_local_path

BF16 = 2  # bytes
MXFP4 = 17 / 32  # bytes: half a byte a value, and a byte of scale for 32 of them

_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4"},
}

KNOWN: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}
"""Configurations that plans need before anything is fetched."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of a decoder; a dense one counts as a single expert that every token takes."""

    layers: int
    hidden: int
    intermediate: int
    experts: int
    experts_per_token: int
    heads: int
    queries: int
    keys: int
    vocab: int
    packed: bool
    """Whether the checkpoint holds MXFP4 experts."""
    tied: bool = False
    """Whether the head is the embeddings."""
    gpt_oss: bool = False
    """Whether its expert layers can be ours."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        experts = config.get("num_local_experts") or config.get("num_experts") or 1
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 1,
            heads=heads,
            queries=heads * head_dim,
            keys=(config.get("num_key_value_heads") or heads) * head_dim,
            vocab=config["vocab_size"],
            packed=(config.get("quantization_config") or {}).get("quant_method") == "mxfp4",
            tied=bool(config.get("tie_word_embeddings")),
            gpt_oss=config.get("model_type") == "gpt_oss",
        )

    @property
    def expert_weights(self) -> int:
        """Of one layer: gate, up and down of every expert."""
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def other_weights(self) -> int:
        """Of one layer, as gpt-oss has them: attention with biases and sinks, router, norms, biases of the experts."""
        attention = 2 * self.queries * self.hidden + 2 * self.keys * self.hidden
        attention += self.queries + 2 * self.keys + self.hidden + self.heads
        router = self.experts * (self.hidden + 1)
        expert_biases = self.experts * (2 * self.intermediate + self.hidden)
        return attention + router + expert_biases + 2 * self.hidden

    @property
    def outside(self) -> int:
        """Weights of no layer: embeddings, head, last norm."""
        return (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * (self.expert_weights + self.other_weights) + self.outside

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes through: of the experts its own few, and of the embeddings the head only."""
        share = self.experts_per_token / self.experts
        return round(self.layers * (self.expert_weights * share + self.other_weights)) + self.vocab * self.hidden

    def stored_bytes(self, expert_bytes: float) -> int:
        """All weights, in bf16 but for the experts, which take `expert_bytes` a value."""
        others = self.layers * self.other_weights + self.outside
        return round(self.layers * self.expert_weights * expert_bytes + others * BF16)

    @property
    def disk_bytes(self) -> int:
        return self.stored_bytes(MXFP4 if self.packed else BF16)

    def adapter_parameters(self, r: int, *, experts: bool) -> int:
        """Of LoRA on q, k, v and o, and on the experts' two matrices if asked."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        expert = self.experts * ((self.hidden + 2 * self.intermediate) + (self.intermediate + self.hidden))
        return self.layers * r * (attention + (expert if experts else 0))


def find_sizes(model: ModelConfig) -> Sizes | None:
    """Sizes of a local checkpoint, of a model known by its hub id, or of one in the hub's cache; None when not known yet."""
    if is_local_path(model.path):
        path = Path(model.path).expanduser() / "config.json"
    elif model.path in KNOWN:
        return Sizes.from_config(KNOWN[model.path])
    else:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        return sizes_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # that the model is missing or broken is for the job to say, with the reason


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """Sizes by a whole `config.json`; None for an architecture that says them in other words."""
    try:
        return Sizes.from_config(config.get("text_config", config))
    except (AttributeError, KeyError, TypeError):
        return None
