"""A trained LoRA adapter as updates of named tensors: PEFT's directory layout read strictly, without PEFT or the model.

PEFT stores a Linear's adapter as `MODULE.lora_A.weight [r, in]` and `MODULE.lora_B.weight [out, r]`. Packed experts
(`target_parameters`) have one pair per parameter for all experts, A with the expert as the slow index
(`[experts * r, in]`), B with the expert as the *fast* one (`[out, r * experts]`); several parameters of a module are
nested, the first innermost, as `MODULE.base_layer.lora_A`. Layout: peft.tuners.lora.layer.ParamWrapper.get_delta_weight.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor

from training.errors import MergeError
from training.merging.shards import Checkpoint, Entry, read_header
from training.run_dir import read_json, write_json

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PROVENANCE = "polythink_base.json"
"""Written beside the adapter by training: the fingerprint of the base it belongs to."""

EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of an expert module, in the order in which PEFT nests their adapters."""

_KEY = re.compile(r"^base_model\.model\.(?P<module>.+?)(?P<depth>(?:\.base_layer)*)\.lora_(?P<side>[AB])\.weight$")
_UNSUPPORTED = {
    "use_dora": "DoRA scales the whole weight",
    "fan_in_fan_out": "the weights are transposed",
    "lora_bias": "the adapter has biases",
    "modules_to_save": "whole modules were trained",
    "trainable_token_indices": "embedding rows were trained",
    "alora_invocation_tokens": "it is switched on by tokens of the prompt",
}


T = TypeVar("T")


def _regex(value: T) -> T:
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
    return value


_Regex = Annotated[str, AfterValidator(_regex)]
_Modules = Annotated[str | list[str] | None, AfterValidator(_regex)]


