"""From a model's directory to something that answers."""

import asyncio
import gc
import json
import re
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from serving.engines.adapters import AdapterBank, served_merged_only
from serving.engines.attention import use_grouped_attention
from serving.engines.engine import Engine, EngineName
from serving.engines.norms import use_fused_norms
from serving.engines.transformers_engine import TransformersEngine
from serving.models.names import ModelSource
from serving.models.served import ServedModel
from training.errors import MergeError, ModelError
from training.harmony import Renderer
from training.merging.adapter import Adapter
from training.merging.shards import Checkpoint
from training.model import load as models

GIB = 1024**3
BYTES = {"mxfp4": 17 / 32, "bf16": 2.0, "fp32": 4.0}
"""Of one value."""
SLACK = 1.2
"""Memory that loading and a first prompt need, in parts of the weights."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may use.

    Args:
        engine: `auto` is vLLM where it is installed and there is a GPU.
        device: `auto` is CUDA where there is one.
        max_sequences: answered at once; more wait.
        max_waiting: requests that may wait before new ones are refused.
        context_length: most tokens of prompt and output; None is the model's own.
        cache_gib: memory for keys and values of one model; None is 2 GiB on CPU, most of this model's share on CUDA.
        memory_share: part of the GPU's memory that one model may take.
        max_adapters: LoRA adapters in memory per model, served unmerged; 0 serves none.
        max_adapter_rank: largest rank of those.
        current_date: what the chat template prints; None is today.
    """

    engine: EngineName = "auto"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    max_sequences: int = 32
    max_waiting: int = 128
    context_length: int | None = None
    cache_gib: float | None = None
    memory_share: float = 0.9
    max_adapters: int = 8
    max_adapter_rank: int = 64
    current_date: date | None = None


def load_served_model(source: ModelSource, settings: EngineSettings = EngineSettings()) -> ServedModel:
    """Loads the model of `source`. Takes seconds to minutes: call it in a thread.

    Raises:
        ModelError: the directory is incomplete, or its weights do not fit its model.
    """
    directory = source.directory
    if not (directory / "config.json").is_file():
        raise ModelError(f"{source.name}: {directory} is not there or holds no model", field="model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    renderer = Renderer(tokenizer, settings.current_date)
    ends = stop_ids(directory)
    device = device_of(settings)
    build = vllm_engine if uses_vllm(source.engine or settings.engine, device) else transformers_engine
    served = ServedModel(source.name, build(directory, settings, device), renderer, ends)
    try:
        asyncio.run(served.probe())
    except BaseException:
        served.close()
        raise
    return served


def fits_beside(source: ModelSource, settings: EngineSettings) -> bool:
    """Whether there is memory for `source` beside what is loaded: for its weights, or for all that vLLM will claim."""
    device, directory = device_of(settings), source.directory
    if not (directory / "config.json").is_file():
        return True  # loading says what is wrong
    release_memory()
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if device == "cpu":  # everything becomes fp32
        growth = BYTES["fp32"] / BYTES["mxfp4" if holds_packed_experts(directory) else "bf16"]
        return psutil.virtual_memory().available >= SLACK * growth * stored
    free, total = torch.cuda.mem_get_info()
    if uses_vllm(source.engine or settings.engine, device):
        return free >= total * settings.memory_share
    return free >= SLACK * stored


def release_memory() -> None:
    """Gives back what closed models and loading left: what CUDA's allocator keeps for later counts as used."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def device_of(settings: EngineSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def uses_vllm(engine: str, device: str) -> bool:
    """`auto` is vLLM where it is installed and there is a GPU: that is where it is faster by far."""
    if engine == "auto":
        return device == "cuda" and find_spec("vllm") is not None
    return engine == "vllm"


def transformers_engine(directory: Path, settings: EngineSettings, device: str) -> Engine:
    model = models.load(
        directory,
        weights="mxfp4" if device == "cuda" and holds_packed_experts(directory) else "bf16",
        precision="bf16" if device == "cuda" else "fp32",
        device=device,
    )
    if model.config.model_type == "gpt_oss":
        use_grouped_attention(model)
        if device == "cuda":
            use_fused_norms(model)
    release_memory()
    bank = None
    if settings.max_adapters:
        bank = AdapterBank(
            model,
            lambda adapter: read_adapter(adapter, directory),
            capacity=settings.max_adapters,
            max_rank=settings.max_adapter_rank,
        )
    return TransformersEngine(
        model,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        context_length=settings.context_length,
        cache_bytes=cache_bytes(settings, device),
        adapters=bank,
    )


def vllm_engine(directory: Path, settings: EngineSettings, device: str) -> Engine:
    """
    Raises:
        ModelError: vLLM is not installed, or a weight is missing.
    """
    try:
        from serving.engines.vllm_engine import VllmEngine
    except ImportError as error:
        raise ModelError(
            f"the vLLM engine cannot be imported: {error}",
            hint="pip install 'polythink[vllm]', or engine=transformers.",
        ) from None
    check_complete(directory)
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}  # compiling for a CPU takes minutes
    if device == "cuda":
        options = {"gpu_memory_utilization": settings.memory_share}
    adapted = device == "cuda" and settings.max_adapters > 0  # on CPU vLLM has no LoRA
    if adapted:
        options |= {"enable_lora": True, "max_loras": settings.max_adapters, "max_lora_rank": settings.max_adapter_rank}
    return VllmEngine(
        directory,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        context_length=settings.context_length,
        check_adapter=partial(check_adapter, base=directory) if adapted else None,
        **options,
    )


def check_complete(directory: Path) -> None:
    """vLLM leaves a weight that is missing as it was in memory, without a word.

    Raises:
        ModelError: naming the missing weights.
    """
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        needed = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
    there = {re.sub(r"_(blocks|scales)$", "", name) for name in Checkpoint.open(directory).entries}
    missing = sorted(needed - there)
    if missing:
        raise ModelError(f"{directory} lacks {len(missing)} weights, such as {missing[0]}", field="model")


def check_adapter(adapter: Path, base: Path) -> None:
    """
    Raises:
        ModelError: the adapter is broken, or changes more than attention.
    """
    strange = [name for name in read_adapter(adapter, base) if ".self_attn." not in name]
    if strange:
        raise served_merged_only(strange[0])


def cache_bytes(settings: EngineSettings, device: str) -> int:
    """Memory for keys and values of one model, which is on `device` already."""
    if settings.cache_gib is not None:
        return int(settings.cache_gib * GIB)
    if device == "cpu":
        return 2 * GIB
    free, _ = torch.cuda.mem_get_info()
    return int(0.8 * free * settings.memory_share)


def read_adapter(adapter: Path, base: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and scaled B of each module that `adapter`, trained on `base`, changes.

    Raises:
        ModelError: it is broken, or was trained on another base.
    """
    try:
        updates = Adapter.open(adapter, Checkpoint.open(base)).updates
    except MergeError as error:
        raise ModelError(error.message, hint=error.hint, field="model") from None
    return {name.removesuffix(".weight"): (update.a, update.scale * update.b) for name, update in updates.items()}


def holds_packed_experts(directory: Path) -> bool:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


def stop_ids(directory: Path) -> frozenset[int]:
    """The ids that end a response, as the model's own generation config lists them.

    Raises:
        ModelError: it lists none: every answer would run into the token limit.
    """
    ids = GenerationConfig.from_pretrained(directory).eos_token_id
    if ids is None:
        raise ModelError(f"{directory}: generation_config.json names no eos_token_id", field="model")
    return frozenset([ids] if isinstance(ids, int) else ids)
