"""Kills and cuts at random moments against a real service: Ray, Serve, MLflow and the database are real, the driver trains nothing.

The seed is printed; POLYTHINK_FAULTS_SEED repeats it.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.faults import driver
from tests.integration.faults.invariants import Outcome, journal, run_dir_of, steps_lost
from tests.integration.faults.kinds import SERVICE, Fault, parameters, strike
from tests.integration.faults.play import PLAIN, STEPS, play, reach
from tests.integration.service import ENDED, Service, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    command = json.dumps([sys.executable, driver.__file__])
    home = tmp_path_factory.mktemp("faults")
    with running(home, POLYTHINK_DRIVER_COMMAND=command, POLYTHINK_MAX_RUNNING_JOBS="2") as service:
        yield service


@pytest.mark.parametrize("fault", parameters(SERVICE))
@pytest.mark.timeout(600)
def test_the_service_survives(fault: Fault, service: Service, outcomes: list[Outcome]) -> None:
    play(fault, service, outcomes)


def test_a_job_beyond_its_budget_fails_and_goes_on_when_it_is_resumed(service: Service) -> None:
    job_id = service.submit(**PLAIN | {"max_preemptions": 0})
    reach(service, job_id, "RUNNING")
    time.sleep(1)
    strike(Fault("driver", "RUNNING"), service, job_id)
    job = service.wait(job_id, lambda job: job["status"] == "FAILED", 60)
    assert job["error"]["type"] == "DriverLostError"
    before = [entry["step"] for entry in journal(run_dir_of(service, job_id)) if entry["event"] == "step"]
    service.http.post(f"/jobs/{job_id}/resume").raise_for_status()
    job = service.succeeded(job_id, 120)
    assert job["attempt"] == 2
    entries = journal(run_dir_of(service, job_id))
    steps = [entry["step"] for entry in entries if entry["event"] == "step"]
    assert steps[len(before) :] == list(range(before[-1] // 2 * 2 + 1, STEPS + 1)), steps  # from the last checkpoint
    assert steps_lost(entries, STEPS) == 0


@pytest.mark.parametrize("status", ["QUEUED", "STARTING", "RUNNING", "MERGING", "EVALUATING"])
def test_a_cancel_is_done_within_15_s_and_leaves_no_process(service: Service, status: str) -> None:
    blockers = [service.submit(**PLAIN) for _ in range(2)] if status == "QUEUED" else []
    job_id = service.submit(**PLAIN | {"overrides": {"optim.max_steps": 4}})
    reach(service, job_id, status)
    started = time.monotonic()
    for _ in range(2):  # a second one does no harm
        service.http.post(f"/jobs/{job_id}/cancel").raise_for_status()
    while service.job(job_id)["status"] not in ENDED:
        assert time.monotonic() - started < 15
        time.sleep(0.1)
    assert service.job(job_id)["status"] in {"CANCELLED", "SUCCEEDED" if status == "EVALUATING" else "CANCELLED"}
    entries = journal(run_dir_of(service, job_id))
    while any(Path(f"/proc/{entry['pid']}").exists() for entry in entries):
        assert time.monotonic() - started < 15
        time.sleep(0.1)
    for blocker in blockers:
        service.http.post(f"/jobs/{blocker}/cancel").raise_for_status()