class _Numbers(BaseModel):
    """What of PEFT's LoraConfig the merge computes with."""

    r: Annotated[int, Field(ge=1)]
    lora_alpha: FiniteFloat
    use_rslora: bool = False
    rank_pattern: dict[_Regex, Annotated[int, Field(ge=1)]] = {}
    alpha_pattern: dict[_Regex, FiniteFloat] = {}
    target_modules: _Modules = None
    exclude_modules: _Modules = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one weight: `scale * B @ A`, computed in fp64 and rounded to fp32.

    In fp32 the last bits of the product would follow the processor and the number of rows computed at once, and a few bf16
    values of a million with them: no proof bit for bit on another machine. `a` is `[r, in]` and `b` `[out, r]`; for packed
    experts `[experts, r, in]` and `[experts, out, r]`.
    """

    target: str
    """The tensor's name in a bf16 checkpoint; packed experts have it with `_blocks` and `_scales` appended."""
    a: Tensor
    b: Tensor
    scale: float

    @property
    def experts(self) -> int | None:
        return self.a.shape[0] if self.a.dim() == 3 else None

    def delta(self, first: int, count: int) -> Tensor:
        """Rows `first` to `first + count` of a plain weight's update, fp32 `[count, in]`."""
        return self._product(self.b[first : first + count], self.a)

    def expert_delta(self, expert: int) -> Tensor:
        """One expert's update, fp32 `[out, in]`."""
        return self._product(self.b[expert], self.a[expert])

    def _product(self, b: Tensor, a: Tensor) -> Tensor:
        return (self.scale * (b.double() @ a.double())).float()


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits its base: every update has its tensor, every targeted module its update."""

    directory: Path
    config: dict[str, Any]
    updates: dict[str, Update]
    sha256: str

    @classmethod
    def open(cls, directory: Path, base: Checkpoint) -> "Adapter":
        """Reads `directory` and checks it against `base`.

        Raises:
            MergeError: not a plain LoRA adapter in PEFT's layout; keys missing, extra or of the wrong shape; values not
                finite; trained on another base.
        """
        directory = Path(directory)
        config = read_config(directory)
        if not (directory / WEIGHTS).is_file():
            raise MergeError(
                f"{directory} has no {WEIGHTS}",
                hint="Older adapters in .bin files: load and save them once with PEFT.",
            )
        _check_provenance(directory, base)
        pairs = _pairs(directory, config, base)
        missing = sorted(_expected(config, base) - set(pairs))
        if missing:
            raise MergeError(
                f"the adapter lacks {len(missing)} of the weights that its config targets, such as {missing[0]}",
                hint="Was it saved by one worker of several, or trained on a model with fewer layers?",
            )
        updates = {target: _update(target, pair, config, base) for target, pair in sorted(pairs.items())}
        return cls(directory, config, updates, hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest())


def write_provenance(adapter: Path, base: Path, *, model: str, revision: str | None) -> None:
    """Notes beside the adapter which base it was trained on, so that it is never merged into another."""
    fingerprint = Checkpoint.open(base).fingerprint
    write_json(Path(adapter) / PROVENANCE, {"model": model, "revision": revision, "fingerprint": fingerprint})


def expert_stem(name: str) -> str | None:
    """`….experts.gate_up_proj` for that weight itself, its blocks or its scales; None for every other tensor."""
    match = re.fullmatch(rf"(.+\.experts\.(?:{'|'.join(EXPERT_WEIGHTS)}))(?:_blocks|_scales)?", name)
    return match[1] if match else None


def expert_shape(base: Checkpoint, stem: str) -> tuple[int, int, int]:
    """(experts, out, in) of a packed or plain expert weight."""
    if f"{stem}_blocks" in base.entries:
        experts, out, groups, half = base.entries[f"{stem}_blocks"].shape
        return experts, out, groups * half * 2
    experts, inputs, out = base.entries[stem].shape
    return experts, out, inputs


def expert_dtype(base: Checkpoint, stem: str) -> str:
    """What an expert weight is in where it is not packed: its own dtype in the base, BF16 where that has it packed."""
    return base.entries[stem].dtype if stem in base.entries else "BF16"


def read_config(directory: Path) -> dict[str, Any]:
    """PEFT's adapter_config.json.

    Raises:
        MergeError: there is none, it is broken, or not of a plain LoRA adapter.
    """
    try:
        config = read_json(directory / CONFIG)
    except ValueError as error:
        raise MergeError(f"{directory / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise MergeError(f"{directory} is not an adapter: it has no {CONFIG}", hint="Give a directory saved by PEFT.")
    if config.get("peft_type") != "LORA":
        raise MergeError(f"{directory} is a {config.get('peft_type')} adapter; only LoRA can be merged here")
    for key, reason in _UNSUPPORTED.items():
        if config.get(key):
            raise MergeError(f"the adapter was trained with {key}={config[key]!r}: {reason}; only plain LoRA is merged")
    try:
        _Numbers.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise MergeError(f"{directory / CONFIG}: {place or 'it'} is wrong: {first['msg']}") from None
    if config.get("bias", "none") != "none":
        raise MergeError(f"the adapter was trained with bias={config['bias']!r}; only plain LoRA is merged")
    return config


def _check_provenance(directory: Path, base: Checkpoint) -> None:
    provenance = read_json(directory / PROVENANCE) or {}
    if provenance.get("fingerprint", base.fingerprint) != base.fingerprint:
        trained_on = "@".join(filter(None, (provenance.get("model"), provenance.get("revision"))))
        raise MergeError(
            f"the adapter was trained on {trained_on}, and {base.directory} holds other weights",
            hint=f"Merge into the base it was trained on; delete {PROVENANCE} from the adapter to merge all the same.",
        )


def _pairs(directory: Path, config: dict[str, Any], base: Checkpoint) -> dict[str, dict[str, Entry]]:
    """Target name → {"A": entry, "B": entry}, for all keys of the adapter file."""
    pairs: dict[str, dict[str, Entry]] = {}
    for entry in read_header(directory / WEIGHTS):
        match = _KEY.match(entry.name)
        target = match and _target(match["module"], match["depth"].count(".base_layer"), config, base)
        if match is None or target is None:
            raise MergeError(
                f"the adapter holds {entry.name}, which belongs to no weight of {base.directory}",
                hint="Is it for another model, or are modules beside LoRA in it?",
            )
        pairs.setdefault(target, {})[match["side"]] = entry
    for target, pair in pairs.items():
        if len(pair) != 2:
            raise MergeError(f"the adapter of {target} has lora_{next(iter(pair))} but not the other half")
    return pairs


def _target(module: str, depth: int, config: dict[str, Any], base: Checkpoint) -> str | None:
    """The weight that an adapter key belongs to: `MODULE.weight`, or the expert parameter at this nesting depth."""
    if depth == 0 and f"{module}.weight" in base.entries:
        return f"{module}.weight"
    nested = [stem for stem in _expert_stems(base) if stem.rpartition(".")[0] == module and _is_parameter(stem, config)]
    outermost_first = sorted(nested, key=lambda stem: EXPERT_WEIGHTS.index(stem.rpartition(".")[2]), reverse=True)
    return outermost_first[depth] if depth < len(outermost_first) else None


def _expert_stems(base: Checkpoint) -> set[str]:
    return {stem for name in base.entries if (stem := expert_stem(name))}


def _is_parameter(name: str, config: dict[str, Any]) -> bool:
    return any(name == key or name.endswith(f".{key}") for key in config.get("target_parameters") or [])


def _expected(config: dict[str, Any], base: Checkpoint) -> set[str]:
    """The weights of `base` that the config's target_modules and target_parameters name."""
    weights = {name for name in base.entries if name.endswith(".weight")}
    modules = {name for name in weights if _is_module(name.removesuffix(".weight"), config)}
    return modules | {name for name in weights | _expert_stems(base) if _is_parameter(name, config)}


