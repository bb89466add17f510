"""Loading a model for training, generation or proof: strictly, in the asked form, each rank reading what it keeps."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from training.errors import ModelError
from training.model.attention import install_attention
from training.model.experts import DenseExperts, FrozenExperts, PackedExperts
from training.model.weights import InexactError, WeightReader

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load(
    directory: Path,
    *,
    weights: Literal["mxfp4", "bf16"] = "bf16",
    precision: Literal["bf16", "fp32"] = "fp32",
    attention: Literal["eager", "flex_attention"] = "eager",
    experts: Literal["frozen", "grouped_mm", "eager"] | None = None,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    progress: bool = False,
) -> PreTrainedModel:
    """The model in `directory`, frozen, in eval mode.

    Args:
        directory: config, safetensors shards and tokenizer of a causal language model.
        weights: `mxfp4` keeps gpt-oss's experts packed, and packs those that are stored in bf16 where that is exact; `bf16`
            dequantises them.
        precision: dtype of everything that is not packed.
        attention: backend; asserted, since transformers may swap it.
        experts: of dequantised experts, `frozen` is our layer, the others transformers'; None is the one of those that suits `device`.
        device: where the weights go.
        mesh: shards the base over this mesh (FSDP2); each rank reads its slices only.
        progress: show a bar over the tensors.

    Raises:
        ModelError: a weight is missing, unexpected or of another shape.
        InexactError: packed experts were asked for, and the model has none that can be packed exactly.
    """
    config = AutoConfig.from_pretrained(directory)
    if attention == "flex_attention":
        install_attention()
    if weights == "mxfp4" and config.model_type != "gpt_oss":
        raise InexactError(
            f"{directory} holds no MXFP4 experts", hint="Set weights=bf16 for this model.", field="weights"
        )
    if config.model_type == "gpt_oss":
        # On CPU the loop over experts is 5 to 30 times faster than grouped_mm at 32 experts; on CUDA it is the other way.
        experts = experts or ("grouped_mm" if device.startswith("cuda") else "eager")
        model = _skeleton(config, attention, weights, experts, DTYPES[precision])
        _fill(model, directory, DTYPES[precision], device, mesh, progress)
    else:
        model = _load_other(directory, DTYPES[precision], attention, device, mesh)
    if model.config._attn_implementation != attention:
        raise ModelError(
            f"asked for {attention} attention, transformers set {model.config._attn_implementation}", field="attention"
        )
    return model.requires_grad_(False).eval()


def _fill(
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    device: str,
    mesh: DeviceMesh | None,
    progress: bool,
) -> None:
    """gpt-oss, built without weights, is filled tensor by tensor."""
    if mesh is not None:
        shard(model, mesh)
    missing = dict(model.named_parameters())
    checkpoint = WeightReader(directory)
    for name in tqdm(sorted(missing), desc="Loading weights", unit="tensor", disable=not progress):
        parameter = missing[name]
        module, _, leaf = name.rpartition(".")
        value = checkpoint.parameter(name, parameter, dtype, device)
        setattr(model.get_submodule(module), leaf, nn.Parameter(value, requires_grad=False))
    if checkpoint.unread:
        names = sorted(checkpoint.unread)
        raise ModelError(f"{directory} holds {len(names)} weights that the model does not know: {', '.join(names[:4])}")
    nn.Module.to(model, device)  # the buffers; parameters are there


def _skeleton(config: Any, attention: str, weights: str, experts: str, dtype: torch.dtype) -> PreTrainedModel:
    """gpt-oss whose parameters have shapes but no storage; buffers, which no checkpoint holds, are real."""
    from accelerate import init_empty_weights

    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    ours: type[FrozenExperts] | None = DenseExperts if experts == "frozen" else None
    ours = PackedExperts if weights == "mxfp4" else ours
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation="eager" if ours else experts, dtype=dtype
        )
    if ours:
        for layer in model.model.layers:
            with torch.device("meta"):
                layer.mlp.experts = ours(config)
    return model


def _load_other(
    directory: Path, dtype: torch.dtype, attention: str, device: str, mesh: DeviceMesh | None
) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    model, report = loaded
    faults = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(faults.values()):
        raise ModelError(f"{directory} does not fit its model: { ({k: v[:4] for k, v in faults.items() if v}) }")
    nn.Module.to(model, device)
    if mesh is not None:
        shard(model, mesh)
    return model


def shard(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """FSDP2: each decoder layer is a unit, embeddings and head are another; a gathered layer is freed after its forward.

    Not so the last one, whose backward is next, nor embeddings and head: that would be a gather more of each.
    """
    layers = decoder_layers(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layer is not layers[-1])
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of `model`, by its own `_no_split_modules`.

    Raises:
        ModelError: the architecture names none, or none is found.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    # FSDP2 gives a sharded module a class derived from its own.
    layers = [module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}]
    if not layers:
        raise ModelError(f"no decoder layers found in {type(model).__name__} (looked for {sorted(names) or 'nothing'})")
    return layers
