"""What a training run can be told. Loads without torch; unknown keys are refused; every field says its meaning and unit.

A `TrainConfig` comes from a preset or file (`load_config`), takes overrides (`optim.learning_rate=1e-3`), and is resolved
once (`TrainConfig.resolved`): after that no field is "auto", and the run directory keeps exactly what ran.
"""

import difflib
import math
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from training.errors import ConfigError, PolythinkError
from training.language import language_code
from training.tracking.mlflow_names import (
    check_alias,
    check_experiment,
    check_model_fits_registry,
    check_model_name,
    check_registry_uri,
    check_uri,
)
from training.yaml_text import load_yaml

MAX_WORKERS = 1024
MAX_TOKENS = 131_072
"""Of a row or an answer: gpt-oss's context."""
PRESETS = Path(__file__).resolve().parent.parent / "configs"


class Section(BaseModel):
    """A part of the configuration: unknown keys are an error, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _large_whole_numbers(cls, value: Any) -> Any:
        """1e30 as an integer, which is refused with the field's bound; pydantic finds none in floats beyond 64 bits."""
        if isinstance(value, list | tuple):
            return [cls._large_whole_numbers(item) for item in value]
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 2**63 else value


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ConfigError("is blank", hint="Leave it out, or give a value.")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
Steps = Annotated[int, Field(ge=1, le=10**7)]
"""Optimizer steps. Checkpoints are named by eight digits."""
Rows = Annotated[int, Field(ge=1, le=10**4)]
"""Rows or prompts in one forward pass."""
Failures = Annotated[int, Field(ge=0, le=10**4)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
"""A day at most."""
Share = Annotated[float, Field(ge=0, le=1)]


class ModelConfig(Section):
    path: Text
    """Hub id (`openai/gpt-oss-20b`), or a directory written with a leading `./`, `../`, `~/` or `/`."""
    revision: Text | None = None
    """Hub revision: a branch, tag or commit."""

    @property
    def is_local(self) -> bool:
        return is_local_path(self.path)


class DataConfig(Section):
    path: Text
    """Hub id, a JSONL, JSON, Parquet or CSV file, a directory of them, or `file:ID` of an upload."""
    revision: Text | None = None
    split: Text = "train"
    held_out_path: Text | None = None
    """Rows to evaluate on; None takes `held_out_share` of the prompts of `path` out of training."""
    held_out_share: float = Field(default=0.05, ge=0, lt=1)
    max_length: int = Field(default=2048, ge=16, le=MAX_TOKENS)
    """Tokens a row may have; longer ones are cut at the end, and counted. One that no value of this would take is dropped unread."""
    max_lost_share: Share = 0.1
    """Share of rows that may be dropped or cut before the job fails."""
    packing: bool = False
    """Fill `max_length` with several rows that do not see each other."""
    train_on: Literal["assistant", "all"] = "assistant"
    """`assistant`: analysis, final and the last stop token of the last turn. `all`: every token."""
    current_date: date | Literal["today"] = "today"
    """The date that the chat template renders; `today` resolves to the day the run was made."""
    drop_mismatched: bool = False
    """Leave out training rows whose reasoning is not in the language they ask for."""
    balance_languages: bool = False
    """Repeat training rows of rarer reasoning languages until each has as many as the most frequent one."""
    vary_language_names: bool = False
    """Name the reasoning language in several ways: `German` in half of the rows, `Deutsch` and `de` in the others."""
    language_line: Literal["as_is", "first"] = "as_is"
    """`first` moves the line on the reasoning language to the front, worded as serving words it, and adds it where a row's column
    names a language that no line does."""


class LoraConfig(Section):
    r: int = Field(default=8, ge=1, le=512)
    alpha: float = Field(default=16, gt=0, le=10**4)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Literal["all-linear", "attention", "attention+experts"] | list[str] = "attention"
    """`attention` is q, k, v and o; `all-linear` every Linear (the same on gpt-oss, whose experts are no Linear);
    `attention+experts` adds the experts, whose adapter merges only with re-quantisation or into bf16; or module names."""

    @model_validator(mode="after")
    def _dropout_fits_targets(self) -> Self:
        if self.dropout and self.targets == "attention+experts":
            raise ValueError(
                f"lora.dropout={self.dropout} with expert adapters: PEFT allows only 0 there; set dropout to 0"
            )
        if isinstance(self.targets, list) and not self.targets:
            raise ValueError("lora.targets=[] is empty; name at least one module, or use 'attention'")
        if isinstance(self.targets, list) and not all(name.strip() for name in self.targets):
            raise ValueError(f"lora.targets={self.targets} holds a blank name; name modules, or use 'attention'")
        return self


class OptimConfig(Section):
    learning_rate: float = Field(default=2e-4, gt=0, le=1)
    schedule: Literal["cosine", "cosine_with_min_lr", "linear", "constant"] = "cosine_with_min_lr"
    min_lr_rate: Share = 0.1
    """Floor of `cosine_with_min_lr`, as a share of the learning rate."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the steps in which the rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    max_grad_norm: float = Field(default=1.0, gt=0, le=10**9)
    epochs: float = Field(default=1.0, gt=0, le=10**4)
    max_steps: Steps | None = None
    """Optimizer steps; None trains `epochs` passes."""
    global_batch_size: int = Field(default=16, ge=1, le=10**6)
    """Rows per optimizer step, whatever the number of workers: accumulation follows."""
    per_device_batch_size: Rows = 1
    """Rows per forward pass of one worker."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0, le=100)
    """Weight of the router's balancing loss. gpt-oss declares 0.9, which drowns the cross-entropy; its router is frozen."""
    seed: int = Field(default=42, ge=0, lt=2**32)

    def accumulation_steps(self, world_size: int) -> int:
        """Forward passes per optimizer step of each of `world_size` workers; the last may be partly empty."""
        return math.ceil(self.global_batch_size / (self.per_device_batch_size * world_size))


def _number_or_range(workers: Any) -> str:
    return "tuple" if isinstance(workers, list | tuple) else "int"


class ScalingConfig(Section):
    workers: Annotated[
        Annotated[int, Field(ge=1, le=MAX_WORKERS), Tag("int")] | Annotated[tuple[int, int], Tag("tuple")],
        Discriminator(_number_or_range),
    ] = 1
    """Training workers, one per GPU; `[8, 16]` is elastic: any number from 8 to 16."""
    device: Literal["cuda", "cpu"] = "cuda"
    accelerator_type: str | None = None
    """Ray's name of the GPU to ask for, such as H100; None takes any."""
    cpus_per_worker: float = Field(default=1, gt=0, le=1024)
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """`ddp`: every worker holds the base. `fsdp2`: the frozen base is sharded, on several equal nodes within each;
    adapters are replicated either way."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray's placement group lays workers on nodes."""
    max_failures: Failures = 0
    """Worker failures after which training starts again from the last checkpoint."""
    max_preemptions: Failures | None = None
    """The same for nodes that were taken away; None is any number."""
    resize_check_s: Seconds = 60
    """How often an elastic run looks whether more or fewer workers fit."""
    ignore_memory_plan: bool = False
    """Start even where a worker does not fit its GPU by `polythink plan`."""
    timeout_s: Seconds = 600
    """Longest wait for a rank that is dead or hangs, in a collective or for a sign of life, before the attempt ends."""

    @model_validator(mode="after")
    def _elastic_range(self) -> Self:
        low, high = self.worker_range
        if not 1 <= low <= high <= MAX_WORKERS:
            raise ValueError(f"scaling.workers={[low, high]}: give the smaller number first, from 1 to {MAX_WORKERS}")
        return self

    @property
    def worker_range(self) -> tuple[int, int]:
        return self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)


