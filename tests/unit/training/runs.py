"""Small runs without Ray: a run directory ready to train, and workers of one process each over gloo."""

import json
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import ROWS
from training.config import TrainConfig, apply_override, parse_config
from training.data import parse_rows, tokenize
from training.model.load import load
from training.rows.packing import pack
from training.run_dir import RunDir
from training.worker import PROBE, train_loop

START_TIMEOUT_S = 120


def make_config(base: Path, **changes: Any) -> TrainConfig:
    """A small run on CPU; `changes` are dotted keys with `__` for the dot."""
    values: dict[str, Any] = {
        "model": {"path": str(base)},
        "data": {"path": "./unused.jsonl", "max_length": 512, "current_date": date(2026, 1, 2)},
        "lora": {"r": 4},
        "optim": {"learning_rate": 1e-2, "max_steps": 4, "global_batch_size": 4, "warmup_ratio": 0.0},
        "scaling": {"device": "cpu"},
        "checkpoint": {"every_steps": 100},
    }
    for key, value in changes.items():
        values = apply_override(values, key.replace("__", "."), value)
    return parse_config(values).resolved()


def dequantised(base: Path, directory: Path, change: float = 0.0) -> Path:
    """`base` in bf16, one expert value apart from MXFP4's by `change`."""
    state = {name: value.data for name, value in load(base, precision="bf16").named_parameters()}
    state["model.layers.1.mlp.experts.down_proj"][3, 5, 7] += change
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    directory.mkdir()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_run(root: Path, base: Path, *, rows: int = 18, **changes: Any) -> RunDir:
    """A run directory whose data is tokenised: what a driver leaves for its workers."""
    from transformers import AutoTokenizer

    from training.harmony import Renderer

    config = make_config(base, **changes)
    run_dir = RunDir.create(root, config)
    records = [
        ROWS[n % len(ROWS)] | {"user": f"{n}. " * (1 + n % 5) + ROWS[n % len(ROWS)]["user"]} for n in range(rows)
    ]
    renderer = Renderer(AutoTokenizer.from_pretrained(base), date(2026, 1, 2))
    parsed = parse_rows((f"rows:{n}", record) for n, record in enumerate(records))
    examples = tokenize(parsed, renderer, config.data).examples
    if config.data.packing:
        examples = pack(examples, config.data.max_length)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(examples).save_to_disk(str(run_dir.data))
    (run_dir.root / PROBE).write_text("probe")
    return run_dir


def train(run_dir: RunDir, base: Path, workers: int = 1) -> None:
    """Trains in this process, or in `workers` processes of their own; raises what the first failing one raised."""
    settings = {"run_dir": run_dir.root, "base": base, "probe": "probe"}
    if workers == 1:
        train_loop(settings)
    else:
        run_workers(workers, train_loop, settings)


def run_workers(workers: int, function: Callable[..., None], *arguments: Any) -> None:
    """`function(*arguments)` in each of `workers` processes of one gloo group."""
    # A fork server imports the libraries once; forking pytest itself could copy another thread's held lock.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.training.runs", "trl.trainer.sft_trainer", "training.tracking.run"])
    faults: Any = context.SimpleQueue()
    port = _free_port()
    processes = [
        context.Process(target=_work, args=(rank, workers, port, dict(os.environ), faults, function, arguments))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(START_TIMEOUT_S)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    raised = []
    while not faults.empty():
        raised.append(faults.get())
    if raised:
        raise raised[0]
    codes = [process.exitcode for process in processes]
    assert not alive, "a worker hangs"
    assert codes == [0] * workers, codes


def _work(
    rank: int,
    workers: int,
    port: int,
    environment: dict[str, str],
    faults: Any,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    os.environ |= environment  # the fork server has that of the test which started it
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        function(*arguments)
    except Exception as error:
        traceback.print_exc()
        faults.put(error)
        os._exit(1)  # the others' connections break, as when a worker is killed
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def losses(run_dir: RunDir) -> list[float]:
    """Of each step, in order; a step that was done twice counts as it was done last."""
    return [loss for _, loss in sorted({line["step"]: line["loss"] for line in run_dir.metrics()}.items())]


def adapter(run_dir: RunDir) -> dict[str, Tensor]:
    return load_file(run_dir.adapter / "adapter_model.safetensors")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Between two adapters, over all values."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def effective(run_dir: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_dir.effective_path.read_text())
    return found
