"""How Ray and MLflow are started: their command lines, environments and secrets."""

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ray_app.cluster import haproxy
from ray_app.cluster.processes import environment, free_ports
from ray_app.cluster.state import LOOPBACK, Cluster
from ray_app.settings import Settings
from training.run_dir import polythink_home


def ray_head_command(cluster: Cluster, num_cpus: int | None) -> list[str]:
    client_port, agent_port = free_ports(2)
    cpus = num_cpus or max(4, os.cpu_count() or 1)  # the service's actors and a small job's workers want four at least
    return [
        tool("ray"), "start", "--head", "--block", "--disable-usage-stats", "--log-style=record",
        f"--node-ip-address={cluster.host}", f"--port={cluster.ports.ray_port}", f"--num-cpus={cpus}",
        f"--dashboard-host={LOOPBACK}", f"--dashboard-port={cluster.ports.dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}", f"--ray-client-server-port={client_port}",
        f"--temp-dir={ray_directory()}",
    ]  # fmt: skip


def ray_node_command(cluster: Cluster, address: str) -> list[str]:
    return [
        tool("ray"), "start", "--block", "--disable-usage-stats", "--log-style=record",
        f"--address={address}", f"--node-ip-address={cluster.host}", f"--dashboard-agent-listen-port={free_ports(1)[0]}",
        f"--temp-dir={ray_directory()}",
    ]  # fmt: skip


def mlflow_command(cluster: Cluster) -> list[str]:
    root = polythink_home() / "mlflow"
    (root / "artifacts").mkdir(parents=True, exist_ok=True)
    return [
        tool("mlflow"), "server", "--host", LOOPBACK, "--port", str(cluster.ports.mlflow_port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}",
        # models are registered where the merge wrote them; a server that serves artifacts refuses local sources
        "--no-serve-artifacts", "--default-artifact-root", (root / "artifacts").as_uri(),
    ]  # fmt: skip


def tool(name: str) -> str:
    """A command of the environment that this runs in."""
    return str(Path(sys.executable).parent / name)


def base_environment() -> dict[str, str | None]:
    """Our own tools first on PATH (drivers of `ray job submit` inherit it), nothing told to anybody outside."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "POLYTHINK_HOME": str(polythink_home()),
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # evaluates traces in processes of its own; not used here
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }


SERVE_VARIABLES = {
    # Calls between proxy and replicas: Ray's own go through its object store and take twice as long (4 ms instead of 8
    # on two busy cores). The port is there with or without it (see ray_app.loopback).
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Our code and its handles in the replica's own event loop: two threads less that every message passes.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""0 keeps Serve's own proxy."""


def service_variables(cluster: Cluster) -> dict[str, str]:
    """What the service's replicas must know, whoever started Ray."""
    # On a Ray of somebody else's these stand in Serve's file, which its dashboard shows, a password in a database's URL
    # included: whoever reaches that dashboard may run code on the cluster and read every replica's variables anyway.
    settings = {name: value for name, value in os.environ.items() if is_setting(name)}
    places = {
        "POLYTHINK_HOME": str(polythink_home()),
        "POLYTHINK_RAY_DASHBOARD_URL": cluster.dashboard_url,
        "MLFLOW_TRACKING_URI": cluster.mlflow_url,
    }
    variables = SERVE_VARIABLES | settings | places
    if cluster.is_open or os.environ.get("POLYTHINK_API_KEYS_FILE"):  # on loopback only if asked for
        variables["POLYTHINK_API_KEYS_FILE"] = str(keys_path())
    return variables


def is_setting(variable: str) -> bool:
    """Whether the service reads `variable`: POLYTHINK_MAX_RUNNING_JOBS, POLYTHINK_GENERATOR__NUM_GPUS, …"""
    prefix, _, name = variable.partition("_")
    return prefix == "POLYTHINK" and name.partition("__")[0].lower() in Settings.model_fields


