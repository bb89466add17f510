"""`polythink train`: what becomes of a driver that is told to stop. Its results are `test_cli`'s."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ray_app.cli import local_run

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # a container's first process may reap none
    except psutil.NoSuchProcess:
        return False


def test_a_driver_that_does_not_stop_in_time_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "STOP_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout
        worker = psutil.Process(int(child.stdout.readline()))
        local_run._end(child)
        assert child.returncode == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while is_alive(worker):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def test_sigterm_ends_the_driver_as_well(home: Path) -> None:
    command = [sys.executable, "-m", "ray_app.cli.main", "train", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 60
        while not (drivers := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert not is_alive(drivers[0])
