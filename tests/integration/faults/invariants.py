"""What must hold after every fault: no job lost, none done twice, none stuck, the truth within a minute."""

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ray_app.queue.dispatcher import driver_lives
from tests.integration.service import ENDED, Service
from training.run_dir import RunDir

TRUTH_S = 60.0
END_S = 180.0


@dataclass(frozen=True)
class Outcome:
    fault: str
    hit: int
    lost: int
    doubled: int
    stuck: int
    truth_s: float
    """Longest time, after what was killed was back, until every status told the truth for good."""


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| fault | processes hit | lost | doubled | stuck | time to the truth, s |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        lines.append(f"| {o.fault} | {o.hit} | {o.lost} | {o.doubled} | {o.stuck} | {o.truth_s:.1f} |")
    lost, doubled, stuck = (sum(getattr(o, name) for o in outcomes) for name in ("lost", "doubled", "stuck"))
    worst = max(o.truth_s for o in outcomes)
    hit = sum(o.hit for o in outcomes)
    return "\n".join(
        [*lines, f"| {len(outcomes)} faults | {hit} | {lost} | {doubled} | {stuck} | {worst:.1f} at most |"]
    )


def keep(outcomes: Sequence[Outcome], path: Path) -> None:
    """Puts `outcomes` into the table at `path`, in the place of earlier ones of the same faults."""
    rows = [line.split("|")[1:-1] for line in path.read_text().splitlines()[2:-1]] if path.exists() else []
    earlier = [Outcome(row[0].strip(), *map(int, row[1:5]), float(row[5])) for row in rows]
    if outcomes:
        path.write_text(table([*{o.fault: o for o in [*earlier, *outcomes]}.values()]) + "\n")


def run_dir_of(service: Service, job_id: str) -> RunDir:
    return RunDir(service.home / "runs" / job_id)


def tells_the_truth(job: dict[str, Any], run_dir: RunDir) -> bool:
    """Whether the job's status is what its processes and files say."""
    lives = driver_lives(run_dir)
    if job["status"] in ENDED or job["status"] == "QUEUED":
        succeeded = (run_dir.result() or {}).get("status") == "SUCCEEDED"
        return not lives and (job["status"] != "SUCCEEDED" or succeeded)
    return (
        lives or job["status"] == "STARTING" or run_dir.result() is not None
    )  # it has left; its exit is being noticed


def watch(
    service: Service, job_ids: Sequence[str], struck: float, end_s: float = END_S
) -> tuple[dict[str, dict[str, Any]], float]:
    """The jobs once all have ended, or after `end_s`; and when, after the strike, an answer was last untrue or missing."""
    untrue = 0.0
    jobs: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + end_s
    while time.monotonic() < deadline:
        for job_id in job_ids:
            try:
                jobs[job_id] = service.job(job_id)
                honest = tells_the_truth(jobs[job_id], run_dir_of(service, job_id))
            except httpx.HTTPError:
                honest = False
            if not honest:
                untrue = time.monotonic() - struck
        if len(jobs) == len(job_ids) and all(job["status"] in ENDED for job in jobs.values()):
            break
        time.sleep(0.3)
    return jobs, untrue


def journal(run_dir: RunDir) -> list[dict[str, Any]]:
    path = Path(run_dir.root, "journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def times_doubled(entries: Sequence[dict[str, Any]], attempts: int) -> int:
    """How often a run was at work twice: more starts than attempts, two processes that alternate, a second end."""
    pids = [entry["pid"] for entry in entries]
    handovers = sum(before != after for before, after in itertools.pairwise(pids))
    starts = sum(entry["event"] == "start" for entry in entries)
    ends = sum(entry["event"] == "end" for entry in entries)
    return max(0, starts - attempts) + (handovers - max(0, len(set(pids)) - 1)) + max(0, ends - 1)


def steps_lost(entries: Sequence[dict[str, Any]], total: int) -> int:
    """Steps that a run which succeeded never took."""
    return total - len({entry["step"] for entry in entries if entry["event"] == "step"})
