"""Routes of jobs and plans."""

import hashlib
import json
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi import Path as InPath
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from serving.errors import NotFoundError, UnavailableError
from serving.jobs import JobFilter, JobRecord, JobStatus, JobStore, NewJob
from serving.requests import PathPolicy, resolve_config
from serving.routes.streams import chunks, follow, job_events, log_events, read_tail, write_zip
from serving.schemas import (
    ID_PATTERN,
    KEY_PATTERN,
    Job,
    JobPage,
    JobQuery,
    JobRequest,
    LogQuery,
    MetricsAnswer,
    MetricsQuery,
    ModelsAnswer,
    PlanRequest,
    job_answer,
    job_summary,
    model_answer,
)
from training.config import TrainConfig
from training.run_dir import RunDir

JobId = Annotated[str, InPath(pattern=ID_PATTERN)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200, pattern=KEY_PATTERN)]
"""The same key with the same body gives the same answer, however often it is sent."""
Planner = Callable[[TrainConfig], dict[str, Any]]


@dataclass(frozen=True)
class JobRoutes:
    """The job routes over a store.

    Args:
        plan: estimates what a configuration needs, and raises a PolythinkError when it cannot work; None makes no plans.
        mlflow_url, ray_url: where those interfaces are shown; None leaves the links out.
    """

    store: JobStore
    policy: PathPolicy
    plan: Planner | None
    queue_timeout_s: float
    mlflow_url: str | None = None
    ray_url: str | None = None

    def router(self) -> APIRouter:
        router = APIRouter(tags=["jobs"])
        add = router.add_api_route
        add("/jobs", self.submit, methods=["POST"], status_code=202, response_model=Job)
        add("/jobs", self.list, methods=["GET"], response_model=JobPage)
        add("/jobs/{job_id}", self.get, methods=["GET"], response_model=Job)
        add("/jobs/{job_id}/cancel", self.cancel, methods=["POST"], status_code=202, response_model=Job)
        add("/jobs/{job_id}/resume", self.resume, methods=["POST"], status_code=202, response_model=Job)
        add("/jobs/{job_id}/logs", self.logs, methods=["GET"], response_class=PlainTextResponse)
        add("/jobs/{job_id}/events", self.events, methods=["GET"], response_class=StreamingResponse)
        add("/jobs/{job_id}/metrics", self.metrics, methods=["GET"], response_model=MetricsAnswer)
        add("/jobs/{job_id}/adapter", self.adapter, methods=["GET"], response_class=StreamingResponse)
        add("/plans", self.make_plan, methods=["POST"], response_model=dict[str, Any])
        add("/models", self.models, methods=["GET"], response_model=ModelsAnswer)
        return router

    # Handlers are plain functions: FastAPI runs them in its thread pool, so that a slow disk or database never
    # stops the event loop.

    def submit(self, body: JobRequest, idempotency_key: IdempotencyKey = None) -> Job:
        """Queue a job."""
        body_hash = _digest(body.model_dump(mode="json"))
        if idempotency_key and (known := self.store.recall("jobs", idempotency_key, body_hash)):
            return self._answer(self._known(known["id"]))  # a preset may have changed since; the answer does not
        config = resolve_config(body, self.policy)
        job = NewJob(
            name=config.name,
            config=config,
            plan=self.plan(config) if self.plan else None,
            priority=body.priority,
            queue_timeout_s=body.queue_timeout_s or self.queue_timeout_s,
            max_preemptions=body.max_preemptions,
        )
        return self._answer(self.store.submit(job, idempotency_key, body_hash))

    def list(self, query: Annotated[JobQuery, Query()]) -> JobPage:
        """Jobs, newest first."""
        before = int(query.cursor) if query.cursor else None
        wanted = JobFilter(tuple(query.status), query.name, before, query.limit + 1)  # one more tells if a page follows
        jobs = self.store.list_jobs(wanted)
        page = jobs[: query.limit]
        cursor = str(page[-1].seq) if len(jobs) > query.limit else None
        summaries = [job_summary(job, self.mlflow_url, self.ray_url) for job in page]
        return JobPage(jobs=summaries, next_cursor=cursor)

    def get(self, job_id: JobId) -> Job:
        """One job, whole."""
        return self._answer(self._known(job_id))

    def cancel(self, job_id: JobId) -> Job:
        """Stop a job. The answer may still say RUNNING: CANCELLED means that no process is left."""
        return self._answer(self.store.request_cancel(job_id) or self._known(job_id))

    def resume(self, job_id: JobId) -> Job:
        """Queue a FAILED or CANCELLED job again, to go on from its last whole checkpoint."""
        return self._answer(self.store.resume(job_id) or self._known(job_id))

    def logs(self, job_id: JobId, query: Annotated[LogQuery, Query()], request: Request) -> Response:
        """The driver's log: text, or server-sent events with `follow=true`."""
        path = self._run_dir(self._known(job_id)).log_path
        if not query.follow:
            return PlainTextResponse(read_tail(path, query.tail))
        last_id = request.headers.get("last-event-id", "")  # sent by a client whose connection broke
        offset = int(last_id) if re.fullmatch("[0-9]{1,18}", last_id) else _tail_offset(path, query.tail)

        def is_over() -> bool:
            job = self.store.get(job_id)
            return job is None or job.status.is_terminal()

        return _event_stream(log_events(path, is_over, offset))

    def events(self, job_id: JobId) -> Response:
        """The job as server-sent events, one at each change."""
        self._known(job_id)

        def render(job: JobRecord) -> str:
            return job_summary(job, self.mlflow_url, self.ray_url).model_dump_json()

        return _event_stream(job_events(lambda: self.store.get(job_id), render))

    def metrics(self, job_id: JobId, query: Annotated[MetricsQuery, Query()]) -> MetricsAnswer:
        """What was logged: loss, learning rate, gradient norm, speed."""
        lines = self._run_dir(self._known(job_id)).metrics()
        return MetricsAnswer(metrics=[line for line in lines if line.get("step", 0) > query.after_step])

    def adapter(self, job_id: JobId) -> Response:
        """The trained LoRA adapter in PEFT's layout, as a zip."""
        adapter = self._run_dir(self._known(job_id)).adapter
        if not (adapter / "adapter_config.json").is_file():
            raise NotFoundError(f"job {job_id} has no adapter yet", hint="It is written when training ends.")
        archive = tempfile.TemporaryFile()  # noqa: SIM115 - chunks() closes it; it has no name: it is gone with the answer, however that ends
        size = write_zip(adapter, archive)
        headers = {"Content-Disposition": f'attachment; filename="{job_id}-adapter.zip"', "Content-Length": str(size)}
        return StreamingResponse(chunks(archive), media_type="application/zip", headers=headers)

    def make_plan(self, body: PlanRequest) -> dict[str, Any]:
        """What a job would need: GPU and host memory, disk, time. Nothing is started."""
        if self.plan is None:
            raise UnavailableError("this service makes no plans")
        return self.plan(resolve_config(body, self.policy))

    def models(self) -> ModelsAnswer:
        """Merged models that jobs made, newest first."""
        jobs = self.store.list_jobs(JobFilter(statuses=(JobStatus.SUCCEEDED,), limit=1000))
        return ModelsAnswer(models=[model_answer(job) for job in jobs if (job.result or {}).get("model")])

    def _answer(self, job: JobRecord) -> Job:
        return job_answer(job, self.mlflow_url, self.ray_url)

    def _known(self, job_id: str) -> JobRecord:
        job = self.store.get(job_id)
        if job is None:
            raise NotFoundError(f"there is no job {job_id!r}", hint="GET /jobs lists them.", field="job_id")
        return job

    def _run_dir(self, job: JobRecord) -> RunDir:
        return RunDir(Path(job.run_dir))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _tail_offset(path: Path, lines: int | None) -> int:
    """The byte at which the last `lines` lines of a file begin, which may not exist yet; None is all of them."""
    if lines is None or not path.exists():
        return 0
    starts = deque([0], maxlen=lines + 1)  # the last one is the file's end
    with path.open("rb") as file:
        for line in file:
            starts.append(starts[-1] + len(line))
    return starts[0]


def _event_stream(events: Iterator[str]) -> StreamingResponse:
    # no-transform and the nginx header keep proxies from collecting events before they pass them on
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    return StreamingResponse(follow(events), media_type="text/event-stream", headers=headers)
