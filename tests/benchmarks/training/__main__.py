"""Training speed and memory at gpt-oss's true shapes, recipe against recipe in one run: `python -m tests.benchmarks.training`.

Random weights are written as a true MXFP4 checkpoint (20b: 13 GB) and trained on through `launch`, that is Ray Train, SFTTrainer
and PEFT, as a job is. A table, and with `--out` JSON after each recipe and a plot. `--profile` times the parts of an expert layer
first. On a CPU: `--device cpu --shape tiny`.
"""

import argparse
import gc
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from tests.benchmarks.training.checkpoint import SHAPES, random_rows, write_random_base, write_rows
from tests.benchmarks.training.recipes import RECIPES, Recipe, configuration
from tests.benchmarks.training.report import machine, plot, table, with_ratios
from training.config import TrainConfig
from training.plan import plan
from training.run_dir import RunDir, read_json, write_json

T = TypeVar("T")


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()
    record: dict[str, Any] = {"shape": arguments.shape, "length": arguments.length, "machine": machine()}
    record |= {"results": [], "failed": []}
    if arguments.profile:
        record["kernels"] = _attempt(record, "kernels", partial(_profile_kernels, arguments))
    work = Path(tempfile.mkdtemp(prefix="polythink-bench-", dir=arguments.work))
    try:
        base = work / "base"
        model = write_random_base(base, arguments.shape, arguments.layers, weights=not arguments.no_disk)
        print(f"random {arguments.shape} checkpoint: {_size_gb(base):.1f} GB", flush=True)
        if arguments.profile:
            record["step"] = _attempt(record, "step", partial(_profile_step, base, model, arguments))
            _write(record, arguments)
        if not arguments.direct:
            start_ray()
        for name in arguments.recipes:
            if arguments.limit_s and time.monotonic() - started > arguments.limit_s:
                print(f"left out, {arguments.limit_s} s are over: {name}", flush=True)
                continue
            result = _attempt(record, name, partial(measure, RECIPES[name], base, model, work, arguments))
            record["results"] += [result] if result else []
            _write(record, arguments)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if record["results"]:
        print(table(record["results"]))
    _write(record, arguments)
    sys.exit(bool(record["failed"]))


def _attempt(record: dict[str, Any], name: str, run: Callable[[], T]) -> T | None:
    """`run()`; what fails is noted and leaves the others to be measured, since machines with GPUs are borrowed."""
    try:
        return run()
    except Exception:
        print(f"FAILED: {name}\n{traceback.format_exc()}", flush=True)
        record["failed"].append(name)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the workers want it


