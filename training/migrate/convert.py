"""A script or configuration of another trainer as a configuration of ours: what moved where, and what means nothing any more.

Reads Python scripts and notebooks that call TRL's `SFTTrainer`, and YAML of Axolotl and LLaMA-Factory. Nothing is executed.
The result trains as the source does, the source's own defaults included.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from training.config import is_local_path
from training.errors import ConfigError
from training.migrate.keys import AXOLOTL, DEFAULTS, LLAMA_FACTORY, SCRIPT, Gone, Move
from training.migrate.script import Computed, read_script


@dataclass(frozen=True)
class Moved:
    """A key that lives on."""

    key: str
    value: Any
    to: str
    """Our dotted key."""
    new_value: Any
    note: str = ""


@dataclass(frozen=True)
class Lost:
    """A key that is not in the result."""

    key: str
    value: Any
    reason: str


@dataclass
class Migration:
    """What became of a source."""

    kind: str
    """`script`, `axolotl` or `llama-factory`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Our configuration, nested."""
    moved: list[Moved] = field(default_factory=list)
    gone: list[Lost] = field(default_factory=list)
    """Keys that have no meaning any more, or none here."""
    unread: list[Lost] = field(default_factory=list)
    """Keys to look at by hand: their value is computed when the script runs, or nobody here knows them."""
    notes: list[str] = field(default_factory=list)

    def yaml(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True, default_flow_style=False)


def migrate(source: Path, gpus: int | None = None) -> Migration:
    """`source` as a configuration of ours, which `load_config` loads once it is in a file.

    Args:
        source: a Python script, a notebook, or YAML of Axolotl or LLaMA-Factory.
        gpus: workers; None takes the decorator's or launcher's number, else 1. The global batch is a product with it.

    Raises:
        ConfigError: it cannot be read, it is of no known kind, or it names no model or data.
    """
    kind, keys = _read(source)
    table = {"script": SCRIPT, "axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY}[kind]
    result = Migration(kind)
    flat: dict[str, Any] = {}
    for key, value in keys:
        _apply(result, flat, table, key, value)
    _note_full_fine_tuning(result, {key for key, _ in keys})
    _fill_defaults(result, flat)
    _finish(result, flat, gpus)
    for name in ("model.path", "data.path"):
        if not flat.get(name):
            raise ConfigError(
                f"{source} names no {'model' if name == 'model.path' else 'data'}", hint=_hint(result), field=name
            )
    result.values = _nested(flat)
    return result


def _read(source: Path) -> tuple[str, list[tuple[str, Any]]]:
    """The kind of `source`, and its keys in order."""
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {source}: {error}", field="source") from None
    if source.suffix in {".py", ".ipynb"}:
        return "script", read_script(text, source.suffix)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is neither a .py or .ipynb nor YAML: {error}", field="source") from None
    if isinstance(values, dict) and "base_model" in values:
        return "axolotl", _axolotl(values)
    if isinstance(values, dict) and "model_name_or_path" in values:
        return "llama-factory", _llama_factory(values, source.parent)
    raise ConfigError(
        f"{source} is of no known kind",
        hint="Known: Python or notebooks with SFTConfig, Axolotl (base_model), LLaMA-Factory (model_name_or_path).",
        field="source",
    )


def _axolotl(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Axolotl's keys, with the first data set's and FSDP's own under dotted names."""
    keys: list[tuple[str, Any]] = []
    for key, value in values.items():
        if key == "datasets" and isinstance(value, list) and value:
            keys += [(f"datasets.{name}", inner) for name, inner in value[0].items()]
            keys += [(f"datasets[{number}]", extra) for number, extra in enumerate(value[1:], 1)]
        elif key == "fsdp_config" and isinstance(value, dict):
            keys += [(f"fsdp_config.{name}", inner) for name, inner in value.items()]
        else:
            keys.append((key, value))
    return [(key, value) for key, value in keys if value is not None]


def _llama_factory(values: dict[str, Any], folder: Path) -> list[tuple[str, Any]]:
    """LLaMA-Factory's keys, the data set's registered name replaced by what `dataset_info.json` says of it."""
    names = values.get("dataset")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if not names:
        return list(values.items())
    data = folder / str(values.get("dataset_dir", "data"))
    info = data / "dataset_info.json"
    entry = (yaml.safe_load(info.read_text(encoding="utf-8")) if info.is_file() else {}).get(names[0], {})
    path = (
        entry.get("hf_hub_url") or f"./{values.get('dataset_dir', 'data')}/{entry.get('file_name', f'{names[0]}.json')}"
    )
    keys = [(key, path if key == "dataset" else value) for key, value in values.items()]
    return keys + [(f"dataset[{number}]", name) for number, name in enumerate(names[1:], 1)]