class CheckpointConfig(Section):
    every_steps: int = Field(default=50, ge=1, le=10**9)
    keep: int = Field(default=2, ge=1, le=1000)
    """Newest checkpoints that are not deleted."""


class GateConfig(Section):
    """Least figures of the tuned model, over the languages other than English; a model below one is not registered or deployed."""

    trace_match: Share | None = None
    """Share of traces whose language is the asked one."""
    strict_match: Share | None = None
    """Share of traces in which every sentence is in the asked language."""
    purity: Share | None = None
    """Mean share of a trace's letters in the asked language."""
    answer_language_match: Share | None = None
    """Share of answers in the language of the question."""
    accuracy: Share | None = None
    """Share of right answers, where the set has answers."""


def _known_languages(names: list[str]) -> list[str]:
    for name in names:
        language_code(name)
    return names


class EvaluationConfig(Section):
    """Reasoning language on held-out prompts, with the base and with the tuned model."""

    prompts: int = Field(default=40, ge=1, le=10**5)
    """Held-out prompts per model, spread over the languages."""
    languages: Annotated[list[str], Field(min_length=1), AfterValidator(_known_languages)] | None = None
    """Reasoning languages to ask for, by name or code; None takes those of the held-out rows."""
    max_new_tokens: int = Field(default=512, ge=8, le=MAX_TOKENS)
    batch_size: Rows = 16
    temperature: float = Field(default=0.0, ge=0, le=2)
    gate: GateConfig | None = None
    """What the tuned model must reach to be registered; None registers every model."""
    sample_every_steps: Steps | None = None
    """Optimizer steps between two looks at the language while training; None does not look."""
    sample_prompts: int = Field(default=4, ge=1, le=64)
    """Held-out prompts asked at each look, without a cache and one by one: a few are enough."""


