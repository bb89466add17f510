"""Processes known again by pid and time, ports and who holds them, the state file, and what `up` refuses before it starts anything."""

import importlib.metadata
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray.serve._private.haproxy as haproxy_of_serve
from ray.serve.config import HTTPOptions

from ray_app.cluster import deploy, haproxy, parts, processes
from ray_app.cluster import lifecycle as cluster
from ray_app.cluster import state as cluster_state
from ray_app.cluster.processes import Process, ServiceError
from ray_app.cluster.state import LOOPBACK, Cluster, Ports
from training.errors import ConfigError

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""

LISTENING_FAMILY = """
import subprocess, sys, time
code = "import socket, sys, time; held = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline() or sys.exit("the port is taken")
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    """A process with a child, started as parts of the service are."""
    process = processes.spawn(
        "sleeper", [sys.executable, "-c", FAMILY], os.environ, tmp_path, tmp_path / "logs" / "sleeper.log"
    )
    yield process
    processes.stop(process, patience_s=2)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def somebodys_dashboard() -> Iterator[tuple[int, dict[str, Any]]]:
    """The dashboard of a Ray that was there before `up`: its port, and what it says of Serve."""
    serve: dict[str, Any] = {"applications": {}, "http_options": {"host": LOOPBACK, "port": 1234}, "deployed": []}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = {"ray_version": importlib.metadata.version("ray")} if self.path == "/api/version" else serve
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def do_PUT(self) -> None:
            serve["deployed"].append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer((LOOPBACK, 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, serve
        server.shutdown()
        thread.join()


def child_of(process: Process) -> psutil.Process:
    deadline = time.monotonic() + 20
    while not process.log_tail().strip():
        assert time.monotonic() < deadline, "the child never started"
        time.sleep(0.05)
    return psutil.Process(int(process.log_tail()))


def test_stopping_ends_the_process_and_all_that_it_started(sleeper: Process) -> None:
    child = child_of(sleeper)
    assert sleeper.alive
    processes.stop(sleeper, patience_s=5)
    assert not sleeper.alive
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    processes.stop(sleeper, patience_s=5)  # once more is no error


@pytest.mark.parametrize("reaped", [False, True])
def test_the_children_of_one_that_was_killed_are_ended_too(sleeper: Process, reaped: bool) -> None:
    child = child_of(sleeper)
    os.kill(sleeper.pid, signal.SIGKILL)
    if reaped:
        psutil.Process(sleeper.pid).wait(20)
    assert child.is_running()
    processes.stop(sleeper, patience_s=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_part_is_started_on_the_port_that_its_dead_predecessors_children_hold(home: Path, tmp_path: Path) -> None:
    """It died after `up` had looked for leftovers."""
    [port] = processes.free_ports(1)
    command = [sys.executable, "-c", LISTENING_FAMILY, str(port)]
    running = Cluster()
    cluster._run(running, "mlflow", command, dict(os.environ), tmp_path)
    first = running.processes["mlflow"]
    try:
        child = child_of(first)
        os.kill(first.pid, signal.SIGKILL)
        cluster._run(running, "mlflow", command, dict(os.environ), tmp_path)
        assert child_of(running.processes["mlflow"]).is_running()
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert cluster_state.load() == running
    finally:
        processes.stop(running.processes["mlflow"], patience_s=5)
        processes.stop(first, patience_s=5)


def test_one_that_ended_by_itself_leaves_no_zombie(tmp_path: Path) -> None:
    process = processes.spawn("brief", [sys.executable, "-c", ""], os.environ, tmp_path, tmp_path / "brief.log")
    deadline = time.monotonic() + 20
    while process.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert process.entry() is not None
    processes.stop(process, patience_s=5)
    assert process.entry() is None


def test_a_program_that_ends_before_what_it_started_says_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from ray_app.cluster.processes import spawn\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(spawn('long', command, os.environ, Path.cwd(), Path('long.log')).model_dump_json())"
    )
    command = [sys.executable, "-W", "default::ResourceWarning", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    process = Process.model_validate_json(ended.stdout)
    assert process.alive
    processes.stop(process, patience_s=5)
    assert ended.stderr == ""


def test_a_stubborn_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    process = processes.spawn("deaf", [sys.executable, "-c", code], os.environ, tmp_path, tmp_path / "deaf.log")
    while "deaf" not in process.log_tail():
        time.sleep(0.05)
    processes.stop(process, patience_s=0.4)
    assert not process.alive


def test_a_pid_that_was_given_to_another_process_is_not_ours(sleeper: Process) -> None:
    older = sleeper.model_copy(update={"started_s": sleeper.started_s - 60})
    assert not older.alive
    processes.stop(older, patience_s=1)
    assert sleeper.alive


def test_a_clock_that_is_set_changes_nothing(sleeper: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    boot_time, create_time = psutil.boot_time(), psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time + 3600)  # both are derived from the wall clock
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    assert sleeper.alive


def test_a_dead_child_that_nobody_waited_for_is_dead(tmp_path: Path) -> None:
    process = processes.spawn("short", [sys.executable, "-c", ""], os.environ, tmp_path, tmp_path / "short.log")
    deadline = time.monotonic() + 20
    while process.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_free_ports_are_different_and_outside_of_rays_worker_range() -> None:
    ports = processes.free_ports(20)
    assert len(set(ports)) == 20
    assert all(processes.port_is_free(port) for port in ports)
    assert not [port for port in ports if 10002 <= port <= 19999]


def test_a_taken_port_says_who_holds_it_and_how_to_choose_another(taken_port: int) -> None:
    with pytest.raises(ServiceError) as raised:
        processes.require_port(taken_port, LOOPBACK, "--mlflow-port")
    assert f"port {taken_port} is taken by" in raised.value.message
    assert f"pid {os.getpid()}" in raised.value.message
    assert "--mlflow-port" in raised.value.hint
    assert "POLYTHINK_MLFLOW_PORT" in raised.value.hint


def test_ports_come_from_the_environment_and_zero_takes_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYTHINK_PORT", "0")
    monkeypatch.setenv("POLYTHINK_MLFLOW_PORT", "5001")
    ports = Ports.from_env()
    assert (ports.port, ports.mlflow_port, ports.dashboard_port) == (0, 5001, 8265)
    resolved = ports.resolved()
    assert resolved.port > 0
    assert resolved.mlflow_port == 5001
    assert resolved.resolved() == resolved


def test_the_state_file_keeps_everything_and_goes_with_down(home: Path, sleeper: Process) -> None:
    assert cluster_state.load() is None
    started = Cluster(ports=Ports(port=1234), processes={"ray": sleeper})
    started.save()
    assert cluster_state.load() == started
    assert cluster.down()
    assert not sleeper.alive
    assert cluster_state.load() is None
    assert not cluster.down()


def test_only_one_up_or_down_at_a_time(home: Path) -> None:
    with cluster_state.lock(), pytest.raises(ServiceError, match="another"):
        cluster.down()


def test_up_on_a_taken_port_starts_nothing(home: Path, taken_port: int) -> None:
    with pytest.raises(ServiceError, match=f"port {taken_port} is taken"):
        cluster.up(Ports(port=0, mlflow_port=taken_port, dashboard_port=0, ray_port=0))
    assert cluster_state.load() is None


def test_a_second_up_may_not_contradict_the_first(home: Path, sleeper: Process) -> None:
    Cluster(ports=Ports(port=1234), processes={"mlflow": sleeper}).save()
    with pytest.raises(ServiceError, match=r"already up at http://127\.0\.0\.1:1234") as raised:
        cluster.up(Ports(port=4321))
    assert "polythink down" in raised.value.hint
    with pytest.raises(ServiceError, match="already up"):
        cluster.join("192.0.2.1")


def test_up_after_everything_was_killed_takes_the_ports_of_before(home: Path, taken_port: int) -> None:
    Cluster(ports=Ports(port=taken_port)).save()
    with pytest.raises(ServiceError, match=f"port {taken_port} is taken") as raised:
        cluster.up(Ports())
    assert "--port" in raised.value.hint


def test_what_a_later_up_leaves_out_is_as_before() -> None:
    ended = Cluster(host="127.0.0.2", ports=Ports(port=1, mlflow_port=2, ray_port=3), tracking_uri="http://a")
    assert cluster._as_before(ended, Ports(), LOOPBACK, None) == ended
    asked = cluster._as_before(ended, Ports(port=4, mlflow_port=0), "127.0.0.3", "http://b")
    assert (asked.host, asked.tracking_uri) == ("127.0.0.3", "http://b")
    assert asked.ports == Ports(port=4, mlflow_port=asked.ports.mlflow_port, ray_port=3)
    assert asked.ports.mlflow_port > 4
    node = Cluster(host="127.0.0.2", joined="127.0.0.2:6379")
    assert cluster._as_before(node, Ports(), LOOPBACK, None) == Cluster()


def test_up_on_somebodys_ray_and_mlflow_knows_itself_again(
    home: Path, somebodys_dashboard: tuple[int, dict[str, Any]]
) -> None:
    """Nothing of it is a process of ours."""
    port, serve = somebodys_dashboard
    ports = Ports(port=1234, dashboard_port=port)
    running = Cluster(ports=ports, owns_ray=False, tracking_uri="http://127.0.0.1:9")
    running.save()
    assert not cluster.is_up(running)
    [ours, *_] = deploy.serve_config(running, {})["applications"]
    serve["applications"] = {"polythink": {"deployed_app_config": ours}}
    assert cluster.is_up(running)
    with pytest.raises(ServiceError, match=r"already up at http://127\.0\.0\.1:1234"):
        cluster.up(ports.model_copy(update={"port": 4321}))
    ours["runtime_env"]["env_vars"]["POLYTHINK_HOME"] = "/another"
    assert not cluster.is_up(running)
    assert not cluster.is_up(running.model_copy(update={"ports": Ports(dashboard_port=9)}))  # it is gone


@pytest.mark.parametrize("answers", [False, True])
def test_up_knows_what_runs_on_somebodys_ray_after_its_state_file_was_lost(
    home: Path, somebodys_dashboard: tuple[int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The API is on the port that it was given once, and an MLflow that ended is started where replicas look for it."""
    port, serve = somebodys_dashboard
    started = Cluster(ports=Ports(port=1234, dashboard_port=port, mlflow_port=4321), owns_ray=False)
    [ours, *_] = deploy.serve_config(started, {})["applications"]
    serve["applications"] = {"polythink": {"deployed_app_config": ours, "status": "RUNNING"}}
    monkeypatch.setattr(cluster, "answers", lambda url: answers)
    monkeypatch.setattr(cluster, "_start", lambda found, *_: found.save())  # Ray Serve would have to answer
    found = cluster.up(Ports(dashboard_port=port))
    assert (found.url, found.mlflow_url, found.owns_ray) == ("http://127.0.0.1:1234", "http://127.0.0.1:4321", False)
    assert found.tracking_uri == ("http://127.0.0.1:4321" if answers else None)
    assert cluster_state.load() == found
    assert cluster.down()
    assert [app["name"] for app in serve["deployed"][0]["applications"]] == []


