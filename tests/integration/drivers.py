"""`python -m training` as people and Ray Jobs start it: a process of its own, watched from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import ROWS
from training.run_dir import RunDir

WAIT_S = 500
"""For anything to happen on a machine that does much else."""


@dataclass
class Driver:
    """A running driver and what it started."""

    process: subprocess.Popen[bytes]
    home: Path
    log: Path
    seen: dict[int, psutil.Process]
    """Every process below the driver that was ever seen, by its id."""

    @property
    def run_dir(self) -> RunDir:
        """Its run directory, once it is there; the newest, where a home holds several."""
        wait_until(lambda: self._run_dirs() or self.process.poll() is not None, "a run directory")
        return RunDir.open(max(self._run_dirs(), key=lambda path: path.stat().st_ctime))

    def _run_dirs(self) -> list[Path]:
        return [path.parent for path in self.home.glob("runs/*/config.json")]

    def look(self) -> None:
        """Takes down which processes there are."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.seen |= {process.pid: process for process in below}

    def wait_for_step(self, step: int) -> None:
        """Until a step is logged."""

        def reached() -> bool:
            self.look()
            assert self.process.poll() is None, self.text()
            metrics = self.run_dir.metrics()
            return bool(metrics) and metrics[-1]["step"] >= step

        wait_until(reached, f"step {step}")

    def train_workers(self) -> list[psutil.Process]:
        """The processes of the training workers, oldest first."""
        self.look()
        named = [p for p in self.seen.values() if p.is_running() and any("RayTrainWorker" in s for s in _cmdline(p))]
        return sorted(named, key=lambda process: process.create_time())

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Its exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.2)
        assert self.process.poll() is not None, f"the driver still runs:\n{self.text()}"
        return int(self.process.returncode)

    def left_over(self, grace_s: float = 15) -> list[str]:
        """Command lines of what it started and did not end."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=grace_s)
        return [" ".join(_cmdline(process)) for process in alive]

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextmanager
def driving(
    home: Path, *arguments: str | Path, address: str | None = None, module: str = "training"
) -> Iterator[Driver]:
    """A driver started with `arguments`, on the cluster at `address` or one of its own; what is left of it is killed."""
    environment = os.environ | {
        "POLYTHINK_HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_worker_niceness": "0",  # at Ray's 15, two busy processes leave its workers 3 % of two cores
    }
    environment.pop("RAY_ADDRESS", None)
    if address:
        environment["RAY_ADDRESS"] = address
    log = home / f"driver-{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).resolve().parents[2],
        )
    driver = Driver(process, home, log, {})
    try:
        yield driver
    finally:
        driver.look()
        process.kill()
        for each in driver.seen.values():
            with suppress(psutil.NoSuchProcess):  # Ray's end by themselves, one after the other, while they are killed
                each.kill()
        process.wait()
        driver.left_over()  # until they are gone: one that is in a system call may still write


def wait_until(happened: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


def write_job(directory: Path, base: Path, **sections: dict[str, Any] | None) -> Path:
    """A configuration file of a small FSDP2 run on two CPU workers, and its rows."""
    *train, held_out = ROWS
    _write_rows(directory / "rows.jsonl", [row | {"user": f"{row['user']} {n}"} for n in range(10) for row in train])
    _write_rows(directory / "held_out.jsonl", [held_out])
    config: dict[str, Any] = {
        "name": "small",
        "model": {"path": str(base)},
        "data": {"path": "./rows.jsonl", "max_length": 512, "held_out_path": "./held_out.jsonl"},
        "lora": {"r": 4, "dropout": 0.1},
        "optim": {"learning_rate": 1e-2, "max_steps": 6, "global_batch_size": 4, "per_device_batch_size": 2},
        "scaling": {"workers": 2, "device": "cpu", "strategy": "fsdp2", "timeout_s": 60},
        "checkpoint": {"every_steps": 2},
        "evaluation": None,
    }
    for name, section in sections.items():
        config[name] = config[name] | section if section and config[name] else section
    path = directory / "job.json"
    path.write_text(json.dumps(config))
    return path


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
