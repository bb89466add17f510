"""Who starts next, on paper clusters."""

from typing import Any

import pytest

from ray_app.queue.admission import GENERATOR_YIELDS, Cluster, Limits, admit
from serving.jobs import JobRecord, JobStatus
from training.config import parse_config

NODE = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
UNBOUNDED = Limits(max_running=None, overtake_limit=2)


def job(
    seq: int, workers: Any = 1, status: JobStatus = JobStatus.QUEUED, overtaken: int = 0, **scaling: Any
) -> JobRecord:
    config = parse_config(
        {"model": {"path": "a/b"}, "data": {"path": "a/c"}, "scaling": {"workers": workers, "device": "cuda"} | scaling}
    )
    return JobRecord(
        seq=seq,
        id=f"job-{seq}",
        name="demo",
        status=status,
        config=config.model_dump(mode="json"),
        created_at=0,
        queued_at=0,
        priority=0,
        queue_timeout_s=60,
        max_preemptions=3,
        overtaken=overtaken,
    )


def cluster(nodes: int = 1, **free: float) -> Cluster:
    total = {name: amount * nodes for name, amount in NODE.items()}
    return Cluster((NODE,) * nodes, total | free)


def test_the_first_that_fits_starts() -> None:
    assert admit([job(1, 8), job(2)], [], cluster(), UNBOUNDED).start == job(1, 8)
    assert admit([], [], cluster(), UNBOUNDED).start is None


def test_a_job_larger_than_the_cluster_waits_with_the_reason_and_holds_nobody_up() -> None:
    decision = admit([job(1, 16, overtaken=99), job(2)], [], cluster(), UNBOUNDED)
    assert decision.reasons == {"job-1": "needs 16 GPU, cluster has 8"}
    assert decision.start == job(2)
    assert decision.passed == []


@pytest.mark.parametrize(
    ("scaling", "nodes", "reason"),
    [
        ({"workers": 8}, 0, "needs 8 GPU, cluster has 0"),
        ({"workers": 2, "accelerator_type": "A100"}, 1, "needs A100, cluster has none"),
        ({"workers": 40, "device": "cpu"}, 2, "needs 40 CPU, cluster has 32"),
        (
            {"workers": 9, "placement": "STRICT_PACK"},
            2,
            "needs 9 workers (1 CPU, 1 GPU each, STRICT_PACK), cluster has room for 8",
        ),
        (
            {"workers": 3, "placement": "STRICT_SPREAD"},
            2,
            "needs 3 workers (1 CPU, 1 GPU each, STRICT_SPREAD), cluster has room for 2",
        ),
        (
            {"workers": 3, "cpus_per_worker": 10},
            2,
            "needs 3 workers (10 CPU, 1 GPU each, PACK), cluster has room for 2",
        ),
    ],
)
def test_why_it_can_never_fit(scaling: dict[str, Any], nodes: int, reason: str) -> None:
    assert admit([job(1, **scaling)], [], cluster(nodes), UNBOUNDED).reasons == {"job-1": reason}


def test_an_elastic_job_needs_its_smallest_size() -> None:
    assert admit([job(1, [8, 16])], [], cluster(), UNBOUNDED).start is not None
    assert admit([job(1, [9, 16])], [], cluster(), UNBOUNDED).start is None


def test_smaller_jobs_pass_one_that_does_not_fit_yet_up_to_the_limit() -> None:
    running = [job(0, 2, JobStatus.RUNNING)]
    free = cluster(GPU=6)
    decision = admit([job(1, 8, overtaken=1), job(2)], running, free, UNBOUNDED)
    assert decision.start == job(2)
    assert [passed.id for passed in decision.passed] == ["job-1"]
    assert decision.reasons == {"job-1": "needs 8 GPU, 6 free"}
    decision = admit([job(1, 8, overtaken=2), job(2)], running, free, UNBOUNDED)
    assert decision.start is None
    assert decision.reasons["job-2"] == "waits behind job-1, which 2 jobs have passed"


def test_what_was_just_claimed_is_held_back_though_it_is_not_taken_yet() -> None:
    starting = [job(0, 8, JobStatus.STARTING)]
    assert admit([job(1)], starting, cluster(), UNBOUNDED).start is None
    assert admit([job(1)], starting, cluster(2), UNBOUNDED).start is not None


def test_what_others_use_is_not_free() -> None:
    decision = admit([job(1, 8)], [], cluster(GPU=7), UNBOUNDED)  # a generator holds one
    assert decision.reasons == {"job-1": "needs 8 GPU, 7 free"}


def test_the_number_of_running_jobs_may_be_bounded() -> None:
    decision = admit([job(1)], [job(0, 1, JobStatus.RUNNING)], cluster(), Limits(1, 2))
    assert decision.start is None
    assert decision.reasons == {"job-1": "1 jobs run, which is the limit"}


def test_the_generator_yields_when_that_makes_the_first_job_fit() -> None:
    limits = Limits(max_running=None, overtake_limit=2, generator_gpus=1)
    reasons = admit([job(1, 8)], [], cluster(GPU=7), limits).reasons
    assert reasons == {"job-1": f"needs 8 GPU, 7 free; {GENERATOR_YIELDS}"}
    assert admit([job(1, 8)], [], cluster(GPU=6), limits).reasons == {"job-1": "needs 8 GPU, 6 free"}
    second = admit([job(1, 8), job(2, 7)], [], cluster(GPU=6), limits).reasons["job-2"]
    assert second == "needs 7 GPU, 6 free"  # it would be the first's turn
    assert admit([job(1, 16)], [], cluster(GPU=7), limits).reasons == {"job-1": "needs 16 GPU, cluster has 8"}