class TrackingConfig(Section):
    uri: Annotated[str, AfterValidator(check_uri)] | None = None
    """MLflow tracking URI; None takes MLFLOW_TRACKING_URI, else a SQLite store under POLYTHINK_HOME."""
    registry_uri: Annotated[str, AfterValidator(check_registry_uri)] | None = None
    """MLflow registry, such as `databricks-uc`; None takes the tracking one."""
    experiment: Annotated[str, AfterValidator(check_experiment)] = "polythink"
    registered_model: Annotated[str, AfterValidator(check_model_name)] | None = None
    """Name to register the merged model under (`catalog.schema.name` on Unity Catalog); None registers under `name`."""
    alias: Annotated[str, AfterValidator(check_alias)] | None = None
    """Moved to the new version once it is registered, such as `champion`."""

    @model_validator(mode="after")
    def _name_fits_registry(self) -> Self:
        if self.registered_model:
            check_model_fits_registry(self.registered_model, self.registry_uri)
        return self


class TrainConfig(Section):
    """One training run, whole."""

    name: str = Field(default="polythink", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = LoraConfig()
    optim: OptimConfig = OptimConfig()
    scaling: ScalingConfig = ScalingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    deploy: bool = False
    """Whether the service answers requests that name no model with this one, once it is registered and has reached its gate."""
    weights: Literal["auto", "mxfp4", "bf16"] = "auto"
    """How the frozen experts are held: packed MXFP4 (`auto` on CUDA), or dequantised to bf16 (`auto` elsewhere)."""
    merge_format: Literal["auto", "original", "bf16", "mxfp4"] = "auto"
    """What the merged model's experts are stored in: `original` leaves them as they are (`auto` for attention adapters);
    expert adapters are added in `bf16` (their `auto`), or packed again as `mxfp4`, which loses some of the training."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """What is computed in: `auto` is bf16 on CUDA and fp32 on CPU."""
    attention: Literal["auto", "eager", "flex_attention"] = "auto"
    """`auto` is flex_attention on CUDA (sinks and sliding window, block-sparse) and eager on CPU."""
    experts: Literal["auto", "frozen", "grouped_mm", "eager"] = "auto"
    """What multiplies gpt-oss's experts where they are dequantised: `frozen` (`auto` on CUDA) is the layer that packed ones have,
    without gradients of weights; `grouped_mm` and the loop over experts, `eager` (`auto` on CPU), are transformers'."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder layers with torch.compile; `auto` does on CUDA. The first steps of each length take a minute."""
    recompute: Literal["auto", "full", "selective", "none"] = "auto"
    """Activation checkpointing of decoder layers: `full` keeps a layer's input and computes the layer again, `selective` also
    keeps the first product of packed or frozen experts, `none` keeps everything; `auto` is the fastest that fits `scaling.accelerator_type`, full where that is not
    known, and none on CPU."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        on_cpu = self.scaling.device == "cpu"
        if on_cpu and self.attention == "flex_attention":
            raise ValueError(
                "attention=flex_attention needs scaling.device=cuda: torch has no attention sinks in flex on CPU"
            )
        if self.recompute == "selective" and self.weights == "bf16" and self._resolved_experts != "frozen":
            raise ValueError(
                f"recompute=selective with weights=bf16 and experts={self._resolved_experts}: it keeps what packed or frozen experts "
                "computed; set recompute=full, weights=mxfp4 or experts=frozen"
            )
        if on_cpu and self.scaling.accelerator_type:
            raise ValueError(
                f"scaling.accelerator_type={self.scaling.accelerator_type!r} with scaling.device=cpu: leave it out"
            )
        return self

    @property
    def _resolved_experts(self) -> str:
        on_device = "frozen" if self.scaling.device == "cuda" else "eager"
        return on_device if self.experts == "auto" else self.experts

    def resolved(self) -> "TrainConfig":
        """This configuration with every "auto" and "today" replaced by what will run. Idempotent.

        Raises:
            ConfigError: `name`, under which the model is registered when no other name is given, is none for the registry.
        """
        cuda = self.scaling.device == "cuda"
        choices: dict[str, Any] = {
            "weights": "mxfp4" if cuda else "bf16",
            "merge_format": "bf16" if self.lora.targets == "attention+experts" else "original",
            "experts": self._resolved_experts,
            "compile": cuda,
            "precision": "bf16" if cuda else "fp32",
            "attention": "flex_attention" if cuda else "eager",
            "recompute": "none",
        }
        values = self.model_dump()
        values |= {key: choice for key, choice in choices.items() if values[key] == "auto"}
        if self.data.current_date == "today":
            values["data"]["current_date"] = datetime.now(UTC).date()
        values["tracking"]["registered_model"] = self.tracking.registered_model or self.name
        resolved = parse_config(values)
        if cuda and self.recompute == "auto":
            from training.plan import pick_recompute  # which itself is about configurations

            resolved = resolved.model_copy(update={"recompute": pick_recompute(resolved)})
        return resolved


def is_local_path(path: str) -> bool:
    """Whether `path` names a file or directory rather than a hub id; `./` marks a relative one."""
    return path.startswith(("./", "../", "/", "~/"))


def parse_config(values: Any) -> TrainConfig:
    """`values` as a TrainConfig.

    Raises:
        ConfigError: all faults in one message; `field` is the first one's dotted path.
    """
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise config_error(error) from None


def load_config(source: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """A preset by name (`tiny`) or a YAML file by path, with `key.path=value` overrides (values are YAML) on top.

    Relative `./` paths inside a file are relative to that file.

    Raises:
        ConfigError: no such preset or file, bad YAML, an unknown key, a value out of range.
    """
    path = Path(source).expanduser()
    if path.suffix not in {".yaml", ".yml", ".json"}:
        path = PRESETS / f"{source}.yaml"
        if str(source) not in presets():
            raise ConfigError(
                f"there is no preset {_shorten(str(source))}",
                hint=f"Presets: {', '.join(presets())}; a file ends in .yaml.",
                field="preset",
            )
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {_shorten(str(path))}: {error.strerror or error}", field="preset") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint, field=error.field) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no YAML, no UTF-8, a date in month 13, too deep
        raise ConfigError(f"{path} is not YAML: {error}", field="preset") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, not a mapping of configuration keys", field="preset"
        )
    values = _anchor_paths(values, path.resolve().parent)
    for override in overrides:
        values = apply_override(values, *parse_override(override))
    return parse_config(values)


def parse_override(override: str) -> tuple[str, Any]:
    """Key and value of `key.path=value`; the value is YAML.

    Raises:
        ConfigError: it is none, or gives a key twice.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} is not key=value", hint="For example optim.learning_rate=1e-3", field=key or None
        )
    try:
        return key, load_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {key}: {error.message}", hint=error.hint, field=key) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"override {key}: {text!r} is not a YAML value: {error}", field=key) from None


