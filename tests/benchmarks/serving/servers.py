"""The services that are measured, each in processes of its own, on loopback and a free port."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

from ray_app.cluster.parts import SERVE_VARIABLES, base_environment, haproxy_environment, ray_directory
from ray_app.cluster.processes import free_ports


@contextmanager
def transformers_serve(model_dir: Path) -> Iterator[str]:
    """URL of `transformers serve` with the model."""
    [port] = free_ports(1)
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model_dir)]
    options = ["--port", str(port), "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    with _running([*command, *options], f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def bare_vllm(model_dir: Path, context_length: int) -> Iterator[str]:
    """URL of vLLM's own server with the model."""
    os.environ.setdefault(
        "VLLM_CPU_KVCACHE_SPACE", "1"
    )  # GiB; on CPU it would claim most of the memory, and find it taken
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    options = ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", str(context_length), "--max-num-seqs", "32"]
    with _running([*command, *options, *limits], f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def our_service(home: Path, roots: list[Path], generator: Mapping[str, Any] | None = None) -> Iterator[str]:
    """URL of the whole application: API, dispatcher and generator under Ray Serve."""
    # Read when Ray starts. Ray's processes are nicer than others by 15 unless told not to be: on a busy machine they would
    # wait for the very processes that they are compared with.
    os.environ.update(POLYTHINK_HOME=str(home), PATH=str(base_environment()["PATH"]), RAY_worker_niceness="0")
    os.environ.update(SERVE_VARIABLES | haproxy_environment())
    import ray
    from ray import serve

    from ray_app.app import build_app

    [port] = free_ports(1)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = {"home": home, "data_roots": os.pathsep.join(map(str, [home, *roots])), "generator": generator or {}}
        serve.run(build_app(settings))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(ray_directory(), ignore_errors=True)


@contextmanager
def _running(command: list[str], url: str) -> Iterator[str]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(f"{url}/health", process, log)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait_for(url: str, process: "subprocess.Popen[bytes]", log: IO[bytes], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{log.read().decode()[-3000:]}")
        try:
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise TimeoutError(url)
