"""How fast jobs are taken in and listed: `python -m tests.benchmarks.submit [--database-url URL] [--json FILE]`.

2,000 submits from 32 clients, a fifth of them with a key that was used before; then `GET /jobs` over 10,000 finished jobs.
The server is the API's application under uvicorn in a process of its own, on SQLite unless told otherwise.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import insert

from ray_app.cluster.processes import free_ports
from ray_app.queue.store import SqlStore
from ray_app.queue.tables import jobs
from serving.jobs import JobStatus, NewJob
from training.config import parse_config

SUBMITS = 2_000
CLIENTS = 32
DUPLICATES = 0.2
FINISHED = 10_000
READS = 200

CONFIG = {"model": {"path": "acme/base"}, "data": {"path": "acme/rows"}, "scaling": {"device": "cpu"}}

SERVER = """
import sys, uvicorn
from pathlib import Path
from ray_app.queue.store import SqlStore
from serving.api import create_app
url, home, port = sys.argv[1:]
app = create_app(SqlStore(url, home + "/runs"), home=Path(home), data_roots=[Path(home)])
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
"""


@contextmanager
def served(database_url: str, home: str) -> Iterator[str]:
    """The API in a process of its own; yields its URL."""
    [port] = free_ports(1)
    process = subprocess.Popen([sys.executable, "-c", SERVER, database_url, home, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{url}/readyz").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def keys(rng: random.Random) -> list[str]:
    """One idempotency key per submit, a share of them repeated, in random order."""
    fresh = [f"key-{i}" for i in range(round(SUBMITS * (1 - DUPLICATES)))]
    sent = fresh + rng.choices(fresh, k=SUBMITS - len(fresh))
    rng.shuffle(sent)
    return sent


async def submit_all(url: str, sent: list[str]) -> tuple[list[float], dict[str, set[str]]]:
    """Latencies in seconds, and the job ids that each key was answered with."""
    waiting = asyncio.Queue[str]()
    for key in sent:
        waiting.put_nowait(key)
    latencies: list[float] = []
    ids: dict[str, set[str]] = {}

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while not waiting.empty():
                key = waiting.get_nowait()
                started = time.perf_counter()
                answer = await http.post("/jobs", json={"config": CONFIG}, headers={"Idempotency-Key": key})
                latencies.append(time.perf_counter() - started)
                answer.raise_for_status()
                ids.setdefault(key, set()).add(answer.json()["id"])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return latencies, ids


def fill(store: SqlStore) -> None:
    """FINISHED jobs that have succeeded, as bulky as real ones."""
    config = parse_config(CONFIG).resolved()
    template = store.submit(NewJob("template", config))
    row: dict[str, Any] = {
        "name": "finished",
        "status": JobStatus.SUCCEEDED,
        "config": template.config,
        "created_at": 0,
        "queued_at": 0,
        "priority": 0,
        "queue_timeout_s": 60,
        "max_preemptions": 3,
        "run_dir": "/runs/x",
        "progress": {"step": 100, "total_steps": 100, "loss": 1.0},
        "result": {"model": "/m", "evaluation": {str(i): i for i in range(100)}},
    }
    rows = [row | {"id": f"job-f{i}", "ray_job_id": f"job-f{i}"} for i in range(FINISHED)]
    with store.engine.execution_options(writes=True).begin() as connection:
        connection.execute(insert(jobs), rows)


def read_all(url: str) -> list[float]:
    with httpx.Client(base_url=url, timeout=60) as http:
        latencies = []
        for _ in range(READS):
            started = time.perf_counter()
            assert len(http.get("/jobs").raise_for_status().json()["jobs"]) == 50
            latencies.append(time.perf_counter() - started)
    return latencies


def measure(database_url: str, home: str, seed: int) -> dict[str, Any]:
    """The figures of one run; times in milliseconds."""
    load_1m = round(os.getloadavg()[0], 1)
    with served(database_url, home) as url:
        sent = keys(random.Random(seed))
        started = time.perf_counter()
        latencies, ids = asyncio.run(submit_all(url, sent))
        wall_s = time.perf_counter() - started
        store = SqlStore(database_url, home)
        made = store.count()
        fill(store)
        store.close()
        reads = read_all(url)
    return {
        "cpus": os.cpu_count(),
        "load_1m": load_1m,  # of others, before
        "database": database_url.partition(":")[0],
        "clients": CLIENTS,
        "submits": len(latencies),
        "repeated_keys": len(sent) - len(set(sent)),
        "wall_s": round(wall_s, 1),
        "submit_p50_ms": _ms(latencies, 0.5),
        "submit_p99_ms": _ms(latencies, 0.99),
        "jobs": made,
        "doubled": made - len(set(sent)) + sum(len(answers) - 1 for answers in ids.values()),
        "lost": len(set(sent)) - len(ids),
        "finished_jobs": FINISHED,
        "list_p50_ms": _ms(reads, 0.5),
        "list_p99_ms": _ms(reads, 0.99),
    }


def _ms(seconds: list[float], share: float) -> float:
    return round(1000 * statistics.quantiles(seconds, n=100)[round(share * 100) - 1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database-url", help="SQLAlchemy URL of an empty database; SQLite in a temporary directory")
    parser.add_argument("--json", type=Path, help="file to write the figures to as well")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        figures = measure(arguments.database_url or f"sqlite:///{Path(home) / 'jobs.db'}", home, arguments.seed)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    assert (figures["doubled"], figures["lost"]) == (0, 0)


if __name__ == "__main__":
    main()
