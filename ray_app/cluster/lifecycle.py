"""What `polythink up`, `down` and `join` do: Ray, MLflow and the Serve application, started once and ended exactly.

`up` starts what is missing, so that a second call, or one after a crash, leads to the same service; `down` ends what `up`
started and nothing else. Several installations, each with its own POLYTHINK_HOME and ports, live side by side.
"""

import importlib.metadata
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ray_app.cluster.deploy import APPLICATION, Report, answers, dashboard_of, deploy, undeploy
from ray_app.cluster.parts import (
    HAPROXY,
    auth_environment,
    base_environment,
    forget_old_sessions,
    head_environment,
    keys_path,
    make_token,
    mlflow_command,
    ray_head_command,
    ray_node_command,
    token_path,
)
from ray_app.cluster.processes import ServiceError, environment, nodes_of, require_port, spawn, stop
from ray_app.cluster.state import LOOPBACK, Cluster, Ports, load, lock, state_path
from serving.keys import KeyRing
from training.config import PRESETS
from training.run_dir import polythink_home

START_TIMEOUT_S = 180
"""For Ray or MLflow to answer; 6 to 10 s on a quiet machine."""

STARTED = "Ray runtime started"
"""In Ray's log once its node is there."""
HEAD_PATIENCE_S = 20
"""From SIGTERM to SIGKILL; a head takes about 4 s."""
HEAD_NOTICES_S = 15
"""In which a head ends after one of its processes died."""
HEADLESS_S = 75
"""In which a node ends that has lost its head: Ray tries for 60 s to reach it again, fixed."""
NODE_PATIENCE_S = 60
"""A node is drained first, for 30 s at most: training on it saves and moves."""


def up(
    ports: Ports,
    host: str = LOOPBACK,
    num_cpus: int | None = None,
    tracking_uri: str | None = None,
    report: Report = lambda _: None,
) -> Cluster:
    """Ray, MLflow and the Serve application, running; starts what is missing of them.

    Ports, host and MLflow that are left out are those of the service that runs, or that ended without `down`.

    Args:
        ports: what to listen on.
        host: address of this machine for the API and for Ray's nodes; anything but loopback needs API keys.
        num_cpus: logical CPUs of this node for Ray; None takes the machine's, at least 4.
        tracking_uri: an MLflow that is there already; None starts one.
        report: told what is being waited for.

    Raises:
        ServiceError: a port is taken, there are no API keys, or a part does not come up; says which log to read.
        ConfigError: the file of API keys is faulty, or holds none.
    """
    with lock():
        cluster = load() or _unrecorded(ports)
        if cluster:
            _end_leftovers(cluster, report)
        if cluster and is_up(cluster):
            _require_same(cluster, ports, host)
            _start(cluster, num_cpus, report)
            return cluster
        cluster = _as_before(cluster, ports, host, tracking_uri)
        if cluster.is_open:
            _require_keys(cluster.host)
            make_token()
        cluster.owns_ray = cluster.is_open or not _somebodys_ray(cluster)
        _require_ports(cluster)
        try:
            _start(cluster, num_cpus, report)
        except BaseException:  # also Ctrl-C: what does not come up whole leaves nothing behind
            _stop(cluster, report)
            raise
        return cluster


def join(head: str, host: str | None = None, token: Path | None = None, report: Report = lambda _: None) -> Cluster:
    """Makes this machine a node of the cluster whose head is at `head` (`IP` or `IP:PORT`).

    Args:
        host: this machine's address for the other nodes; None takes the one on the way to the head.
        token: file of the cluster's token; None takes `ray_token` in POLYTHINK_HOME.

    Raises:
        ServiceError: there is no token, the head does not answer, or this machine runs a cluster of its own.
    """
    address = head if ":" in head else f"{head}:{Ports().ray_port}"
    with lock():
        cluster = load()
        if cluster:
            _end_leftovers(cluster, report)
        if cluster and is_up(cluster):
            if cluster.joined == address:
                return cluster
            raise ServiceError(
                f"this machine is already up: {cluster.joined or cluster.url}", hint="`polythink down` first."
            )
        path = (token or token_path()).resolve()
        if not path.exists():
            raise ServiceError(
                f"there is no token at {path}", hint="Copy the head's ray_token there, or give --token-file."
            )
        cluster = Cluster(host=host or _address_towards(address), joined=address)
        env = environment(**base_environment(), **auth_environment(path))
        report(f"joining {address}")
        _run(cluster, "ray", ray_node_command(cluster, address), env, PRESETS.parent)
        try:
            _wait(lambda: STARTED in cluster.processes["ray"].log_tail(200), cluster, "ray")
        except BaseException:
            _stop(cluster, report)
            raise
        return cluster


def down(report: Report = lambda _: None) -> bool:
    """Ends what `up` or `join` started on this machine; False when that was nothing."""
    with lock():
        cluster = load()
        if cluster is None:
            return False
        _stop(cluster, report)
        return True