def test_up_beside_another_homes_polythink_is_refused(
    home: Path, somebodys_dashboard: tuple[int, dict[str, Any]]
) -> None:
    port, serve = somebodys_dashboard
    variables = {"POLYTHINK_HOME": "/another", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"}
    serve["applications"] = {"polythink": {"deployed_app_config": {"runtime_env": {"env_vars": variables}}}}
    with pytest.raises(ServiceError, match="runs a Polythink that this POLYTHINK_HOME knows nothing of") as raised:
        cluster.up(Ports(dashboard_port=port))
    assert "--dashboard-port" in raised.value.hint
    assert cluster_state.load() is None


def test_down_leaves_another_homes_polythink_on_somebodys_ray(
    home: Path, somebodys_dashboard: tuple[int, dict[str, Any]]
) -> None:
    """Ours was there until that Ray was started anew."""
    port, serve = somebodys_dashboard
    Cluster(ports=Ports(port=1234, dashboard_port=port), owns_ray=False, tracking_uri="http://127.0.0.1:9").save()
    variables = {"POLYTHINK_HOME": "/another"}
    serve["applications"] = {"polythink": {"deployed_app_config": {"runtime_env": {"env_vars": variables}}}}
    assert cluster.down()
    assert serve["deployed"] == []


def test_serving_others_needs_keys_and_an_address(home: Path) -> None:
    ports = Ports(port=0, mlflow_port=0, dashboard_port=0, ray_port=0)
    with pytest.raises(ServiceError, match="no API keys") as raised:
        cluster.up(ports, host="127.0.0.2")
    assert "polythink keys add" in raised.value.hint
    (home / "api_keys").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        cluster.up(ports, host="127.0.0.2")
    with pytest.raises(ServiceError, match="nothing that other machines can call"):
        cluster.up(ports, host="0.0.0.0")
    assert cluster_state.load() is None


def test_a_head_that_dies_while_up_looks_at_it_is_started_again(
    home: Path, sleeper: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Cluster(host="127.0.0.1", ports=Ports(port=0, mlflow_port=0, dashboard_port=0, ray_port=0).resolved())
    running.tracking_uri = "http://127.0.0.1:9"
    running.owns_ray = True
    running.processes["ray"] = sleeper  # nothing answers at its dashboard's port
    running.save()
    deployed, started = [], []

    def deploy(*_: object) -> None:
        deployed.append(1)
        if len(deployed) == 1:
            raise ServiceError("Ray's dashboard does not answer")

    monkeypatch.setattr(cluster, "deploy", deploy)
    monkeypatch.setattr(cluster, "_start_head", lambda *_: started.append(1))
    cluster.up(Ports())
    assert (len(deployed), len(started)) == (2, 1)


def test_a_head_waits_for_the_nodes_that_have_lost_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    head = f"{LOOPBACK}:{processes.free_ports(1)[0]}"
    words = ["/ray/raylet/raylet", "-c", "import time; time.sleep(600)", f"--gcs-address={head}"]
    said: list[str] = []
    cluster._outwait_nodes(head, said.append)
    assert said == []
    with subprocess.Popen(words, executable=sys.executable) as node:
        ends = threading.Timer(1, node.kill)
        try:
            assert processes.nodes_of(head) == [node.pid]
            assert processes.nodes_of(head[:-1]) == []
            with monkeypatch.context() as patched:
                patched.setattr(cluster, "HEADLESS_S", 0.2)
                with pytest.raises(
                    ServiceError, match=rf"the Ray node with pid {node.pid} .* head at {head}"
                ) as raised:
                    cluster._outwait_nodes(head, said.append)
            assert "--ray-port" in raised.value.hint
            cluster._outwait_nodes(head, lambda text: (said.append(text), ends.start()))
            assert said[-1] == f"waiting up to 75 s for Ray nodes that have lost their head at {head}"
            assert node.wait(20) == -signal.SIGKILL
        finally:
            ends.cancel()
            node.kill()


def test_joining_needs_the_heads_token(home: Path) -> None:
    with pytest.raises(ServiceError, match="there is no token") as raised:
        cluster.join("127.0.0.1:6379")
    assert "ray_token" in raised.value.hint


def test_a_node_is_known_by_its_heads_address_with_and_without_the_port(home: Path, sleeper: Process) -> None:
    running = Cluster(host="127.0.0.1", joined="127.0.0.1:6379", processes={"ray": sleeper})
    running.save()
    assert cluster.join("127.0.0.1") == running
    with pytest.raises(ServiceError, match=r"already up: 127\.0\.0\.1:6379"):
        cluster.join("127.0.0.1:6380")


@pytest.mark.parametrize("head", ["127.0.0.1:port", "127.0.0.1:70000"])
def test_joining_needs_the_address_of_a_head(home: Path, head: str) -> None:
    parts.make_token()
    with pytest.raises(ServiceError, match="is no address of a head"):
        cluster.join(head)


def test_joining_ends_what_a_killed_ray_start_left(home: Path, sleeper: Process) -> None:
    child = child_of(sleeper)  # such as the node that `ray start --block` watched over
    Cluster(joined="127.0.0.1:6379", processes={"ray": sleeper}).save()
    os.kill(sleeper.pid, signal.SIGKILL)
    psutil.Process(sleeper.pid).wait(20)
    with pytest.raises(ServiceError, match="there is no token"):
        cluster.join("127.0.0.1:6379")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_token_is_made_once_and_read_by_its_owner_only(home: Path) -> None:
    parts.make_token()
    token = parts.token_path().read_text()
    parts.make_token()
    assert parts.token_path().read_text() == token
    assert len(token) == 64
    assert stat.S_IMODE(parts.token_path().stat().st_mode) == 0o600


def test_the_head_runs_in_our_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    closed = parts.head_environment(Cluster())
    assert closed["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert closed["RAY_AUTH_MODE"] == "disabled"
    assert closed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert closed["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"
    assert "RAY_ADDRESS" not in closed
    assert "POLYTHINK_API_KEYS_FILE" not in closed
    opened = parts.head_environment(Cluster(host="192.0.2.7"))
    assert opened["RAY_AUTH_MODE"] == "token"
    assert opened["RAY_AUTH_TOKEN_PATH"] == str(home / "ray_token")
    assert opened["POLYTHINK_API_KEYS_FILE"] == str(home / "api_keys")
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in opened


def test_haproxy_of_two_homes_shares_no_path_and_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_home(name: str) -> dict[str, str]:
        monkeypatch.setenv("POLYTHINK_HOME", f"/homes/{name}")
        return parts.haproxy_environment()

    one, two = of_home("one"), of_home("two")
    places = {name for name in one if name.endswith(("_LOC", "_PATH", "_BASE", "_FILE", "_PORT"))}
    assert len(places) == 9
    assert {name for name in places if one[name] == two[name]} == {"RAY_SERVE_HAPROXY_BINARY_PATH"}
    ports = ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT")
    assert 20_000 <= int(one[ports[0]]) < int(one[ports[1]]) < 32_768
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 10)))  # a socket's path has 107 characters at most
    assert of_home("one") == {parts.HAPROXY: "0"}


def test_the_head_can_keep_serves_own_proxy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.head_environment(Cluster())[parts.HAPROXY] == "1"
    monkeypatch.setenv(parts.HAPROXY, "0")
    assert parts.head_environment(Cluster())[parts.HAPROXY] == "0"
    monkeypatch.delenv(parts.HAPROXY)
    monkeypatch.setattr(parts.haproxy, "__file__", "/bin/false")  # as a binary that this machine cannot load
    assert parts.head_environment(Cluster())[parts.HAPROXY] == "0"


@pytest.mark.parametrize("host", [LOOPBACK, "192.0.2.7"])
def test_haproxy_listens_where_the_service_does_and_nowhere_else(home: Path, host: str) -> None:
    state = home / "n"
    configuration = haproxy_of_serve.HAProxyConfig(
        http_options=HTTPOptions(host=host, port=8000), socket_path=f"{state}/s", server_state_file=f"{state}/state"
    )
    server = haproxy_of_serve.ServerConfig(name="api", host=LOOPBACK, port=20_000)
    backend = haproxy_of_serve.BackendConfig(name="polythink", path_prefix="/", servers=[server])
    api = haproxy_of_serve.HAProxyApi(configuration, {"polythink": backend}, config_file_path=f"{state}/haproxy.cfg")
    api._generate_config_file_internal()
    command = [haproxy.__file__, "-c", "-f", api.config_file_path]
    checked = subprocess.run(command, env=processes.environment(**parts.base_environment()), capture_output=True)
    assert checked.returncode == 0, checked.stderr
    lines = [line.strip() for line in Path(api.config_file_path).read_text().splitlines()]
    assert [line for line in lines if line.startswith("bind ")] == [f"bind {host}:8000"]
    assert f"server api {host}:20000" in " ".join(lines)
    assert not any(":514" in line for line in lines)
    assert any(line.startswith(f"stats socket {state}/s mode 600 ") for line in lines)


def test_the_serve_file_gets_our_address_and_keeps_what_others_deployed(home: Path) -> None:
    other = {"name": "other", "import_path": "other:app"}
    serve = {
        "applications": {
            "other": {"deployed_app_config": other},
            "polythink": {"deployed_app_config": {"name": "polythink"}},
        }
    }
    config = deploy.serve_config(Cluster(ports=Ports(port=1234)), serve)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 1234}
    assert [app["name"] for app in config["applications"]] == ["polythink", "other"]
    assert "runtime_env" not in config["applications"][0]
    foreign = deploy.serve_config(Cluster(owns_ray=False), {})
    assert foreign["applications"][0]["runtime_env"]["env_vars"]["POLYTHINK_HOME"] == str(home)


def test_the_services_settings_reach_replicas_on_somebodys_ray(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "POLYTHINK_DATABASE_URL": "postgresql+psycopg://host/jobs",
        "POLYTHINK_STORAGE": "s3://bucket",
        "POLYTHINK_DATA_ROOTS": "/rows:/more",
        "POLYTHINK_MAX_RUNNING_JOBS": "3",
        "POLYTHINK_GENERATOR__NUM_GPUS": "1",
    }
    for name, value in (settings | {"POLYTHINK_API_KEY": "pt-secret", "POLYTHINK_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    [ours, *_] = deploy.serve_config(Cluster(owns_ray=False), {})["applications"]
    variables = ours["runtime_env"]["env_vars"]
    assert {name: variables.get(name) for name in settings} == settings
    assert not {"POLYTHINK_API_KEY", "POLYTHINK_PORT"} & set(variables)


def test_the_command_line_and_the_cluster_load_without_ray_and_torch() -> None:
    code = "import ray_app.cli.main, ray_app.cluster.lifecycle, sys; print([m for m in ('ray', 'torch', 'mlflow') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
