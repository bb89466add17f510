"""A distributed call as a Ray Job: sent with its function, followed by its log, answered by the values or the error.

The job's log is the one way back that works from outside of the cluster, so the answer comes as lines of it that open with a
random mark, which the caller leaves out of what it shows.
"""

import asyncio
import base64
import os
import pickle
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray_app.functions.hardware import Hardware
from ray_app.functions.packed_call import pack_call, portable
from ray_app.functions.workers import run_packed
from training.errors import ConfigError, StorageError, TrainingError

CALL_FILE = "call.pkl"
LINE_LENGTH = 16_384
MAX_ANSWER_MIB = 16
POLL_S = 0.5


def run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], hardware: Hardware) -> list[Any]:
    """As `workers.run`, in a Ray Job at RAY_ADDRESS (`http://HOST:8265`), or on the cluster that `polythink up` started here.

    Raises:
        ConfigError: there is no address.
        TrainingError: the job ended without an answer.
    """
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(_address())
    mark = secrets.token_hex(12)
    with tempfile.TemporaryDirectory(prefix="polythink-") as directory:
        call = (pack_call(function, args, kwargs), asdict(hardware) | {"remote": False})
        (Path(directory) / CALL_FILE).write_bytes(pickle.dumps(call))
        job_id = client.submit_job(
            entrypoint=f"python -m ray_app.functions.remote_call {mark}",
            runtime_env={"working_dir": directory, "env_vars": {"PYTHONUNBUFFERED": "1"}},
            metadata={"polythink_function": getattr(function, "__qualname__", "function")},
        )
    print(f"Ray job {job_id}", flush=True)
    try:
        _follow(client, job_id, mark)
    except BaseException:  # Ctrl-C above all: nobody waits for the job any more
        client.stop_job(job_id)
        raise
    values, error, notes = _answer(client, job_id, mark)
    if error is not None:
        error.__notes__ = notes  # an error with a pickling of its own loses them
        raise error
    return values


def _address() -> str:
    from ray_app.cluster import lifecycle
    from ray_app.cluster import state as cluster_state

    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        return address
    cluster = cluster_state.load()
    if cluster is None or not lifecycle.is_up(cluster):
        raise ConfigError(
            "remote=True, and there is no cluster to send the call to",
            hint="Set RAY_ADDRESS=http://HEAD:8265, or start one here with `polythink up`.",
            field="remote",
        )
    return cluster.dashboard_url


def _follow(client: Any, job_id: str, mark: str) -> None:
    """Prints the job's log as it comes, until the job ended."""
    tail = threading.Thread(target=lambda: asyncio.run(_print_log(client, job_id, mark)), daemon=True)
    tail.start()  # a thread with a loop of its own: in a notebook, this one has one that runs
    while not client.get_job_status(job_id).is_terminal():
        time.sleep(POLL_S)
    tail.join(timeout=10)


async def _print_log(client: Any, job_id: str, mark: str) -> None:
    async for chunk in client.tail_job_logs(job_id):
        for line in chunk.splitlines(keepends=True):
            if not line.startswith(mark):
                print(line, end="", flush=True)


Answer = tuple[list[Any], BaseException | None, list[str]]
"""Return values by rank, or the error and its notes."""


def _answer(client: Any, job_id: str, mark: str) -> Answer:
    lines = [line for line in client.get_job_logs(job_id).splitlines() if line.startswith(mark)]
    if not lines:
        details = client.get_job_info(job_id)
        raise TrainingError(
            f"the Ray job {job_id} ended {details.status} without an answer: {details.message}",
            hint=f"`ray job logs {job_id}` shows its log.",
        )
    answer: Answer = pickle.loads(base64.b64decode("".join(line.removeprefix(mark).strip() for line in lines)))
    return answer


# In the job's driver


def main(mark: str) -> int:
    """Runs the call that lies in the working directory, and prints the answer. Returns 0, or 1 when the function raised."""
    import ray
    from ray import cloudpickle

    call, settings = pickle.loads(Path(CALL_FILE).read_bytes())
    answer: Answer
    try:
        answer = run_packed(call, Hardware(**settings)), None, []
    except Exception as error:  # the caller's to see, whatever it is
        answer = [], portable(error), getattr(error, "__notes__", [])
    packed = cloudpickle.dumps(answer)
    if len(packed) > MAX_ANSWER_MIB * 2**20:
        answer = [], _too_large(len(packed)), []
        packed = cloudpickle.dumps(answer)
    ray.shutdown()  # no worker's line gets in between
    for line in _lines(packed):
        print(f"{mark} {line}", flush=True)
    return 0 if answer[1] is None else 1


def _too_large(size: int) -> StorageError:
    return StorageError(
        f"the return values are {size / 2**20:.0f} MiB; a remote call brings back {MAX_ANSWER_MIB} MiB at most",
        hint="Write them to storage, and return where they are.",
    )


def _lines(packed: bytes) -> Iterator[str]:
    text = base64.b64encode(packed).decode()
    return (text[start : start + LINE_LENGTH] for start in range(0, len(text), LINE_LENGTH))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
