"""The job store's tables, and the database they lie in. A change here needs a revision in `migrations/versions`."""

import sqlite3
import time
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
)

BUSY_TIMEOUT_S = 30

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("id", String(100), nullable=False, unique=True),
    Column("name", String(100), nullable=False),
    Column("status", String(16), nullable=False),
    Column("config", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("queued_at", Float, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("queue_timeout_s", Float, nullable=False),
    Column("max_preemptions", Integer, nullable=False),
    Column("attempt", Integer, nullable=False, default=0),
    Column("preemptions", Integer, nullable=False, default=0),
    Column("overtaken", Integer, nullable=False, default=0),
    Column("run_dir", Text, nullable=False),
    Column("ray_job_id", String(200)),
    Column("submitted_at", Float),
    Column("lost_at", Float),
    Column("stale_result_at", Float),
    Column("cancel_requested_at", Float),
    Column("tracking_due", String(16)),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("status_reason", Text, nullable=False, default=""),
    Column("progress", JSON, nullable=False, default=dict),
    Column("plan", JSON(none_as_null=True)),
    Column("error", JSON(none_as_null=True)),
    Column("result", JSON(none_as_null=True)),
    Index("jobs_by_status", "status", "seq"),
    Index("jobs_by_name", "name", "seq"),
    Index("jobs_by_ray_job", "ray_job_id"),
    Index("jobs_by_tracking_due", "tracking_due"),
    sqlite_autoincrement=True,  # a number is never given twice, so that a cursor stays where it was
)

answers = Table(
    "answers",
    metadata,
    Column("scope", String(20), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("body_hash", String(64), nullable=False),
    Column("answer", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)
"""What was answered under each Idempotency-Key."""


def open_engine(url: str) -> Engine:
    """An engine whose writing transactions exclude each other on SQLite, and whose connections are tested before use."""
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions itself, and too late
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")  # a 202 survives a power cut

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("writes"):
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # waits here for its turn, not at its first write

    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers and a writer side by side. On a fresh database one connection makes the change, which SQLite does not wait for."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