def is_up(cluster: Cluster) -> bool:
    """Whether any of it runs. Where Ray and MLflow were there before `up`, no process is ours: the dashboard knows."""
    if cluster.owns_ray or cluster.any_alive:
        return cluster.any_alive
    return _serves_this_home(cluster)


def _as_before(ended: Cluster | None, ports: Ports, host: str, tracking_uri: str | None) -> Cluster:
    """A service as it is asked for; what is left out is as in one that `ended` without `down`, as with its machine."""
    if ended is None or ended.joined:
        return Cluster(host=host, ports=ports.resolved(), tracking_uri=tracking_uri)
    left_out = [name for name, default in Ports() if getattr(ports, name) == default]
    return Cluster(
        host=ended.host if host == LOOPBACK else host,
        ports=ports.model_copy(update=ended.ports.model_dump(include=set(left_out))).resolved(),
        tracking_uri=tracking_uri or ended.tracking_uri,
    )


def _serves_this_home(cluster: Cluster) -> bool:
    """Whether the Ray of somebody else's runs our application for this POLYTHINK_HOME."""
    if dashboard_of(cluster).ray_version() is None:
        return False
    return _deployed_variables(cluster).get("POLYTHINK_HOME") == str(polythink_home())


def _deployed_variables(cluster: Cluster) -> dict[str, str]:
    """The variables that our application was given on a Ray of somebody else's; {} when it is not there."""
    deployed = dashboard_of(cluster).application(APPLICATION).get("deployed_app_config") or {}
    variables: dict[str, str] = deployed.get("runtime_env", {}).get("env_vars", {})
    return variables


def _unrecorded(ports: Ports) -> Cluster | None:
    """What an earlier `up` put on a Ray of somebody else's, its state file lost since; None where nothing of ours runs there.

    The API and MLflow stay where they are; an MLflow that still answers is taken for somebody's own, which `down` leaves.
    """
    cluster = Cluster(ports=ports.resolved(), owns_ray=False)
    if not ports.dashboard_port or not _serves_this_home(cluster):
        return None
    uri = _deployed_variables(cluster).get("MLFLOW_TRACKING_URI")
    if uri is None:  # no `up` put it there
        return None
    cluster.ports.port = dashboard_of(cluster).serve()["http_options"]["port"]
    own = re.fullmatch(rf"http://{re.escape(LOOPBACK)}:(\d+)", uri)
    if own and not answers(f"{uri}/health"):
        cluster.ports.mlflow_port = int(own[1])
    else:
        cluster.tracking_uri = uri
    return cluster


def _start(cluster: Cluster, num_cpus: int | None, report: Report) -> None:
    """Starts what does not run, side by side, and waits for all of it."""
    if not cluster.tracking_uri and not cluster.alive("mlflow"):
        _run(cluster, "mlflow", mlflow_command(cluster), environment(**base_environment()), polythink_home())
    cluster.save()
    report("starting Ray and MLflow")
    if cluster.owns_ray and not cluster.alive("ray"):
        forget_old_sessions()
        try:
            _start_head(cluster, num_cpus, report)
        except ServiceError:  # Ray gives its own node 30 s to register, fixed: a busy machine may need a second try
            _start_head(cluster, num_cpus, report)
    _wait(lambda: "mlflow" not in cluster.processes or answers(f"{cluster.mlflow_url}/health"), cluster, "mlflow")
    try:
        deploy(cluster, report)
    except ServiceError:
        if not cluster.owns_ray or not _is_ending(cluster):
            raise
        report("Ray was ending; starting it again")
        _start_head(cluster, num_cpus, report)
        deploy(cluster, report)


def _start_head(cluster: Cluster, num_cpus: int | None, report: Report) -> None:
    _end_predecessor(cluster, "ray")
    _outwait_nodes(f"{cluster.host}:{cluster.ports.ray_port}", report)
    env = head_environment(cluster)
    if env[HAPROXY] == "0":
        report("HAProxy is off or does not run here: requests go through Serve's own proxy")
    # Drivers of `ray job submit` start where the head did: `configs/tiny.yaml` and `-m training` mean ours.
    _run(cluster, "ray", ray_head_command(cluster, num_cpus), env, PRESETS.parent)
    _wait(lambda: STARTED in cluster.processes["ray"].log_tail(200), cluster, "ray")
    _wait(lambda: dashboard_of(cluster).ray_version() is not None, cluster, "ray")


def _outwait_nodes(head: str, report: Report) -> None:
    """Waits for the nodes on this machine whose head was at `head`: a new one there refuses to start beside them.

    Raises:
        ServiceError: one does not end.
    """
    deadline = time.monotonic() + HEADLESS_S
    if nodes_of(head):
        report(f"waiting up to {HEADLESS_S} s for Ray nodes that have lost their head at {head}")
    while pids := nodes_of(head):
        if time.monotonic() > deadline:
            raise ServiceError(
                f"the Ray node with pid {pids[0]} on this machine still belongs to a head at {head}",
                hint="End it, or choose another --ray-port.",
            )
        time.sleep(0.5)


