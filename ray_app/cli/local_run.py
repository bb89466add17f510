"""`polythink train`: the driver as a child process on a Ray of its own, watched through its run directory."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

from ray_app.cli.console import LiveProgress, console
from training.__main__ import open_or_create
from training.errors import TrainingError
from training.run_dir import RunDir

POLL_S = 0.3
STOP_S = 30
"""For a driver that was told to stop, which ends its MLflow run first; then it is killed."""


def run(source: str, overrides: list[str], verbose: bool = False) -> dict[str, Any]:
    """Trains what `source` describes and returns the run's result; Ctrl-C or SIGTERM stops the driver and all its workers.

    Args:
        source: a preset's name, a YAML file, or a run directory to go on with.
        overrides: `key=value`.
        verbose: print the driver's log here instead of a progress bar.

    Raises:
        ConfigError: `source` or an override is faulty.
        TrainingError: the run failed; the message is its own.
    """
    run_dir = open_or_create(source, overrides)
    console.print(f"[dim]{run_dir.root}[/]", soft_wrap=True)
    before = run_dir.result()
    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))  # until there is a driver to stop
    with run_dir.log_path.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "training", str(run_dir.root)],
            stdout=None if verbose else log,
            stderr=None if verbose else log,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # so that Ctrl-C reaches it once, from here
        )
        try:
            signal.signal(signal.SIGTERM, _leave)  # by way of `finally`, as Ctrl-C
            if early:
                _leave(*early)
            _wait(child, run_dir, verbose)
        finally:
            if child.poll() is None:
                _end(child)
    return _result(run_dir, child.returncode, before)


def _leave(number: int, *_: Any) -> None:
    sys.exit(128 + number)


def _environment() -> dict[str, str]:
    return os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def _wait(child: subprocess.Popen[bytes], run_dir: RunDir, verbose: bool) -> None:
    if verbose:
        child.wait()
        return
    with LiveProgress() as live:
        while child.poll() is None:
            progress = run_dir.progress()
            live.update(progress.get("phase", "STARTING"), progress)
            time.sleep(POLL_S)
        progress = run_dir.progress()
        live.update(progress.get("phase", "STARTING"), progress)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stops the driver; kills it with its whole process group when it takes too long."""
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):  # a second signal ends the wait
        child.wait(STOP_S)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _result(run_dir: RunDir, exit_code: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """
    Args:
        before: what lay there before the driver started; one that dies early leaves it there.
    """
    result = run_dir.result()
    if result is None or result == before:
        last = "\n".join(run_dir.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
        raise TrainingError(f"the driver ended with exit code {exit_code}: {last}", hint=f"Log: {run_dir.log_path}")
    if result["status"] != "SUCCEEDED":
        error = result["error"]
        raise TrainingError(
            error["message"], hint=error.get("hint") or f"Log: {run_dir.log_path}", field=error.get("field")
        )
    return result
