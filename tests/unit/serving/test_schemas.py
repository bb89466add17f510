"""Wire types: what a job looks like to a client, and text that no database can hold."""

import json

import pytest
from pydantic import ValidationError

from serving.jobs import JobRecord, JobStatus
from serving.schemas import JobRequest, PlanRequest, job_answer, job_summary
from training.config import TrainConfig

CONFIG = {"model": {"path": "acme/base"}, "data": {"path": "acme/rows"}}

RECORD = JobRecord(
    seq=7,
    id="job-1",
    name="demo",
    status=JobStatus.RUNNING,
    config={"name": "demo"},
    created_at=0.0,
    queued_at=0.0,
    priority=2,
    queue_timeout_s=60,
    max_preemptions=3,
    attempt=2,
    run_dir="/runs/job-1",
    ray_job_id="job-1-2",
    started_at=1.5,
    progress={"step": 3, "loss": 2.5, "mlflow_run_id": "abc", "phase": "RUNNING"},
    result={"model": "/m"},
)


def test_a_job_is_shown_with_iso_times_known_numbers_and_links() -> None:
    job = json.loads(job_answer(RECORD, "http://mlflow", "http://ray").model_dump_json())
    assert (job["created_at"], job["started_at"], job["ended_at"]) == (
        "1970-01-01T00:00:00Z",
        "1970-01-01T00:00:01.500000Z",
        None,
    )
    assert (job["progress"]["step"], job["progress"]["loss"], job["progress"]["eta_s"]) == (3, 2.5, None)
    assert job["links"] == {
        "logs": "/jobs/job-1/logs",
        "events": "/jobs/job-1/events",
        "mlflow": "http://mlflow/#/runs/abc",
        "ray_dashboard": "http://ray/#/jobs/job-1-2",
    }
    assert {"seq", "run_dir", "ray_job_id", "submitted_at"}.isdisjoint(job)  # how it is kept is nobody's business


def test_a_list_leaves_out_what_is_long() -> None:
    assert set(job_answer(RECORD).model_dump()) - set(job_summary(RECORD).model_dump()) == {"config", "plan", "result"}


def test_the_request_contains_a_configuration_and_does_not_repeat_it() -> None:
    request = JobRequest.model_validate({"config": CONFIG})
    assert isinstance(request.config, TrainConfig)
    assert set(JobRequest.model_fields) & set(TrainConfig.model_fields) == {"name", "deploy"}
    assert "TrainConfig" in json.dumps(JobRequest.model_json_schema())


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
@pytest.mark.parametrize("place", ["value", "key", "nested"])
def test_text_that_cannot_be_stored_is_refused_wherever_it_stands(text: str, place: str) -> None:
    overrides = {"value": {"name": text}, "key": {text: 1}, "nested": {"a": [{"b": [text]}]}}[place]
    with pytest.raises(ValidationError, match="NUL or half a surrogate pair"):
        PlanRequest.model_validate({"preset": "tiny", "overrides": overrides})


def test_more_overrides_than_a_configuration_has_keys_are_refused() -> None:
    with pytest.raises(ValidationError):
        JobRequest.model_validate({"preset": "tiny", "overrides": {f"key{number}": 1 for number in range(201)}})
