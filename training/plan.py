"""What a run will need: GPU and host memory, disk, steps, time; and what to change where it does not fit.

Estimates from `training.planning.costs`: memory within 15 % of what was measured, time within a factor of two. Loads without torch.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from training.config import TrainConfig, is_local_path
from training.errors import ConfigError
from training.model.base import checked
from training.planning.costs import (
    CPU_S_PER_TOKEN_AND_PARAMETER,
    FSDP2_RATE,
    GIB,
    GPUS,
    OPTIMIZER_BYTES,
    decoding_s,
    gpu_memory,
    step_s,
)
from training.planning.sizes import BF16, MXFP4, Sizes, find_sizes
from training.rows.records import local_files

AUTO_MARGIN = 0.1  # of the estimate, left free where the plan chooses: memory is estimated within 15 %
CONTEXT_GIB = 0.8  # CUDA context and libraries' workspaces, outside of PyTorch's allocator
SLACK = 0.04  # share of the peak that the caching allocator holds and cannot use

START_S = {"cuda": 60, "cpu": 25}  # Ray workers, imports, process group
READ_GB_PER_S = 2.0  # base from local NVMe
MERGE_GB_PER_S = 13.8 / 120  # 20b's shards in two minutes (published for a merge of the same kind)
COMPILE_S = 60  # first steps with torch.compile
MERGE_HOST_GIB = 10  # peak of such a merge
WORKER_HOST_GIB = {"cuda": 4.0, "cpu": 0.65}  # resident memory of a worker after imports; CUDA: an estimate
DRIVER_HOST_GIB = 1.0
GPUS_PER_NODE = 8

KNOWN_ROWS = {"HuggingFaceH4/Multilingual-Thinking": (1000, 1100.0)}
"""Rows and mean tokens of data sets that plans need before anything is fetched."""
TEMPLATE_TOKENS = 75  # of the chat template around a row
CHARACTERS_PER_TOKEN = 4.0


class Plan(BaseModel):
    """An estimate; None where the model or the data is not known before it is fetched."""

    model: str
    parameters: int | None
    active_parameters: int | None
    workers: int
    strategy: str
    gpu_memory_gib: dict[str, float] | None
    """By part, of the worker that needs most; None on CPU."""
    gpu_total_gib: float | None
    fits: dict[str, bool] | None
    """For every GPU known here."""
    fits_requested: bool | None
    """Whether it fits `scaling.accelerator_type`."""
    host_memory_gib: float | None
    """Of one node."""
    disk_gib: float | None
    rows: int | None
    tokens: int | None
    steps: int | None
    tokens_per_s_per_gpu: float | None
    training_s: float | None
    total_s: float | None
    """With start, merge and evaluation, without downloads and waiting."""
    advice: list[str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def plan(
    config: TrainConfig,
    model: dict[str, Any] | None = None,
    *,
    rows: int | None = None,
    mean_tokens: float | None = None,
) -> Plan:
    """Estimates the run that `config` describes.

    Args:
        config: resolved or not.
        model: a `config.json`; None looks for the model's own.
        rows: to train on; None counts a local JSONL file, or knows the data set, or leaves it open.
        mean_tokens: of a row, rendered.
    """
    asked, config = config.recompute, config.resolved()
    sizes = Sizes.from_config(model) if model else find_sizes(config.model)
    workers = config.scaling.worker_range[0]
    cuda = config.scaling.device == "cuda"
    known_rows, known_tokens = _rows(config)
    rows, mean_tokens = rows or known_rows, mean_tokens or known_tokens
    steps = _steps(config, rows, mean_tokens)
    found: dict[str, Any] = {}
    notes = ["estimates: memory within 15 %, time within a factor of two"]
    if sizes is None:
        notes.append(f"the sizes of {config.model.path} are not known before it is fetched")
    else:
        found |= {"parameters": sizes.parameters, "active_parameters": sizes.active_parameters}
        found |= {"host_memory_gib": host_memory_gib(config, sizes), "disk_gib": disk_gib(config, sizes)}
        if cuda:
            found |= _gpu(config, sizes)
            if asked == "auto":
                notes.append(f"recompute=auto is {config.recompute} here")
        if mean_tokens:
            found |= _times(config, sizes, steps, mean_tokens)
    if rows is None:
        notes.append(f"the rows of {config.data.path} are not counted before they are read")
    if workers != config.scaling.worker_range[1]:
        notes.append(f"elastic: figures are for {workers} workers, the fewest")
    unknown = dict.fromkeys(Plan.model_fields)
    return Plan(**unknown | found | {
        "model": config.model.path, "workers": workers, "strategy": config.scaling.strategy, "rows": rows, "steps": steps,
        "tokens": round(rows * mean_tokens) if rows and mean_tokens else None,
        "advice": found.get("advice", []), "notes": notes,
    })  # fmt: skip


def check_local_paths(config: TrainConfig) -> None:
    """That what `config` names on this machine is there. What the hub has is for the job to find out.

    Raises:
        ModelError, ConfigError: the model's directory or a file of rows is missing.
    """
    if config.model.is_local:
        checked(Path(config.model.path).expanduser())
    for name in ("path", "held_out_path"):
        path = getattr(config.data, name)
        if path and (is_local_path(path) or path.startswith("file:")):
            local_files(path, f"data.{name}")


def pick_recompute(config: TrainConfig) -> Literal["full", "selective", "none"]:
    """The fastest that fits the GPU that is asked for, with room for what the plan does not see; `full` where that is not known.

    Args:
        config: resolved but for this.
    """
    sizes, sizes_gib = find_sizes(config.model), [GPUS[name][0] for name in _named(config)]
    if sizes is None or not sizes_gib:
        return "full"
    ways: list[Literal["none", "selective"]] = ["none", "selective"]
    for way in ways[: 1 if _weights(config, sizes) == "bf16" else 2]:
        needed = sum(_parts(_changed(config, {"recompute": way}), sizes).values())
        if needed * (1 + AUTO_MARGIN) <= min(sizes_gib):
            return way
    return "full"


def check_memory(config: TrainConfig, sizes: Sizes | None, gpu: str | None = None, gpu_gib: float = 0) -> None:
    """That a worker fits its GPU, by this plan; nothing is checked where model or GPU are not known.

    Args:
        config: resolved.
        gpu: the card that is there, of `gpu_gib`; None takes the largest of the kind that the configuration asks for.

    Raises:
        ConfigError: it does not fit, and `scaling.ignore_memory_plan` is not set.
    """
    named = _named(config)
    if gpu is None and named:
        gpu = max(named, key=lambda name: GPUS[name][0])
        gpu_gib = GPUS[gpu][0]
    if sizes is None or gpu is None or config.scaling.device == "cpu" or config.scaling.ignore_memory_plan:
        return
    parts = _parts(config, sizes)
    if sum(parts.values()) > gpu_gib:
        shown = ", ".join(f"{name} {part:.1f}" for name, part in parts.items() if part >= 0.05)
        advice = "; ".join(_advice(config, sizes, gpu_gib))
        raise ConfigError(
            f"scaling: a worker needs {sum(parts.values()):.1f} GiB of GPU memory ({shown}), and {gpu} has {gpu_gib:.1f}",
            hint=f"{advice[:1].upper()}{advice[1:]}. scaling.ignore_memory_plan=true starts it all the same.",
            field="scaling",
        )


def check_evaluation(config: TrainConfig, sizes: Sizes | None) -> None:
    """That one GPU holds the base, and the merged model, for an evaluation; a proof reads what is larger layer by layer.

    Args:
        config: resolved, with an evaluation.

    Raises:
        ConfigError: it does not, and `scaling.ignore_memory_plan` is not set.
    """
    named = _named(config)
    unknown = sizes is None or (config.scaling.accelerator_type and not named)
    if unknown or config.scaling.device == "cpu" or config.scaling.ignore_memory_plan:
        return
    assert sizes is not None
    gpu = max(named or GPUS, key=lambda name: GPUS[name][0])
    base_gib, packed_gib, plain_gib = (
        sizes.stored_bytes(value_bytes) / GIB + CONTEXT_GIB
        for value_bytes in (MXFP4 if sizes.packed else BF16, MXFP4, BF16)
    )
    merged_gib = {"bf16": plain_gib, "mxfp4": packed_gib}.get(config.merge_format, base_gib)
    needed = max(base_gib, merged_gib)
    if needed > GPUS[gpu][0]:
        change = f"merge_format=mxfp4 ({packed_gib:.1f} GiB, and some of the training is lost), or "
        raise ConfigError(
            f"evaluation: one GPU must hold {'the base' if base_gib == needed else 'the merged model'}, {needed:.1f} GiB, "
            f"and {gpu} has {GPUS[gpu][0]:.1f}",
            hint=f"Set {change if max(base_gib, packed_gib) <= GPUS[gpu][0] else ''}evaluation=null. "
            "scaling.ignore_memory_plan=true starts it all the same.",
            field="evaluation",
        )


def _named(config: TrainConfig) -> list[str]:
    """The known GPUs that the configuration asks for: Ray says A100 or A100-40G."""
    asked = config.scaling.accelerator_type
    return [name for name in GPUS if asked and name.startswith(asked)]


def host_memory_gib(config: TrainConfig, sizes: Sizes) -> float:
    """Of one node, its workers and the driver together; a merge or an evaluation comes after the workers."""
    device = config.scaling.device
    workers = min(config.scaling.worker_range[1], GPUS_PER_NODE)
    largest = sizes.experts * 2 * sizes.intermediate * sizes.hidden * 4 / GIB  # an expert tensor on its way, fp32
    worker = WORKER_HOST_GIB[device] + largest
    if device == "cpu":
        tokens = config.optim.per_device_batch_size * config.data.max_length
        value_bytes = 4 if config.precision == "fp32" else BF16
        worker += sum(
            gpu_memory(
                sizes, tokens=tokens, weights="bf16", recompute=config.recompute, value_bytes=value_bytes,
                adapter_parameters=_adapter(config, sizes), eager_length=config.data.max_length,
            ).values()
        )  # fmt: skip
    merge = min(MERGE_HOST_GIB, 3 * sizes.disk_bytes / GIB)
    return round(DRIVER_HOST_GIB + max(workers * worker, merge), 2)


def disk_gib(config: TrainConfig, sizes: Sizes) -> float:
    """The base, the merged model, and the kept checkpoints of the adapter with its optimizer."""
    checkpoint = _adapter(config, sizes) * (4 + OPTIMIZER_BYTES)
    return round((2 * sizes.disk_bytes + (config.checkpoint.keep + 1) * checkpoint) / GIB, 3)


def _gpu(config: TrainConfig, sizes: Sizes) -> dict[str, Any]:
    parts = _parts(config, sizes)
    total = sum(parts.values())
    named = _named(config)
    fits = {name: total <= size for name, (size, _) in GPUS.items()}
    fits_requested = all(fits[name] for name in named) if named else None
    target = named[0] if named else "H100"
    return {
        "gpu_memory_gib": {name: round(part, 2) for name, part in parts.items()},
        "gpu_total_gib": round(total, 2),
        "fits": fits,
        "fits_requested": fits_requested,
        "advice": [] if fits[target] else _advice(config, sizes, GPUS[target][0]),
    }


def _parts(config: TrainConfig, sizes: Sizes) -> dict[str, float]:
    eager = config.attention == "eager"
    parts = gpu_memory(
        sizes,
        tokens=config.optim.per_device_batch_size * config.data.max_length,
        weights=_weights(config, sizes),
        recompute=config.recompute,
        shards=min(config.scaling.worker_range[0], GPUS_PER_NODE) if config.scaling.strategy == "fsdp2" else 1,
        value_bytes=4 if config.precision == "fp32" else BF16,
        adapter_parameters=_adapter(config, sizes),
        expert_adapters=config.lora.targets == "attention+experts",
        eager_length=config.data.max_length if eager else 0,
    )
    return parts | {"slack": SLACK * sum(parts.values()), "context": CONTEXT_GIB}


def _weights(config: TrainConfig, sizes: Sizes) -> str:
    """The experts' in the costs' words. What is stored in bf16 is taken for values that MXFP4 does not have."""
    if config.weights == "mxfp4" and sizes.packed:
        return "mxfp4"
    return "frozen" if config.experts == "frozen" and sizes.gpt_oss else "bf16"


def _advice(config: TrainConfig, sizes: Sizes, gpu_gib: float) -> list[str]:
    """The fewest of the usual changes, in the usual order, after which the run fits a GPU of that size."""
    changes: list[tuple[str, dict[str, Any]]] = [
        ("recompute=full", {"recompute": "full"}),
        ("optim.per_device_batch_size=1", {"optim": {"per_device_batch_size": 1}}),
        ("weights=mxfp4", {"weights": "mxfp4"}),
        ("attention=flex_attention", {"attention": "flex_attention"}),
        ("scaling.strategy=fsdp2", {"scaling": {"strategy": "fsdp2"}}),
    ]
    made: list[str] = []
    before = sum(_parts(config, sizes).values())
    for text, change in changes:
        changed = _changed(config, change)
        now = sum(_parts(changed, sizes).values())
        if now < before:
            config, before = changed, now
            made.append(f"{text} ({now:.1f} GiB)")
        if now <= gpu_gib:
            return [f"set {change}" for change in made]
    workers = config.scaling.worker_range[0]
    return [f"set {change}" for change in made] + [
        f"it still does not fit {gpu_gib:.1f} GiB: use more than {workers} workers with fsdp2, larger GPUs, or a shorter data.max_length"
    ]


def _changed(config: TrainConfig, change: dict[str, Any]) -> TrainConfig:
    values = config.model_dump()
    for key, value in change.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    return TrainConfig.model_validate(values)


def _times(config: TrainConfig, sizes: Sizes, steps: int | None, mean_tokens: float) -> dict[str, Any]:
    scaling, optim = config.scaling, config.optim
    cuda = scaling.device == "cuda"
    workers = scaling.worker_range[0]
    length = config.data.max_length if config.data.packing else min(mean_tokens, config.data.max_length)
    tokens = optim.per_device_batch_size * length
    if cuda:
        rate = next(
            (rate for name, (_, rate) in GPUS.items() if name.startswith(scaling.accelerator_type or "H200")), 1.0
        )
        pass_s = step_s(
            sizes, tokens=tokens, weights=_weights(config, sizes), recompute=config.recompute,
            eager=config.attention == "eager", compute_rate=rate,
        )  # fmt: skip
    else:
        pass_s = tokens * sizes.active_parameters * CPU_S_PER_TOKEN_AND_PARAMETER
    if scaling.strategy == "fsdp2" and workers > 1:
        pass_s /= FSDP2_RATE
    found = {"tokens_per_s_per_gpu": round(tokens / pass_s, 1)}
    if steps is None:
        return found
    training_s = steps * optim.accumulation_steps(workers) * pass_s
    disk_gb = sizes.disk_bytes / 1e9
    around = START_S[scaling.device] + disk_gb / READ_GB_PER_S + disk_gb / MERGE_GB_PER_S
    around += COMPILE_S if config.compile else 0
    if config.evaluation:
        answers = 2 * config.evaluation.prompts * config.evaluation.max_new_tokens  # of the base and of the tuned model
        around += decoding_s(sizes, tokens=answers, batch=config.evaluation.batch_size, device=scaling.device)
    return found | {"training_s": round(training_s, 1), "total_s": round(training_s + around, 1)}


def _adapter(config: TrainConfig, sizes: Sizes) -> int:
    return sizes.adapter_parameters(config.lora.r, experts=config.lora.targets == "attention+experts")


def _steps(config: TrainConfig, rows: int | None, mean_tokens: float | None) -> int | None:
    if config.optim.max_steps:
        return config.optim.max_steps
    if rows is None:
        return None
    if config.data.held_out_path is None:
        rows = round(rows * (1 - config.data.held_out_share))
    if config.data.packing and mean_tokens:
        rows = math.ceil(rows * mean_tokens / config.data.max_length)
    return max(1, round(config.optim.epochs * math.ceil(rows / config.optim.global_batch_size)))


def _rows(config: TrainConfig) -> tuple[int | None, float | None]:
    """Rows and mean tokens of the data, as far as they are known without a tokenizer."""
    path = config.data.path
    if path in KNOWN_ROWS:
        return KNOWN_ROWS[path]
    if is_local_path(path) and path.endswith(".jsonl"):
        try:
            lines = [line for line in Path(path).expanduser().read_text(encoding="utf-8").split("\n") if line.strip()]
            return len(lines), sum(map(_row_tokens, lines)) / max(1, len(lines))
        except (OSError, ValueError):
            return None, None  # for the job to report, with line numbers
    return None, None


def _row_tokens(line: str) -> float:
    row = json.loads(line)
    messages = row.get("messages") if isinstance(row, dict) else None
    texts = [
        str(message.get(key) or "")
        for message in messages or []
        if isinstance(message, dict)
        for key in ("content", "thinking", "reasoning", "reasoning_content")
    ]
    return TEMPLATE_TOKENS + sum(map(len, texts or [line])) / CHARACTERS_PER_TOKEN
