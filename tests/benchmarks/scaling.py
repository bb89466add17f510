"""How training scales over the workers of one machine, at gpt-oss's true shapes: `python -m tests.benchmarks.scaling`.

Each way to train runs with 1, 2, 4 and 8 workers, as far as there are GPUs, on random weights, through `launch`, that is Ray Train,
as a job is: warm-up, then 20 steps. Rows a GPU stay the same (weak scaling), so that the ideal is the same speed a GPU at any size. A
table, and JSON after each run. On a CPU: `--device cpu --shapes tiny --length 64`.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.training.__main__ import measure, start_ray
from tests.benchmarks.training.checkpoint import SHAPES, write_random_base
from tests.benchmarks.training.recipes import RECIPES, Recipe
from tests.benchmarks.training.report import machine
from training.errors import PolythinkError
from training.planning.costs import GIB
from training.run_dir import RunDir, write_json

Result = dict[str, Any]


class Way(NamedTuple):
    recipe: Recipe
    strategy: str
    goal: float | None = None
    """Least efficiency from the fewest to the most workers."""


WAYS = {
    "ddp packed": Way(RECIPES["ours, full"], "ddp", goal=0.95),
    "fsdp2 packed": Way(RECIPES["ours, full"], "fsdp2", goal=0.90),
    "fsdp2 bf16": Way(RECIPES["stock best"], "fsdp2"),
    "notebook": Way(RECIPES["notebooks"], "fsdp2"),
    "ddp bf16": Way(RECIPES["stock best"], "ddp"),
}
"""`notebook` is the 120b notebook's own recipe: bf16, eager attention, the loop over experts, full shard, full recompute."""
DEFAULT_WAYS = ("ddp packed", "fsdp2 packed", "fsdp2 bf16", "notebook")
SPEEDUP_GOAL = 4.0
"""Of the packed ways over `notebook`, in tokens/s per GPU."""


def main() -> None:
    arguments = _arguments()
    started = time.monotonic()
    record: dict[str, Any] = {"machine": machine(), "length": arguments.length, "results": []}
    start_ray()
    work = Path(tempfile.mkdtemp(prefix="polythink-scaling-", dir=arguments.work))
    try:
        for shape in arguments.shapes:
            model = write_random_base(work / shape, shape, arguments.layers)
            for way, workers in ((way, workers) for workers in arguments.workers[::-1] for way in arguments.ways):
                if arguments.limit_s and time.monotonic() - started > arguments.limit_s:
                    print(f"left out, {arguments.limit_s:g} s are over: {shape}, {way}, {workers} workers", flush=True)
                    continue
                record["results"].append(_run(shape, way, workers, model, work, arguments))
                if arguments.out:
                    write_json(arguments.out, record | {"results": with_efficiency(record["results"])})
            shutil.rmtree(work / shape)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results = with_efficiency(record["results"])
    print(table(results), *goals(results), sep="\n")


def _run(
    shape: str, way: str, workers: int, model: dict[str, Any], work: Path, arguments: argparse.Namespace
) -> Result:
    """One training; what does not fit or fails is a result too."""
    recipe, strategy, _ = WAYS[way]
    result: Result = {"shape": shape, "way": way, "workers": workers}
    settings = argparse.Namespace(**vars(arguments) | {"workers": workers, "strategy": strategy})
    folder = work / f"{shape}-{way.replace(' ', '-')}-{workers}"
    folder.mkdir()
    with _host_peak() as peak:
        try:
            measured = measure(recipe, work / shape, model, folder, settings)
        except PolythinkError as error:
            return result | {"error": error.message.splitlines()[0][:300]}
    first = RunDir(next(folder.iterdir())).metrics()[0]
    shutil.rmtree(folder)
    return measured | result | {"load_s_by_rank": _by_rank(first, "load_s"), "host_peak_gib": peak[0]}


def _by_rank(metrics: dict[str, float], name: str) -> list[float]:
    """Of each rank; a single worker has no ranks."""
    ranks = [metrics[f"rank_{rank}/{name}"] for rank in range(len(metrics)) if f"rank_{rank}/{name}" in metrics]
    return ranks or [metrics[name]]