def head_environment(cluster: Cluster) -> dict[str, str]:
    """What the head, and so every replica, driver and worker on it, runs in."""
    autoscaler_metrics, dashboard_metrics = free_ports(2)
    changes = (
        base_environment() | service_variables(cluster) | auth_environment(token_path() if cluster.is_open else None)
    )
    changes |= {
        "RAY_ADDRESS": None,
        "RAY_API_SERVER_ADDRESS": cluster.dashboard_url,  # else job clients look for a head in Ray's default directory
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a head has nobody to hand its replicas to
        # A proxy that was killed is replaced at its third missed check: 20 to 30 s at Ray's 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        **haproxy_environment(),
        "AUTOSCALER_METRIC_PORT": str(autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(dashboard_metrics),
    }
    if not cluster.is_open:
        # Ray listens on every interface, even with --node-ip-address=127.0.0.1, unless multi-node is off.
        changes["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return environment(**changes)


def haproxy_environment() -> dict[str, str]:
    """HAProxy in the place of Serve's own proxy: 7 ms less a request on two cores; off where it does not run."""
    directory = ray_directory() / "ha"
    socket = directory / ("0" * 56) / "s.1234567.tmp"  # in the directory of a node's id, by the name it has at first
    if os.environ.get(HAPROXY) == "0" or len(str(socket)) > 107 or not _haproxy_runs():
        return {HAPROXY: "0"}
    ports = 20_000 + int(ray_directory().name[-4:], 16) % 120 * 100
    [fallback] = free_ports(1)
    return {
        HAPROXY: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": haproxy.__file__,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "s"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # of 4: it has little to do
        # Streams of before a change of replicas go on: Serve cuts them after two minutes. Ports rest as long as with that.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
        # In which HAProxy hears that a replica goes, of 30 s that load balancers elsewhere may need.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # For requests while no replica of the API is there.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # Of each POLYTHINK_HOME its own between Ray's workers' and the system's: a port of a replica that is gone must
        # not soon be one of another service's.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports + 99),
    }


def _haproxy_runs() -> bool:
    try:
        command, env = [haproxy.__file__, "-v"], environment(**base_environment())
        return subprocess.run(command, env=env, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def auth_environment(token: Path | None) -> dict[str, str | None]:
    """Ray's token authentication, said outright: what is left unsaid, head and clients decide differently."""
    mode = "token" if token else "disabled"
    return {
        "RAY_AUTH_MODE": mode,
        "RAY_AUTH_TOKEN": None,
        "RAY_AUTH_TOKEN_PATH": str(token) if token else None,
    }


def keys_path() -> Path:
    """File of the API keys: `$POLYTHINK_API_KEYS_FILE`, else `api_keys` in POLYTHINK_HOME."""
    return Path(os.environ.get("POLYTHINK_API_KEYS_FILE") or polythink_home() / "api_keys").expanduser().resolve()


def token_path() -> Path:
    """File of Ray's token."""
    return polythink_home() / "ray_token"


def make_token() -> None:
    """Makes the token that the cluster's nodes and clients show each other, unless there is one; only its owner reads it."""
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def client_token(cluster: Cluster) -> str | None:
    """What opens the dashboard: our token, or, for a Ray of somebody else's, the one in Ray's own variables."""
    path = token_path() if cluster.is_open and cluster.owns_ray else os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path:
        return os.environ.get("RAY_AUTH_TOKEN")
    return Path(path).read_text(encoding="utf-8").strip()


def ray_directory() -> Path:
    """Ray's sockets and logs: short, as a socket's path has at most 107 characters, and of this POLYTHINK_HOME alone."""
    digest = hashlib.sha256(str(polythink_home()).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"polythink-{digest}"


def forget_old_sessions() -> None:
    """Removes Ray's logs and sockets of all sessions but the last, and HAProxy's."""
    for old in [*sorted(ray_directory().glob("session_2*"))[:-1], *ray_directory().glob("ha/*")]:
        shutil.rmtree(old, ignore_errors=True)
