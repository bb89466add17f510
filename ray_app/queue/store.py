"""The job store: SQLAlchemy on SQLite (WAL) or PostgreSQL. Statuses change only by compare-and-set."""

import dataclasses
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError

from ray_app.queue import schema
from ray_app.queue.tables import answers, jobs, open_engine
from serving.errors import ConflictError, UnavailableError
from serving.jobs import ACTIVE, TRANSITIONS, JobFilter, JobRecord, JobStatus, NewJob
from training.config import TrainConfig

AFRESH: dict[str, Any] = {"ended_at": None, "error": None, "result": None, "tracking_due": None}
"""What a new attempt forgets of the one before."""


class SqlStore:
    """Jobs and idempotency keys in a database. All methods may be called from several threads and processes.

    Args:
        url: SQLAlchemy URL.
        runs: directory in which run directories are made.

    Raises:
        StorageError: the database was upgraded by a newer version.
    """

    def __init__(self, url: str, runs: str):
        self.engine = open_engine(url)
        self._writer = self.engine.execution_options(writes=True)
        # SQLite lets those who wait for their turn to write sleep and try again, in no order. Threads of one process
        # queue up here instead: of 32 that submit at once, the slowest hundredth waits 0.4 s and not 1.6.
        self._turn: AbstractContextManager[Any] = (
            threading.Lock() if self.engine.dialect.name == "sqlite" else nullcontext()
        )
        self.runs = runs
        try:
            schema.upgrade(self.engine)
        except BaseException:
            self.engine.dispose()
            raise

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """A transaction that changes something."""
        with self._turn, _answering(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with _answering(), self.engine.connect() as connection:
            yield connection

    def ping(self) -> None:
        with self._read() as connection:
            connection.execute(select(func.count()).select_from(answers).where(answers.c.scope == "")).scalar()

    # what clients ask for

    def submit(self, job: NewJob, key: str | None = None, body_hash: str = "") -> JobRecord:
        job_id = f"job-{secrets.token_hex(6)}"
        try:
            with self._write() as connection:
                if key is not None:
                    row = {"scope": "jobs", "key": key, "body_hash": body_hash, "answer": {"id": job_id}}
                    connection.execute(insert(answers).values(row | {"created_at": time.time()}))
                return self._insert(connection, job_id, job)
        except IntegrityError:
            known = self.recall("jobs", key, body_hash) if key is not None else None
            if known is None:  # not the key, so something is wrong
                raise
            record = self.get(known["id"])
            assert record is not None  # written together with its key
            return record

    def _insert(self, connection: Connection, job_id: str, job: NewJob, **values: Any) -> JobRecord:
        now = time.time()
        row = {
            "id": job_id,
            "name": job.name,
            "status": JobStatus.QUEUED,
            "config": job.config.model_dump(mode="json"),
            "created_at": now,
            "queued_at": now,
            "priority": job.priority,
            "queue_timeout_s": job.queue_timeout_s,
            "max_preemptions": job.max_preemptions,
            "run_dir": f"{self.runs}/{job_id}",
            "plan": job.plan,
        } | values
        connection.execute(insert(jobs).values(row))
        return _record(connection.execute(select(jobs).where(jobs.c.id == job_id)).one())

    def get(self, job_id: str) -> JobRecord | None:
        with self._read() as connection:
            row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return None if row is None else _record(row)

    def list_jobs(self, wanted: JobFilter) -> list[JobRecord]:
        query = select(jobs).order_by(jobs.c.seq.desc()).limit(wanted.limit)
        if wanted.statuses:
            query = query.where(jobs.c.status.in_(wanted.statuses))
        if wanted.name is not None:
            query = query.where(jobs.c.name == wanted.name)
        if wanted.before is not None:
            query = query.where(jobs.c.seq < wanted.before)
        with self._read() as connection:
            return [_record(row) for row in connection.execute(query)]

    def count(self) -> int:
        """How many jobs there are."""
        with self._read() as connection:
            return connection.execute(select(func.count()).select_from(jobs)).scalar_one()

    def request_cancel(self, job_id: str) -> JobRecord | None:
        now = time.time()
        with self._write() as connection:
            mine = jobs.c.id == job_id
            queued = update(jobs).where(mine, jobs.c.status == JobStatus.QUEUED)
            connection.execute(
                queued.values(
                    status=JobStatus.CANCELLED,
                    cancel_requested_at=now,
                    ended_at=now,
                    status_reason="cancelled while it waited",
                    tracking_due=case((jobs.c.attempt > 0, "KILLED")),  # of an attempt that lost its driver
                )
            )
            active = update(jobs).where(mine, jobs.c.status.in_(ACTIVE), jobs.c.cancel_requested_at.is_(None))
            connection.execute(active.values(cancel_requested_at=now, status_reason="being cancelled"))
        return self.get(job_id)

    def resume(self, job_id: str) -> JobRecord | None:
        job = self.get(job_id)
        if job is None:
            return None
        if job.status not in {JobStatus.FAILED, JobStatus.CANCELLED} or not self.requeue(
            job, "resumed", cancel_requested_at=None, preemptions=0
        ):
            status = (self.get(job_id) or job).status  # another resume may have been faster
            raise ConflictError(
                f"job {job_id} is {status}: only FAILED and CANCELLED jobs are resumed",
                hint="Cancel it first." if not status.is_terminal() else "Submit a new job.",
            )
        return self.get(job_id)

    def remember(self, scope: str, key: str, body_hash: str, answer: dict[str, Any]) -> dict[str, Any]:
        row = {"scope": scope, "key": key, "body_hash": body_hash, "answer": answer, "created_at": time.time()}
        try:
            with self._write() as connection:
                connection.execute(insert(answers).values(row))
        except IntegrityError:
            return self.recall(scope, key, body_hash) or answer
        return answer

    def recall(self, scope: str, key: str, body_hash: str) -> dict[str, Any] | None:
        with self._read() as connection:
            row = connection.execute(
                select(answers).where(answers.c.scope == scope, answers.c.key == key)
            ).one_or_none()
        if row is None:
            return None
        if row.body_hash != body_hash:
            raise ConflictError(
                f"Idempotency-Key {key!r} was used with another body",
                hint="Send a new key with a new request.",
                field="Idempotency-Key",
            )
        return row.answer

    # what the dispatcher does

    def active(self) -> list[JobRecord]:
        """Jobs whose driver is, or may be, at work, oldest first."""
        return self._all(select(jobs).where(jobs.c.status.in_(ACTIVE)).order_by(jobs.c.seq))

    def queue(self) -> list[JobRecord]:
        """QUEUED jobs in the order in which they are to start: by priority, then age."""
        order = (jobs.c.priority.desc(), jobs.c.seq)
        return self._all(select(jobs).where(jobs.c.status == JobStatus.QUEUED).order_by(*order))

    def tracking_due(self) -> list[JobRecord]:
        """Ended jobs whose run in the tracker is still to be ended."""
        return self._all(select(jobs).where(jobs.c.tracking_due.is_not(None)))

    def of_ray_jobs(self, ray_job_ids: Iterable[str]) -> dict[str, JobRecord]:
        """Jobs whose current attempt is one of `ray_job_ids`, by that id."""
        found = self._all(select(jobs).where(jobs.c.ray_job_id.in_(list(ray_job_ids))))
        return {job.ray_job_id: job for job in found if job.ray_job_id}

    def move(self, job: JobRecord, to: JobStatus, **values: Any) -> bool:
        """Changes the status of the attempt that `job` describes; False when it has changed meanwhile."""
        assert to in TRANSITIONS[job.status], f"{job.status} -> {to} is not listed"
        if to.is_terminal():
            values = {"ended_at": time.time()} | values
        return self._set(job, status=to, **values)

    def note(self, job: JobRecord, **values: Any) -> bool:
        """Changes fields other than the status, under the same condition as `move`."""
        return self._set(job, **values)

    def claim(
        self,
        job: JobRecord,
        *,
        stale_result_at: float | None,
        progress: dict[str, Any] | None = None,
        ray_job_id: str | None = None,
    ) -> JobRecord | None:
        """STARTING as the next attempt, for the one caller that comes first; None for the others.

        Args:
            stale_result_at: `ended_at` of the result that lies in the run directory now.
            progress: what lies there of earlier attempts; whatever differs from it is this attempt's.
            ray_job_id: of a driver that somebody has started already; None leaves that to the caller.
        """
        attempt = job.attempt + 1
        now = time.time()
        by_hand: dict[str, Any] = {"cancel_requested_at": None, "preemptions": 0} if ray_job_id else {}
        won = self.move(
            job,
            JobStatus.STARTING,
            attempt=attempt,
            ray_job_id=ray_job_id or (job.id if attempt == 1 else f"{job.id}-{attempt}"),
            started_at=job.started_at or now,
            submitted_at=now if ray_job_id else None,
            lost_at=None,
            stale_result_at=stale_result_at,
            progress=job.progress if progress is None else progress,
            status_reason="",
            **AFRESH,
            **by_hand,
        )
        return self.get(job.id) if won else None

    def requeue(self, job: JobRecord, reason: str, **values: Any) -> bool:
        """Back to QUEUED, to go on from the last checkpoint as a new attempt."""
        fresh = {"queued_at": time.time(), "overtaken": 0, **AFRESH}
        return self.move(job, JobStatus.QUEUED, **fresh, status_reason=reason, **values)

    def overtake(self, waiting: Sequence[JobRecord]) -> None:
        """Counts, for each of `waiting`, one job that started before it."""
        with self._write() as connection:
            mine = jobs.c.id.in_([job.id for job in waiting])
            connection.execute(
                update(jobs).where(mine, jobs.c.status == JobStatus.QUEUED).values(overtaken=jobs.c.overtaken + 1)
            )

    def superseded(self, keep: int, ended_before: float) -> list[JobRecord]:
        """Ended jobs that are not among the `keep` newest ones, or ended before a time; oldest first."""
        ended = jobs.c.status.in_([status for status in JobStatus if status.is_terminal()])
        newest = select(jobs.c.seq).where(ended).order_by(jobs.c.seq.desc()).limit(keep)
        beyond = or_(jobs.c.seq.not_in(newest.scalar_subquery()), jobs.c.ended_at < ended_before)
        return self._all(select(jobs).where(ended, beyond).order_by(jobs.c.seq))

    def delete(self, job: JobRecord) -> bool:
        """Forgets an ended job and the key that it was submitted with; False when it was resumed meanwhile."""
        with self._write() as connection:
            same = (jobs.c.id == job.id, jobs.c.status == job.status, jobs.c.attempt == job.attempt)
            gone = connection.execute(delete(jobs).where(*same)).rowcount == 1
            if gone:
                given = answers.c.answer["id"].as_string() == job.id
                connection.execute(delete(answers).where(answers.c.scope == "jobs", given))
        return gone

    def adopt(self, ray_job_id: str, run_dir: str, config: TrainConfig, started_at: float) -> JobRecord | None:
        """Records a job that somebody started without us; None when there is one of that id."""
        values = {
            "status": JobStatus.STARTING,
            "attempt": 1,
            "run_dir": run_dir,
            "ray_job_id": ray_job_id,
            "created_at": started_at,
            "started_at": started_at,
            "submitted_at": started_at,
        }
        try:
            with self._write() as connection:
                job = NewJob(name=config.name, config=config, max_preemptions=0)
                return self._insert(connection, run_dir.rpartition("/")[2], job, **values)
        except IntegrityError:
            return None

    def _set(self, job: JobRecord, **values: Any) -> bool:
        same = (jobs.c.id == job.id, jobs.c.status == job.status, jobs.c.attempt == job.attempt)
        with self._write() as connection:
            return connection.execute(update(jobs).where(*same).values(values)).rowcount == 1

    def _all(self, query: Any) -> list[JobRecord]:
        with self._read() as connection:
            return [_record(row) for row in connection.execute(query)]


@contextmanager
def _answering() -> Iterator[None]:
    """Makes a database that is away, or locked for too long, an answer that tells clients to try again."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise UnavailableError(f"the job store does not answer: {error.orig}", hint="Try again shortly.") from error


_FIELDS = [field.name for field in dataclasses.fields(JobRecord)]


def _record(row: Any) -> JobRecord:
    values = row._mapping
    return JobRecord(**{name: values[name] for name in _FIELDS} | {"status": JobStatus(values["status"])})