@contextmanager
def _host_peak() -> Iterator[list[float]]:
    """Most memory in use on this machine at once, over what was in use before, in GiB: all workers together."""
    before, peak, ended = psutil.virtual_memory().used, [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            peak[0] = max(peak[0], (psutil.virtual_memory().used - before) / GIB)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def with_efficiency(results: Sequence[Result]) -> list[Result]:
    """In the order of shapes, ways and workers, with each speed over the one with the fewest workers of its shape and way."""
    order = sorted(results, key=lambda result: (result["shape"], list(WAYS).index(result["way"]), result["workers"]))
    fewest: dict[tuple[str, str], float] = {}
    found = []
    for result in order:
        speed = result.get("tokens_per_s_per_gpu")
        if speed is not None:
            result = result | {"efficiency": speed / fewest.setdefault((result["shape"], result["way"]), speed)}
        found.append(result)
    return found


def table(results: Sequence[Result]) -> str:
    """One line a run; `load s` is from the first to the last rank that was ready."""
    head = (
        f"{'shape':6}{'way':14}{'workers':>8}{'tokens/s/GPU':>14}{'efficiency':>12}{'step s':>8}{'peak GiB':>10}"
        f"{'load s':>13}{'host peak GiB':>15}{'last loss':>11}"
    )
    lines = []
    for result in results:
        line = f"{result['shape']:6}{result['way']:14}{result['workers']:8}"
        if "error" in result:
            lines.append(f"{line}  {result['error'][:100]}")
            continue
        peak = result["peak_gpu_gib"]
        loads = f"{min(result['load_s_by_rank']):.1f}-{max(result['load_s_by_rank']):.1f}"
        lines.append(
            f"{line}{result['tokens_per_s_per_gpu']:14,.0f}{result['efficiency']:12.3f}{result['step_s']:8.2f}"
            f"{'-' if peak is None else format(peak, '.1f'):>10}{loads:>13}{result['host_peak_gib']:15.1f}"
            f"{result['losses'][-1]:11.3f}"
        )
    return "\n".join([head, *lines])


def goals(results: Sequence[Result]) -> list[str]:
    """Which goals were met, as far as the runs say something about them."""
    said = []
    done = [result for result in results if "error" not in result]
    for shape in dict.fromkeys(result["shape"] for result in done):
        most = {result["way"]: result for result in done if result["shape"] == shape}  # of each way, the most workers
        for name, result in most.items():
            goal = WAYS[name].goal
            if goal and result["workers"] > 1:
                said.append(
                    _verdict(f"{shape}, {name}, {result['workers']} workers: efficiency", result["efficiency"], goal)
                )
        if "notebook" in most:
            literal = most["notebook"]["tokens_per_s_per_gpu"]
            for name in ("ddp packed", "fsdp2 packed"):
                if name in most:
                    ratio = most[name]["tokens_per_s_per_gpu"] / literal
                    said.append(_verdict(f"{shape}, {name} over notebook", ratio, SPEEDUP_GOAL))
    return said


def _verdict(what: str, value: float, goal: float) -> str:
    return f"{what} {value:.3f}, goal {goal:.2f}: {'met' if value >= goal else 'missed'}"


def _arguments() -> argparse.Namespace:
    import torch

    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["20b", "120b"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(DEFAULT_WAYS))
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[n for n in (1, 2, 4, 8) if n <= max(gpus, 1)],
        help="default: 1, 2, 4 and 8, as far as there are GPUs; the most are measured first",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, help="fewer layers than the real model; rates are of the smaller one")
    parser.add_argument("--rows", type=int, help="per forward pass and GPU, instead of each recipe's own")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are left out of rates")
    parser.add_argument("--limit-s", type=float, help="begin no run after so many seconds")
    parser.add_argument("--work", help="directory for checkpoints (20b 14 GB, 120b 66 GB) and runs")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
