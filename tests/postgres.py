"""A real PostgreSQL server on loopback for tests: Debian's packages where installed, else the wheel `pgserver`."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from ray_app.cluster.processes import free_ports

START_TIMEOUT_S = 60


def binaries() -> Path | None:
    """The directory that holds `postgres` and `initdb`, or None."""
    found = shutil.which("postgres")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if wheel := importlib.util.find_spec("pgserver"):
        candidates.append(Path(str(wheel.origin)).parent / "pginstall" / "bin")
    return next((path for path in candidates if (path / "postgres").exists() and (path / "initdb").exists()), None)


@contextmanager
def server() -> Iterator[str]:
    """A server that is gone afterwards; yields the SQLAlchemy URL of its database `postgres`.

    Raises:
        RuntimeError: there is no server here that this user can start.
    """
    bin_dir = binaries()
    if bin_dir is None:
        raise RuntimeError("no PostgreSQL server here: install Debian's `postgresql` or the wheel `pgserver`")
    user = _other_user() if os.geteuid() == 0 else None  # the server refuses to run as root
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    try:
        if user:
            os.chown(directory, *user)
        with _running(bin_dir, directory, user) as url:
            yield url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _running(bin_dir: Path, directory: Path, user: tuple[int, int] | None) -> Iterator[str]:
    [port] = free_ports(1)
    who = {"user": user[0], "group": user[1], "extra_groups": []} if user else {}
    data = directory / "data"
    command = [
        bin_dir / "initdb",
        "-D",
        data,
        "-U",
        "polythink",
        "--auth=trust",
        "--no-sync",
        "-E",
        "UTF8",
        "--locale=C",
    ]
    made = subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=120, **who)  # type: ignore[call-overload]
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stderr[-500:]}")
    command = [bin_dir / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", directory, "-c", "fsync=off"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, **who)  # type: ignore[call-overload]
    try:
        _wait(port, process, directory / "log")
        yield f"postgresql+psycopg://polythink@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)  # "fast": ends connections, then itself
        process.wait(30)


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(host="127.0.0.1", port=port, user="polythink", dbname="postgres").close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text()[-500:]}") from None
            time.sleep(0.1)


def _other_user() -> tuple[int, int]:
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return entry.pw_uid, entry.pw_gid


def new_database(url: str, name: str) -> str:
    """Makes an empty database on the server at `url`; returns its URL."""
    base = url.rpartition("/")[0]
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return f"{base}/{name}"
