"""Processes and ports of this machine: start one for good, know it again later, end exactly that one, say who is in the way."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from pydantic import BaseModel

from training.errors import PolythinkError

SAME_PROCESS_S = 0.5
"""A pid whose process started within this of the time on record is the one on record."""


class ServiceError(PolythinkError, RuntimeError):
    """A part of the service that does not start, does not answer, or is in the way."""


class Process(BaseModel):
    """A process that we started, as the state file keeps it."""

    name: str
    pid: int
    started_s: float
    """When it started, in seconds after boot: a pid alone may be another process by now, and wall clocks are set."""
    log: Path

    def find(self) -> psutil.Process | None:
        """The living process, or None when it has ended."""
        process = self.entry()
        try:
            return process if process and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def entry(self) -> psutil.Process | None:
        """Its entry in the kernel's table, which a zombie has as well; None when the pid is free or another's."""
        try:
            process = psutil.Process(self.pid)
            return process if abs(_started_s(process) - self.started_s) < SAME_PROCESS_S else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.find() is not None

    def log_tail(self, lines: int = 12) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def spawn(name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Process:
    """Starts `command` detached from this terminal, in a session of its own; what it prints goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    child.returncode = 0  # its pid is all that is kept, and a Popen warns when it goes before its process has ended
    return Process(name=name, pid=child.pid, started_s=_started_s(psutil.Process(child.pid)), log=log)


def _started_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def stop(process: Process, patience_s: float) -> None:
    """Ends `process` and all that descends from it: SIGTERM, once more after half the patience, then SIGKILL.

    Ray's head has been seen to need the second signal; its workers may outlive it. So may the children of a process that
    was killed, which are known by its session. What was a child of this process leaves no zombie.
    """
    root = process.find()
    family = {*(root.children(recursive=True) if root else []), *_session(process)}
    first = [root] if root else list(family)
    for _ in range(2):
        _signal(first, psutil.Process.terminate)
        if not _wait(first, patience_s / 2):
            break
    left = _wait([*family, *first], 2)
    _signal(left, psutil.Process.kill)
    stubborn = _wait(left, 5)
    if zombie := process.entry():  # it ended by itself, and nobody has asked for its exit status
        _wait([zombie], 0)
    if stubborn:
        raise ServiceError(f"{process.name} (pid {process.pid}) does not end: {len(stubborn)} processes are left")


def _session(process: Process) -> list[psutil.Process]:
    """What is left of the session that `spawn` began: its id is no other process's as long as one of it lives."""
    if psutil.pid_exists(process.pid) and process.entry() is None:
        return []  # the session has ended, and its number is another's
    members = []
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == process.pid and each.status() != psutil.STATUS_ZOMBIE:
                members.append(each)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return members


def _signal(processes: Iterable[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            send(process)
        except psutil.NoSuchProcess:
            continue


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those still alive after `timeout_s`; our own zombies are reaped on the way."""
    return psutil.wait_procs(processes, timeout=timeout_s)[1]


def nodes_of(head: str) -> list[int]:
    """Pids of the Ray nodes on this machine, whoever started them, whose head's address is `head` (`IP:PORT`)."""
    commands = {process.pid: process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])}
    raylets = {pid: words for pid, words in commands.items() if Path(words[0]).name == "raylet"}
    return [pid for pid, words in raylets.items() if f"--gcs-address={head}" in words]


def free_ports(count: int) -> list[int]:
    """`count` different ports that nobody listens on, from the system's ephemeral range.

    Ray's workers take 10002 to 19999, which Linux's range (32768 and up) avoids.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:  # all are held until all are known, so that they differ
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def port_holder(port: int) -> str:
    """Who listens on `port`, for people: `python3.11 (pid 812: mlflow server …)`."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # other users' sockets need root on some systems
        return "another process"
    pids = [c.pid for c in connections if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid]
    try:
        holder = psutil.Process(pids[0])
        command = " ".join(holder.cmdline())
        return f"{holder.name()} (pid {holder.pid}: {command if len(command) <= 60 else command[:59] + '…'})"
    except (IndexError, psutil.NoSuchProcess, psutil.AccessDenied):
        return "another process"


def require_port(port: int, host: str, option: str) -> None:
    """
    Raises:
        ServiceError: `port` is taken; says by whom, and that `option` chooses another.
    """
    if not port_is_free(port, host):
        variable = "POLYTHINK_" + option.removeprefix("--").replace("-", "_").upper()
        raise ServiceError(
            f"port {port} is taken by {port_holder(port)}",
            hint=f"Choose another with {option} (or {variable}); 0 takes a free one.",
        )


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with `changes`; None takes a variable out."""
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}
