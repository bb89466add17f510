"""The adapter: attached where the configuration says, counted, and saved in PEFT's own layout."""

import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from training.config import LoraConfig
from training.errors import ConfigError, ModelError
from training.model.expert_lora import attach_to_experts
from training.model.experts import FrozenExperts
from training.model.load import decoder_layers

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def attach(model: PreTrainedModel, lora: LoraConfig, base: str) -> PeftModel:
    """`model` with a fresh fp32 adapter; only the adapter's tensors ask for gradients.

    Args:
        base: hub id or path of the base model, for the adapter's own record.

    Raises:
        ConfigError: a target that some decoder layer does not have: PEFT would train without it and not say so.
    """
    parameters = EXPERTS if lora.targets == "attention+experts" else None
    ours = any(isinstance(module, FrozenExperts) for module in model.modules())
    config = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT takes any number
        lora_dropout=lora.dropout,
        target_modules=_target_modules(lora),
        target_parameters=None if ours else parameters,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of parameters without a match: an error below
            adapted = get_peft_model(model, config)
    except ValueError as error:  # PEFT: no module at all has the name
        raise ConfigError(f"lora.targets={lora.targets!r}: {error}", field="lora.targets") from error
    if ours and parameters:
        attach_to_experts(adapted, config)
        config.target_parameters = parameters
    adapted.peft_config["default"].base_model_name_or_path = base  # PEFT puts the path that was loaded here
    _assert_every_layer(adapted, lora)
    return adapted


def _target_modules(lora: LoraConfig) -> str | list[str]:
    if isinstance(lora.targets, list):
        return lora.targets
    return "all-linear" if lora.targets == "all-linear" else ATTENTION


def _assert_every_layer(model: PeftModel, lora: LoraConfig) -> None:
    wanted = _target_modules(lora)
    names = ATTENTION if wanted == "all-linear" else list(wanted)
    for number, layer in enumerate(decoder_layers(model.get_base_model())):
        adapted = {name for name, _ in layer.named_parameters() if ".lora_A." in name}
        missing = [target for target in names if not any(f"{target}.lora_A." in name for name in adapted)]
        if lora.targets == "attention+experts" and sum(".experts." in name for name in adapted) != len(EXPERTS):
            missing.append("mlp.experts")
        if missing:
            raise ConfigError(
                f"lora.targets={lora.targets!r}: layer {number} has no {', '.join(missing)}",
                hint=f"Linear modules of that layer: {', '.join(_linear_names(layer))}.",
                field="lora.targets",
            )


def _linear_names(layer: nn.Module) -> list[str]:
    return sorted(
        {
            name.removesuffix(".base_layer").rpartition(".")[2]
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and "lora_" not in name
        }
    )


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter under PEFT's file names, on the CPU. Adapters are replicated, so every rank has all of it."""
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    # "auto" would look up the base's vocabulary on the hub; embeddings are never trained here
    state = get_peft_model_state_dict(model, state_dict=trained, save_embedding_layers=False)
    return {name: value.to("cpu").contiguous() for name, value in state.items()}


def adapter_files(model: PeftModel) -> dict[str, bytes]:
    """The content of `adapter_model.safetensors` and `adapter_config.json`, as the adapter is now.

    Raises:
        ModelError: a tensor is not finite: training diverged.
    """
    state = adapter_state(model)
    broken = [name for name, value in state.items() if not torch.isfinite(value).all()]
    if broken:
        raise ModelError(
            f"the adapter holds values that are not finite, first in {broken[0]}", hint="Lower optim.learning_rate."
        )
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    return {
        WEIGHTS_FILE: save(state, metadata={"format": "pt"}),
        CONFIG_FILE: json.dumps(plain, indent=2, sort_keys=True).encode(),
    }


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Writes the files of `adapter_files`; call it on one rank."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in adapter_files(model).items():
        (directory / name).write_bytes(content)


def load_adapter(model: PeftModel, directory: Path) -> None:
    """Replaces the adapter's tensors by those of `directory`.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape; PEFT would only warn.
    """
    state = load_file(directory / WEIGHTS_FILE)
    own = adapter_state(model)
    if state.keys() != own.keys():
        raise ModelError(f"{directory} holds another adapter: {sorted(state.keys() ^ own.keys())[:4]} differ")
    different = [name for name in own if own[name].shape != state[name].shape]
    if different:
        raise ModelError(
            f"{directory}: {different[0]} has shape {tuple(state[different[0]].shape)}, not {tuple(own[different[0]].shape)}"
        )
    set_peft_model_state_dict(model, state)