def _is_module(module: str, config: dict[str, Any]) -> bool:
    """PEFT's rule for target_modules, exclude_modules and layers_to_transform."""
    layers = config.get("layers_to_transform")
    if layers is not None:
        number = re.search(r"\.(\d+)\.", module)
        if number is None or int(number[1]) not in (layers if isinstance(layers, list) else [layers]):
            return False
    return _names(config.get("target_modules"), module) and not _names(config.get("exclude_modules"), module)


def _names(patterns: str | list[str] | None, module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns or [])


def _update(target: str, pair: dict[str, Entry], config: dict[str, Any], base: Checkpoint) -> Update:
    a, b = pair["A"].read().float(), pair["B"].read().float()
    module = target.removesuffix(".weight")
    r = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    stem = expert_stem(target)
    experts, out, inputs = expert_shape(base, stem) if stem else (1, *base.entries[target].shape)
    if (
        stem and b.shape[0] == inputs != out and a.shape[1] == out
    ):  # some PEFT releases read [experts, in, out] as [.., out, in]
        raise MergeError(
            f"the adapter of {target} has its inputs and outputs swapped", hint="Train it with PEFT 0.21 or later."
        )
    if tuple(a.shape) != (experts * r, inputs) or tuple(b.shape) != (out, experts * r):
        raise MergeError(
            f"the adapter of {target} has A {list(a.shape)} and B {list(b.shape)}; the base needs A "
            f"{[experts * r, inputs]} and B {[out, experts * r]} at r={r}",
            hint="It belongs to another base, or holds one worker's share only.",
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise MergeError(f"the adapter of {target} holds values that are not finite", hint="The training diverged.")
    if stem:
        a = a.view(experts, r, inputs)
        b = b.view(out, r, experts).permute(2, 0, 1).contiguous()
    return Update(target, a, b, alpha / (math.sqrt(r) if config.get("use_rslora") else r))


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rank_pattern and alpha_pattern: the first key that matches the end of the module's name."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)
