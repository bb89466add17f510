"""Adding a trained adapter into its base, tensor by tensor on disk, so that a 120b model merges in a laptop's memory.

What the adapter does not touch is copied byte for byte. An adapted tensor becomes `W + scale * B @ A` in fp32, cast once to
its dtype. Formats:

- `original`: every tensor keeps its dtype, shape and place; MXFP4 experts are copied. Not possible for expert adapters
  over MXFP4 experts, whose values would have to change.
- `bf16`: MXFP4 experts are written dequantised, 3.5 times as large, as transformers' `[experts, in, out]`.
- `mxfp4`: adapted experts are quantised again, and the report says how much of the update survived that.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from training.errors import MergeError, ModelError
from training.merging.adapter import Adapter
from training.merging.layout import Format, Plan
from training.merging.rewrite import rewrite
from training.merging.shards import INDEX, SINGLE, Checkpoint
from training.merging.survival import Outcome
from training.merging.workplace import refuse_existing
from training.run_dir import read_json, write_json

RECORD = "polythink_merge.json"
"""The report, kept inside the merged model: what it was made from."""

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5"}
_NOT_QUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@dataclass
class MergeReport:
    """What a merge or a conversion did."""

    format: Format
    base: str
    base_fingerprint: str
    adapter: str | None
    adapter_sha256: str | None
    adapted_tensors: int
    copied_tensors: int
    size_bytes: int
    seconds: float = 0.0
    copied_xxh128: str = ""
    """Over all copied tensors, as they were read from the base; each was read back after it was written."""
    survival: dict[str, dict[str, float]] = field(default_factory=dict)
    """How much of the update is in the written weights: `plain` (attention and other 2-D weights), `experts`."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def merge(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    format: Format = "original",
    progress: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
    durable: bool = True,
) -> MergeReport:
    """Writes the model `base` + `adapter` to the new directory `out`.

    A merge that was killed is taken up by the next one with the same arguments.

    Args:
        base: model directory with safetensors shards, MXFP4 or bf16 experts.
        adapter: directory in PEFT's layout, ours or anybody's.
        out: must not exist.
        format: how experts are written; see the module's text.
        progress: draw a bar on the terminal.
        on_progress: called with bytes done and bytes in all.
        durable: wait until the bytes are on the disk; without, a power failure may leave holes in the model.

    Raises:
        MergeError: base and adapter do not fit, values are not finite, or the adapter changes nothing.
        ModelError: the base is incomplete.
        StorageError: `out` exists, or the disk is full.
    """
    base, out = Path(base), Path(out)
    refuse_existing(out)
    source = Checkpoint.open(base)
    _read_config(base)
    source_adapter = Adapter.open(adapter, source)
    plan = Plan.make(source, source_adapter.updates, format)
    report = MergeReport(
        format,
        str(base),
        source.fingerprint,
        str(adapter),
        source_adapter.sha256,
        len(plan.updates),
        len(plan.copied),
        plan.size,
    )
    return _write(plan, out, report, progress=progress, on_progress=on_progress, durable=durable)


def convert(model: Path, out: Path, format: Literal["bf16", "mxfp4"], *, progress: bool = True) -> MergeReport:
    """Writes `model` to the new directory `out` with its experts in bf16, or packed as MXFP4.

    Raises:
        MergeError: the model has no experts of gpt-oss's kind.
        ModelError: the model is incomplete.
        StorageError: `out` exists, or the disk is full.
    """
    model, out = Path(model), Path(out)
    refuse_existing(out)
    source = Checkpoint.open(model)
    _read_config(model)
    plan = Plan.make(source, {}, format)
    report = MergeReport(format, str(model), source.fingerprint, None, None, 0, len(plan.copied), plan.size)
    return _write(plan, out, report, progress=progress)


def finished_merge(base: Path, adapter: Path, out: Path, *, format: Format = "original") -> MergeReport | None:
    """The report of a model in `out` that was made from exactly these, or None: for taking up a job after a crash."""
    record = read_json(Path(out) / RECORD)
    if not record:
        return None
    source = Checkpoint.open(base)
    adapter_sha256 = Adapter.open(adapter, source).sha256
    wanted = {"format": format, "base_fingerprint": source.fingerprint, "adapter_sha256": adapter_sha256}
    return MergeReport(**record) if wanted.items() <= record.items() else None


def _write(plan: Plan, out: Path, report: MergeReport, **options: Any) -> MergeReport:
    started = time.monotonic()

    def finish(work: Path, outcome: Outcome) -> None:
        report.copied_xxh128 = outcome.copied_xxh128
        report.survival = {kind: counts.as_dict() for kind, counts in outcome.survival.items() if counts.values}
        if plan.updates and not any(counts.changed for counts in outcome.survival.values()):
            raise MergeError(
                "the merged model would equal the base: the adapter changes no value",
                hint="Was it trained? Its lora_B is zero before the first step.",
            )
        _write_small_files(plan, work)
        report.seconds = round(time.monotonic() - started, 2)
        write_json(work / RECORD, report.as_dict())

    identity = {"format": report.format, "base": report.base_fingerprint, "adapter": report.adapter_sha256}
    rewrite(plan, out, identity, finish, **options)
    return report


def _write_small_files(plan: Plan, work: Path) -> None:
    """Configuration, tokenizer, template, licences: everything at the top of the base but weights and their index."""
    base = plan.source.directory
    for path in sorted(base.iterdir()):
        skipped = (
            path.suffix in _WEIGHT_SUFFIXES or path.name in {INDEX, RECORD, "MLmodel"} or path.name.startswith(".")
        )
        if path.is_file() and not skipped:
            shutil.copyfile(path, work / path.name)
    _write_text(work / "config.json", _config(_read_config(base), plan.packed))
    if plan.same_shards and (base / INDEX).is_file():
        shutil.copyfile(base / INDEX, work / INDEX)
    elif list(plan.layout.sizes) != [SINGLE]:
        sizes, headers, places = plan.layout.sizes, plan.layout.headers, plan.layout.places
        total = sum(size - len(headers[file]) for file, size in sizes.items())
        weight_map = {name: file for name, (file, _) in sorted(places.items())}
        _write_text(work / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _read_config(base: Path) -> dict[str, Any]:
    try:
        config = read_json(base / "config.json")
    except ValueError as error:
        raise ModelError(f"{base / 'config.json'} is not JSON: {error}", hint="Fetch the model again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{base} has weights and no config.json", hint="Fetch the model again.")
    return config


def _config(config: dict[str, Any], packed: bool) -> dict[str, Any]:
    """The base's config with rope readable in both forms, and the experts' form as it was written.

    transformers 4 reads rope_theta and rope_scaling, and silently takes theta 10,000 without them; 5 reads
    rope_parameters, and takes the old keys when that is missing.
    """
    config = dict(config)
    if "rope_parameters" in config:
        rope = dict(config["rope_parameters"])
        config.setdefault("rope_theta", rope.pop("rope_theta", None))
        config.setdefault("rope_scaling", rope if rope.get("rope_type", "default") != "default" else None)
    elif "rope_theta" in config:
        rope = config.get("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = {**rope, "rope_theta": config["rope_theta"]}
    if not packed:
        config.pop("quantization_config", None)
    elif "quantization_config" not in config:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_QUANTIZED}
    return config


def _write_text(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