def apply_override(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of nested `values` with the dotted `key` set; mappings are merged, everything else is replaced."""
    head, _, rest = key.partition(".")
    if rest:
        inner = values.get(head) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key}: {head} is a {type(inner).__name__}, it has no keys", field=key)
        return {**values, head: apply_override(inner, rest, value)}
    if isinstance(value, dict) and isinstance(values.get(head), dict):
        merged = values[head]
        for name, item in value.items():
            merged = apply_override(merged, str(name), item)
        return {**values, head: merged}
    return {**values, head: value}


def presets() -> list[str]:
    """Names of the files in `configs/` that hold a TrainConfig."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml") if path.stem != "serve")


def config_error(error: ValidationError) -> ConfigError:
    """Pydantic's faults as one ConfigError: each with its dotted field, its value, and the nearest known key."""
    lines = []
    fields = []
    hints = []
    for fault in error.errors(include_url=False):
        location = [str(part) for part in fault["loc"] if not _is_union_branch(part)]
        field = ".".join(location)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "unknown key"
            near = difflib.get_close_matches(location[-1], _known_keys(location[:-1]), n=3)
            if near:
                hints.append(f"Did you mean {' or '.join('.'.join([*location[:-1], name]) for name in near)}?")
        elif fault["type"] != "missing" and not isinstance(fault["input"], dict | list):
            message += f" (given: {_shorten(fault['input'])})"
        raised = fault.get("ctx", {}).get("error")
        if isinstance(raised, PolythinkError) and raised.hint:
            hints.append(raised.hint)
        named = re.match(r"[a-z_]+(\.[a-z_]+)*(?= ?=)", message)  # a rule over several fields names the one to change
        if named:
            field = named.group()
        lines.append(f"{field}: {message}" if field and not named else message)
        fields.append(field)
    return ConfigError("; ".join(dict.fromkeys(lines)), hint=" ".join(hints), field=fields[0] or None)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_union_branch(part: Any) -> bool:
    """Pydantic names the branch of a union in a fault's location; people did not write that."""
    return isinstance(part, str) and bool(re.search(r"[\[(]|^(int|str|constrained-int|list|tuple|date|literal)$", part))


def _known_keys(location: list[str]) -> list[str]:
    section: type[BaseModel] | None = TrainConfig
    for name in location:
        field = section.model_fields.get(name) if section else None
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else []
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return list(section.model_fields) if section else []


def _anchor_paths(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`values` with the `./` and `../` paths of model and data made absolute, `directory` being where they start."""
    anchored = dict(values)
    for section, keys in (("model", ("path",)), ("data", ("path", "held_out_path"))):
        inner = anchored.get(section)
        if isinstance(inner, dict):
            anchored[section] = {
                key: str((directory / value).resolve())
                if key in keys and isinstance(value, str) and value.startswith(("./", "../"))
                else value
                for key, value in inner.items()
            }
    return anchored
