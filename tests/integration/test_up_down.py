"""One installation, for real: up, asked over HTTP, up again, down; with free ports and a home of its own."""

from pathlib import Path

import httpx
import psutil
import pytest

from ray_app.cluster import deploy
from ray_app.cluster import lifecycle as cluster
from ray_app.cluster import state as cluster_state
from ray_app.cluster.state import Ports

AUTO = Ports(port=0, mlflow_port=0, dashboard_port=0, ray_port=0)


def listening_beyond_loopback(pids: set[int]) -> list[str]:
    connections = [c for c in psutil.net_connections("tcp") if c.pid in pids and c.status == psutil.CONN_LISTEN]
    return [
        f"{c.laddr.ip}:{c.laddr.port}"
        for c in connections
        if c.laddr.ip not in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    ]


def running(process: psutil.Process) -> bool:
    """A child whose parent died is a zombie until whatever is process 1 here gets to it."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_up_serves_on_loopback_and_down_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # of some other cluster: must not matter
    try:
        up = cluster.up(AUTO)
        family = {
            child.pid: child
            for process in up.processes.values()
            for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        }
        assert httpx.get(f"{up.url}/readyz").json() == {"status": "ready"}
        assert httpx.get(f"{up.url}/jobs").json()["jobs"] == []
        assert httpx.get(f"{up.mlflow_url}/health").text == "OK"
        assert listening_beyond_loopback(set(family)) == []
        [haproxy] = [child for child in family.values() if child.name() == "haproxy"]
        listening = [c.laddr.port for c in haproxy.net_connections() if c.status == psutil.CONN_LISTEN]
        assert listening == [up.ports.port]

        pids = {name: process.pid for name, process in up.processes.items()}
        again = cluster.up(Ports())  # asks for nothing in particular: what runs is right
        assert {name: process.pid for name, process in again.processes.items()} == pids

        mlflow = psutil.Process(pids["mlflow"])
        server = mlflow.children(recursive=True)
        mlflow.kill()  # its server lives on and holds the port
        mlflow.wait()
        mended = cluster.up(Ports())
        assert not any(running(process) for process in server)
        assert mended.processes["ray"].pid == pids["ray"]
        assert httpx.get(f"{mended.mlflow_url}/health").text == "OK"

        assert httpx.get(f"{up.dashboard_url}/api/jobs/").json() == []  # what `ray job submit` talks to
    finally:
        cluster.down()
    assert not deploy.healthy(up)
    assert [child for child in family.values() if running(child)] == []
    assert cluster_state.load() is None