def _profile_kernels(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.benchmarks.training.kernels import profile, profile_table

    lines = profile(arguments.shape, arguments.device, arguments.profile_tokens)
    print(profile_table(lines), flush=True)
    return lines


def _profile_step(base: Path, model: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of our recipe that computes nothing twice."""
    from tests.benchmarks.training.in_memory import random_model
    from tests.benchmarks.training.step import profile_step, step_table
    from training.model.load import load

    recipe = RECIPES["ours, none"]
    config = _configuration(recipe, arguments)
    rows = random_rows(arguments.rows or recipe.rows, arguments.length, model["vocab_size"])
    lines = profile_step(config, base, rows, random_model if arguments.no_disk else load)
    print(step_table(lines), flush=True)
    return lines


def measure(
    recipe: Recipe, base: Path, model: dict[str, Any], work: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Trains `--steps` steps of one recipe and reads what the run wrote about itself."""
    from training.launch import launch

    config = _configuration(recipe, arguments)
    run_dir = RunDir.create(work / f"run-{list(RECIPES).index(recipe.name)}", config)
    write_rows(run_dir, config, model["vocab_size"], real_lengths=recipe.real_lengths)
    started = time.time()
    if getattr(arguments, "direct", False):
        _train_directly(run_dir, base, arguments.no_disk)
    else:
        launch(config, run_dir, base, (None, None))
    result = _result(recipe, config, run_dir, started, arguments.warm_up) | {"planned_gpu_gib": _planned(config, model)}
    print(json.dumps({key: value for key, value in result.items() if key not in ("losses", "effective")}), flush=True)
    return result


def _result(recipe: Recipe, config: TrainConfig, run_dir: RunDir, started: float, warm_up: int) -> dict[str, Any]:
    metrics = run_dir.metrics()
    warm = metrics[warm_up:]
    return {
        "recipe": recipe.name,
        "strategy": config.scaling.strategy,
        "workers": config.scaling.workers,
        "rows": config.optim.per_device_batch_size,
        "tokens_per_s_per_gpu": median(line["tokens_per_s_per_gpu"] for line in warm),
        "mfu": median(line["mfu"] for line in warm) if "mfu" in warm[-1] else None,
        "step_s": median(line["step_s"] for line in warm),
        "data_wait_s": median(line["data_wait_s"] for line in warm),
        "peak_gpu_gib": max((line["peak_gpu_gib"] for line in metrics if "peak_gpu_gib" in line), default=None),
        "host_rss_gib": max(line["host_rss_gib"] for line in metrics),
        "load_s": metrics[0]["load_s"],
        "start_to_first_step_s": metrics[0]["time"] - started,
        "first_step_s": metrics[0]["step_s"],
        "losses": [line["loss"] for line in metrics],
        "effective": read_json(run_dir.effective_path),
    }


def _configuration(recipe: Recipe, arguments: argparse.Namespace) -> TrainConfig:
    return configuration(
        recipe, device=arguments.device, strategy=arguments.strategy, workers=arguments.workers,
        length=arguments.length, steps=arguments.steps, rows=arguments.rows,
    )  # fmt: skip


def _train_directly(run_dir: RunDir, base: Path, no_disk: bool) -> None:
    """One worker in a process of its own, without Ray and without a process group."""
    from tests.benchmarks.training.in_memory import train_on_random_weights
    from training.worker import PROBE, train_loop

    (run_dir.root / PROBE).write_text("probe")
    settings = {"run_dir": run_dir.root, "base": base, "probe": "probe"}
    process = multiprocessing.get_context("spawn").Process(
        target=train_on_random_weights if no_disk else train_loop, args=(settings,)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the worker ended with {process.exitcode}")


def start_ray() -> None:
    import ray

    ray.init(
        address="local",  # without it Ray joins whatever cluster this machine last started
        runtime_env={"env_vars": {"RAY_TRAIN_ENABLE_PRINT_PATCH": "0", "TOKENIZERS_PARALLELISM": "false"}},
    )


def _planned(config: TrainConfig, model: dict[str, Any]) -> float | None:
    """What the plan says of the allocator's peak; None without a GPU."""
    parts = plan(config, model).gpu_memory_gib
    return None if parts is None else sum(parts.values()) - parts["slack"] - parts["context"]


def _write(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    if not arguments.out:
        return
    results = record["results"]
    write_json(arguments.out, record | {"results": with_ratios(results) if results else []})
    if results:
        gpu = record["machine"]["gpu"] or "CPU"
        title = f"gpt-oss-{arguments.shape} shapes, {arguments.length:,}-token rows, {gpu}"
        plot(results, title, arguments.out.with_suffix(".png"))


def _size_gb(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.iterdir()) / 1e9


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="20b")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model; rates are of the smaller one")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--strategy", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, help="per forward pass and GPU, instead of each recipe's own")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4, help="steps that are left out of rates")
    parser.add_argument("--limit-s", type=float, help="begin no recipe after so many seconds")
    parser.add_argument("--profile", action="store_true", help="time the parts of an expert layer, and of a whole step")
    parser.add_argument("--profile-tokens", type=int, default=16_384)
    parser.add_argument("--direct", action="store_true", help="without Ray: one worker, and less to wait for")
    parser.add_argument("--no-disk", action="store_true", help="weights are made where they go; with --direct")
    parser.add_argument("--work", help="directory for the checkpoint and the runs")
    parser.add_argument("--out", type=Path, help="write the results there as JSON, and a plot beside it")
    arguments = parser.parse_args()
    if arguments.no_disk and not arguments.direct:
        parser.error("--no-disk goes with --direct")
    return arguments


if __name__ == "__main__":
    main()
