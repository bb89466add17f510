"""What runs on this machine from this POLYTHINK_HOME: ports and processes, kept in `POLYTHINK_HOME/cluster/<host>.json`."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from ray_app.cluster.processes import Process, ServiceError, free_ports
from training.errors import ConfigError
from training.run_dir import polythink_home, write_json

LOOPBACK = "127.0.0.1"


class Ports(BaseModel):
    """Where things listen; 0 takes a free port."""

    port: int = 8000
    mlflow_port: int = 5000
    dashboard_port: int = 8265
    ray_port: int = 6379

    @classmethod
    def from_env(cls) -> "Ports":
        """POLYTHINK_PORT, POLYTHINK_MLFLOW_PORT, POLYTHINK_DASHBOARD_PORT and POLYTHINK_RAY_PORT, else the defaults.

        Raises:
            ConfigError: a value is no port.
        """
        values = {}
        for name in cls.model_fields:
            variable = f"POLYTHINK_{name.upper()}"
            if text := os.environ.get(variable):
                if not text.isdecimal() or int(text) > 65_535:
                    raise ConfigError(
                        f"{variable}={text!r} is not a port", hint="0 to 65535; 0 takes a free one.", field=variable
                    )
                values[name] = int(text)
        return cls(**values)

    def resolved(self) -> "Ports":
        """With free ports in the place of 0."""
        free = iter(free_ports(4))
        return Ports(**{name: port or next(free) for name, port in self.model_dump().items()})


class Cluster(BaseModel):
    """What `up` or `join` started on this machine."""

    host: str = LOOPBACK
    """Where the API listens, and Ray's address of this node."""
    ports: Ports = Ports()
    joined: str | None = None
    """The head's address, `IP:PORT`, on a machine that joined one."""
    owns_ray: bool = True
    """Whether Ray is ours; False where it ran before `up`."""
    tracking_uri: str | None = None
    """MLflow of the user's; None where `up` starts one."""
    processes: dict[str, Process] = {}
    """`ray` and `mlflow`, as far as they were started by us."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.ports.port}"

    @property
    def mlflow_url(self) -> str:
        return self.tracking_uri or f"http://{LOOPBACK}:{self.ports.mlflow_port}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports.dashboard_port}"

    @property
    def is_open(self) -> bool:
        """Whether others than this machine reach it."""
        return self.host != LOOPBACK

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].alive

    @property
    def any_alive(self) -> bool:
        return any(process.alive for process in self.processes.values())

    def save(self) -> None:
        write_json(state_path(), self.model_dump(mode="json"))


def state_path() -> Path:
    """Per host: on shared storage, several machines have one POLYTHINK_HOME."""
    return polythink_home() / "cluster" / f"{socket.gethostname()}.json"


def load() -> Cluster | None:
    """What runs, or ran, on this machine; None before the first `up` and after `down`."""
    path = state_path()
    return Cluster.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None


@contextmanager
def lock() -> Iterator[None]:
    """One `up`, `join` or `down` at a time.

    Raises:
        ServiceError: another is at work.
    """
    path = state_path().with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServiceError("another `polythink up` or `down` is at work", hint="Wait for it to end.") from None
        yield
