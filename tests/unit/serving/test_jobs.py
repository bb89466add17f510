"""Statuses: what may follow what, and that they fit the phases of a run."""

import pytest

from serving.jobs import ACTIVE, TRANSITIONS, JobStatus
from training.run_dir import Phase


def test_every_status_lists_what_may_follow() -> None:
    assert set(TRANSITIONS) == set(JobStatus)


def test_a_succeeded_job_never_changes_and_other_ends_only_by_a_new_attempt() -> None:
    assert TRANSITIONS[JobStatus.SUCCEEDED] == set()
    for status in (JobStatus.FAILED, JobStatus.CANCELLED):
        assert TRANSITIONS[status] == {JobStatus.QUEUED, JobStatus.STARTING}


@pytest.mark.parametrize("status", JobStatus)
def test_a_status_waits_works_or_has_ended(status: JobStatus) -> None:
    assert [status is JobStatus.QUEUED, status.is_active(), status.is_terminal()].count(True) == 1


@pytest.mark.parametrize("status", [JobStatus.QUEUED, *ACTIVE])
def test_whatever_has_not_ended_can_fail_and_be_cancelled(status: JobStatus) -> None:
    assert {JobStatus.FAILED, JobStatus.CANCELLED} <= TRANSITIONS[status]


def test_every_status_is_reached_from_the_queue() -> None:
    reached = {JobStatus.QUEUED}
    for _ in JobStatus:
        reached |= set().union(*(TRANSITIONS[status] for status in reached))
    assert reached == set(JobStatus)


def test_phases_of_a_run_are_statuses_of_the_same_name() -> None:
    assert {phase.value for phase in Phase} <= {status.value for status in JobStatus}