def _apply(result: Migration, flat: dict[str, Any], table: dict[str, Move | Gone], key: str, value: Any) -> None:
    rule = table.get(key) or table.get(key.partition("[")[0] + "[]")
    if rule is None and "." in key:
        rule = table.get(key.rpartition(".")[0] + ".*")
    if isinstance(value, Computed):
        result.unread.append(Lost(key, value.source, "computed when the script runs; set it by hand"))
    elif rule is None:
        result.unread.append(Lost(key, value, "unknown here"))
    elif isinstance(rule, Gone):
        result.gone.append(Lost(key, value, rule.reason))
    else:
        try:
            new_value, note = rule.convert(value)
        except ValueError as error:
            result.gone.append(Lost(key, value, str(error)))
            return
        flat[rule.to] = new_value
        if not rule.to.startswith("_"):
            result.moved.append(Moved(key, value, rule.to, new_value, note or rule.note))
        else:
            result.moved.append(Moved(key, value, rule.note, new_value, note))


def _note_full_fine_tuning(result: Migration, given: set[str]) -> None:
    """A source without an adapter trains all weights, which nothing here does."""
    adapts = {"script": any(key.startswith("LoraConfig.") for key in given), "axolotl": "adapter" in given}
    if not adapts.get(result.kind, True):
        result.notes.append("lora: the source has no adapter, it trains all weights; here a LoRA adapter is trained.")


def _fill_defaults(result: Migration, flat: dict[str, Any]) -> None:
    """What the source leaves to its trainer, said outright, where ours differs."""
    missing = {to: value for to, value in DEFAULTS[result.kind].items() if to not in flat}
    flat |= missing
    worked_out = {"optim.warmup_ratio"} if "_warmup_steps" in flat else set()
    shown = ", ".join(f"{to}={missing[to]}" for to in missing if not to.startswith("_") and to not in worked_out)
    if shown:
        result.notes.append(f"Left to the defaults of the trainer, which are said outright here: {shown}.")
    if flat.get("data.train_on") == "all":
        result.notes.append(
            "data.train_on: all trains on every token, as the source does; `assistant` (our default) leaves the prompt out."
        )


def _finish(result: Migration, flat: dict[str, Any], gpus: int | None) -> None:
    """The keys that several of the source's make together."""
    workers = gpus or flat.get("scaling.workers") or 1
    flat["scaling.workers"] = workers
    accumulation = flat.pop("_accumulation", 1)
    per_device = flat["optim.per_device_batch_size"]
    flat["optim.global_batch_size"] = workers * per_device * accumulation
    result.notes.append(
        f"optim.global_batch_size: {flat['optim.global_batch_size']} = {workers} workers x {per_device} rows x "
        f"{accumulation} accumulated; it stays when the number of workers changes."
    )
    if steps := flat.pop("_warmup_steps", None):
        _warmup(result, flat, steps)
    if flat.get("optim.schedule") != "cosine_with_min_lr":
        flat.pop("optim.min_lr_rate", None)
    if flat.get("lora.targets") == "attention+experts" and flat.get("lora.dropout"):
        flat["lora.dropout"] = 0.0
        result.notes.append("lora.dropout: 0, as PEFT allows no other with adapters on experts.")
    if "lora.alpha" not in flat and "lora.r" in flat:
        flat["lora.alpha"] = 2 * flat["lora.r"]
    path = flat.get("data.path")
    if isinstance(path, str) and not is_local_path(path) and path.endswith((".json", ".jsonl", ".parquet", ".csv")):
        flat["data.path"] = f"./{path}"


def _warmup(result: Migration, flat: dict[str, Any], steps: float) -> None:
    if steps < 1:
        flat["optim.warmup_ratio"] = steps
    elif flat.get("optim.max_steps"):
        flat["optim.warmup_ratio"] = round(min(0.99, steps / flat["optim.max_steps"]), 6)
    else:
        result.notes.append(
            f"warmup_steps={steps}: a share of the steps here (optim.warmup_ratio), and how many steps there are "
            "depends on the data; set it by hand."
        )


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested dictionaries, in the order in which our presets have them."""
    order = ["name", "model", "data", "lora", "optim", "scaling", "checkpoint", "evaluation", "tracking"]
    nested: dict[str, Any] = {}
    for key in sorted(flat, key=lambda key: _place(order, key.partition(".")[0])):
        section, _, leaf = key.partition(".")
        if leaf:
            nested.setdefault(section, {})[leaf] = flat[key]
        else:
            nested[section] = flat[key]
    return nested


def _place(order: list[str], section: str) -> int:
    return order.index(section) if section in order else len(order)


def _hint(result: Migration) -> str:
    return "Read, but computed when the script runs: " + _names(result.unread) if result.unread else ""


def _names(lost: Iterable[Lost]) -> str:
    return ", ".join(f"{item.key} ({item.value})" for item in lost)
