"""One fault, played: a job in the moment that is asked for, the strike, what came in meanwhile, and what became of it all."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from mlflow import MlflowClient

from tests.integration.faults.invariants import (
    END_S,
    TRUTH_S,
    Outcome,
    journal,
    run_dir_of,
    steps_lost,
    times_doubled,
    watch,
)
from tests.integration.faults.kinds import SEED, Fault, strike
from tests.integration.service import ENDED, Service
from training.run_dir import RunDir
from training.tracking.run import JOB_TAG

STEPS = 12
PLAIN: dict[str, Any] = {
    "config": {"model": {"path": "acme/base"}, "data": {"path": "acme/rows"}, "scaling": {"device": "cpu"}},
    "overrides": {"optim.max_steps": STEPS},
    "max_preemptions": 5,
}
"""A job for the driver that trains nothing."""

Faulty = Callable[[RunDir, dict[str, Any]], tuple[int, int]]
"""What a run that has ended lost, and what it did twice."""


def submit(service: Service, body: dict[str, Any], key: str) -> str:
    """A job, asked for until the service answers: the key keeps it one job."""
    deadline = time.monotonic() + 120
    while True:
        try:
            answer = service.http.post("/jobs", json=body, headers={"Idempotency-Key": key})
            if answer.status_code == 202:
                return answer.json()["id"]
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "no answer in two minutes"
        time.sleep(0.3)


def reach(service: Service, job_id: str, moment: str, timeout_s: float = 120) -> None:
    """Waits until the job is where the fault is to strike."""
    order = ["QUEUED", "STARTING", "RUNNING", "MERGING", "EVALUATING", "SUCCEEDED"]
    wanted = {"cancelling": "RUNNING", "submitting": "QUEUED", "ended": "SUCCEEDED"}.get(moment, moment)
    reached = set(order[order.index(wanted) :])
    service.wait(job_id, lambda job: job["status"] in reached, timeout_s)


def by_journal(run_dir: RunDir, job: dict[str, Any]) -> tuple[int, int]:
    """Of the driver that trains nothing and keeps a journal."""
    entries = journal(run_dir)
    lost = steps_lost(entries, STEPS) if job["status"] == "SUCCEEDED" else 0
    return lost, times_doubled(entries, job["attempt"])


@dataclass(frozen=True)
class Kind:
    """What is played with: which jobs, and how they show what they did."""

    body: dict[str, Any]
    faulty: Faulty
    last_words: str
    """In the log of a job that succeeded."""
    end_s: float = END_S


QUICK = Kind(PLAIN, by_journal, "EVALUATING")


def play(fault: Fault, service: Service, outcomes: list[Outcome], kind: Kind = QUICK) -> None:
    """Plays `fault` and asserts what must hold after it."""
    rng = random.Random(f"{SEED} {fault.id}")
    body = kind.body | {"name": "tracked" if fault.tracked else "plain"}
    job_id = submit(service, body, f"{SEED}-{fault.id}-first")
    reach(service, job_id, fault.moment, kind.end_s)
    ids = [job_id]

    def submit_more(*keys: str) -> None:
        ids.extend(submit(service, body, f"{SEED}-{fault.id}-{key}") for key in keys)

    during = threading.Thread(target=submit_more, args=("a", "b", "c", "d") if fault.moment == "submitting" else ())
    during.start()
    if fault.moment == "cancelling":
        service.http.post(f"/jobs/{job_id}/cancel").raise_for_status()
    time.sleep(rng.uniform(0, 0.8))
    hit = strike(fault, service, job_id)
    struck = time.monotonic()
    after = threading.Thread(target=submit_more, args=("after",) if kind is QUICK else ())
    after.start()
    _, first_s = watch(service, [job_id], struck, kind.end_s)
    during.join()
    after.join()
    jobs, last_s = watch(service, ids, struck, kind.end_s)
    outcome = judge(fault, service, jobs, ids, kind.faulty, hit, max(first_s, last_s))
    said = {id_: (job["status"], job["error"]) for id_, job in jobs.items()}
    assert hit > 0 or fault.moment == "cancelling", "there was nothing to strike"  # the cancel may have been faster
    outcomes.append(outcome)
    assert (outcome.lost, outcome.doubled, outcome.stuck) == (0, 0, 0), said
    assert outcome.truth_s < TRUTH_S
    assert_logs_are_kept(service, jobs, kind.last_words)
    if fault.tracked:
        assert_no_run_is_left(service, ids)


def judge(
    fault: Fault,
    service: Service,
    jobs: dict[str, dict[str, Any]],
    ids: list[str],
    faulty: Faulty,
    hit: int,
    truth_s: float,
) -> Outcome:
    lost, doubled = len(ids) - len(jobs), 0
    for id_, job in jobs.items():
        cancelled = id_ == ids[0] and fault.moment == "cancelling"
        missing, twice = faulty(run_dir_of(service, id_), job)
        doubled += twice
        lost += missing if job["status"] == "SUCCEEDED" else job["status"] == "FAILED" or not cancelled
    stuck = sum(job["status"] not in ENDED for job in jobs.values())
    return Outcome(fault.id, hit, lost, doubled, stuck, truth_s)


def assert_logs_are_kept(service: Service, jobs: dict[str, dict[str, Any]], last_words: str) -> None:
    """Logs of jobs that succeeded reach to their last phase, and the jobs stay what they are."""
    for id_, job in jobs.items():
        if job["status"] == "SUCCEEDED":
            assert last_words in service.http.get(f"/jobs/{id_}/logs").text
            assert service.job(id_)["status"] == "SUCCEEDED"


def assert_no_run_is_left(service: Service, ids: list[str]) -> None:
    """Within 30 s every run that these jobs have in MLflow has ended."""
    client = MlflowClient(service.cluster.mlflow_url)
    deadline = time.monotonic() + 30
    while True:
        experiment = client.get_experiment_by_name("polythink")
        runs = client.search_runs([experiment.experiment_id], "attributes.status = 'RUNNING'") if experiment else []
        left = [run.data.tags[JOB_TAG] for run in runs if run.data.tags.get(JOB_TAG) in ids]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(1)
