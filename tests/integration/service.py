"""A whole service for tests: `polythink up` in a home of its own on free ports, and a client that waits for jobs."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_app.cluster import lifecycle as cluster
from ray_app.cluster.parts import head_environment, ray_directory
from ray_app.cluster.processes import Process, spawn, stop
from ray_app.cluster.state import LOOPBACK, Cluster, Ports

AUTO = Ports(port=0, mlflow_port=0, dashboard_port=0, ray_port=0)
ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


class Service:
    """A running installation."""

    def __init__(self, cluster: Cluster, home: Path):
        self.cluster = cluster
        self.home = home
        self.node: Process | None = None
        """A second Ray node."""
        self.http = httpx.Client(base_url=cluster.url, timeout=60, trust_env=False)

    def add_node(self) -> None:
        """A second Ray node on this machine, in the place of one that is gone."""
        script = Path(__file__).parent / "faults" / "node.py"
        command = [sys.executable, str(script), f"{LOOPBACK}:{self.cluster.ports.ray_port}", str(ray_directory())]
        self.node = spawn("node", command, head_environment(self.cluster), self.home, self.home / "logs" / "node.log")
        deadline = time.monotonic() + 120
        while " is up" not in self.node.log_tail(200):
            assert self.node.alive, self.node.log_tail(40)
            assert time.monotonic() < deadline, self.node.log_tail(40)
            time.sleep(0.2)

    def node_id(self) -> str:
        """Ray's id of the second node."""
        assert self.node
        return re.findall(r"node (\w+) is up", self.node.log_tail(200))[0]

    def submit(self, **body: Any) -> str:
        answer = self.http.post("/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    def job(self, job_id: str) -> dict[str, Any]:
        return self.http.get(f"/jobs/{job_id}").raise_for_status().json()

    def wait(self, job_id: str, reached: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        """The job once `reached` holds, or the test's end with its log when it ended otherwise or took too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if reached(job):
                return job
            if job["status"] in ENDED or time.monotonic() > deadline:
                log = self.http.get(f"/jobs/{job_id}/logs?tail=40").text
                pytest.fail(f"{job['status']} {job['status_reason']} {job['error']} {job['progress']}\n{log}")
            time.sleep(0.3)

    def succeeded(self, job_id: str, timeout_s: float = 420) -> dict[str, Any]:
        return self.wait(job_id, lambda job: job["status"] == "SUCCEEDED", timeout_s)


@contextmanager
def running(home: Path, **variables: str) -> Iterator[Service]:
    """An installation in `home`; everything that it started has ended afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("POLYTHINK_", "MLFLOW_TRACKING_", "MLFLOW_REGISTRY_", "RAY_ADDRESS")):
                patch.delenv(name)
        for name, value in {"POLYTHINK_HOME": str(home), **variables}.items():
            patch.setenv(name, value)
        try:
            service = Service(cluster.up(AUTO), home)
            with service.http:
                yield service
            if service.node:
                stop(service.node, patience_s=10)
        finally:
            cluster.down()