def _is_ending(cluster: Cluster) -> bool:
    """Whether our Ray is about to go: a head that lost a part of itself, such as its GCS, takes seconds to notice."""
    deadline = time.monotonic() + HEAD_NOTICES_S
    while cluster.alive("ray") and dashboard_of(cluster).ray_version() is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def _end_leftovers(cluster: Cluster, report: Report) -> None:
    """Ends the children of parts that were killed: they hold the ports that the new ones need."""
    for name, process in cluster.processes.items():
        if not process.alive:
            report(f"{name} had ended")
            stop(process, HEAD_PATIENCE_S)


def _stop(cluster: Cluster, report: Report) -> None:
    if not cluster.owns_ray and _serves_this_home(cluster):  # by now another POLYTHINK_HOME may have its own there
        report("taking the service off Ray")
        undeploy(cluster)
    for name in ("ray", "mlflow"):  # MLflow last: jobs that end write there
        if name in cluster.processes:
            report(f"stopping {name}")
            stop(cluster.processes[name], NODE_PATIENCE_S if cluster.joined else HEAD_PATIENCE_S)
    state_path().unlink(missing_ok=True)


def _somebodys_ray(cluster: Cluster) -> bool:
    """Whether a Ray that we did not start answers where ours would; it must be of our version, without a Polythink."""
    dashboard = dashboard_of(cluster)
    version = dashboard.ray_version()
    if version is None:
        return False
    way_out = "Choose another --dashboard-port and --ray-port (0 takes free ones) to start an own Ray."
    ours = importlib.metadata.version("ray")
    if version != ours:
        raise ServiceError(f"the Ray at {cluster.dashboard_url} is {version}, and this is {ours}", hint=way_out)
    if dashboard.application(APPLICATION):
        raise ServiceError(
            f"the Ray at {cluster.dashboard_url} runs a Polythink that this POLYTHINK_HOME knows nothing of",
            hint=way_out,
        )
    return True


def _run(cluster: Cluster, name: str, command: list[str], env: dict[str, str], cwd: Path) -> None:
    """Starts a part in the place of its predecessor and puts it on record at once: whatever happens next, `down` finds it."""
    _end_predecessor(cluster, name)
    cluster.processes[name] = spawn(name, command, env, cwd, polythink_home() / "logs" / f"{name}.log")
    cluster.save()


def _end_predecessor(cluster: Cluster, name: str) -> None:
    """Ends what is left of a part: it may have died a moment ago, and its children hold its port."""
    if before := cluster.processes.get(name):
        stop(before, HEAD_PATIENCE_S)


def _wait(condition: Callable[[], bool], cluster: Cluster, name: str) -> None:
    """Until `condition` holds, for START_TIMEOUT_S at most and while the part `name` lives."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        process = cluster.processes.get(name)
        hint = f"Its log: {process.log}" if process else ""
        if process and not process.alive:
            raise ServiceError(f"{name} ended while it started:\n{process.log_tail()}", hint=hint)
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} was not ready within {START_TIMEOUT_S} s", hint=hint)
        time.sleep(0.2)


def _require_same(cluster: Cluster, ports: Ports, host: str) -> None:
    """A second `up` may leave everything out, but not contradict what runs."""
    asked = ports.model_dump()
    differs = [name for name, port in Ports() if asked[name] not in {0, port, getattr(cluster.ports, name)}]
    if cluster.joined or differs or host not in {LOOPBACK, cluster.host}:
        place = f"as a node of {cluster.joined}" if cluster.joined else f"at {cluster.url}"
        raise ServiceError(f"this machine is already up {place}", hint="`polythink down` first, to start otherwise.")


def _require_ports(cluster: Cluster) -> None:
    """
    Raises:
        ServiceError: one is taken; found before anything is started.
    """
    ports = cluster.ports
    require_port(ports.port, cluster.host, "--port")
    if not cluster.tracking_uri:
        require_port(ports.mlflow_port, LOOPBACK, "--mlflow-port")
    if cluster.owns_ray:
        require_port(ports.dashboard_port, LOOPBACK, "--dashboard-port")
        require_port(ports.ray_port, cluster.host, "--ray-port")


def _require_keys(host: str) -> None:
    """
    Raises:
        ServiceError: others cannot call `host`, or there are no keys for them.
        ConfigError: the file of keys is faulty, or holds none.
    """
    if host in {"0.0.0.0", "::"}:
        raise ServiceError(f"--host {host} is nothing that other machines can call", hint="Give this machine's own IP.")
    path = keys_path()
    if not path.exists():
        raise ServiceError(
            f"--host {host} opens the service to other machines, and there are no API keys in {path}",
            hint="Make one first: polythink keys add admin",
        )
    KeyRing.read(path)


def _address_towards(address: str) -> str:
    """This machine's IP on the way to `address`; nothing is sent."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise ServiceError(f"{address} is no address of a head: {error}", hint="Give IP or IP:PORT.") from None
        return probe.getsockname()[0]
