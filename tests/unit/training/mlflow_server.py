"""A real `mlflow server` on a free port of loopback, over whatever stores a test has."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from ray_app.cluster.processes import free_ports


@contextmanager
def mlflow_server(backend: str, artifact_root: str, log: Path) -> Iterator[str]:
    """The server's URL; clients reach artifacts themselves, as with `polythink up`."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", backend, "--no-serve-artifacts", "--default-artifact-root", artifact_root]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: "subprocess.Popen[bytes]", health: str, log: Path) -> None:
    for _ in range(2000):
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(health).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(log.read_text())
