"""Jobs, and the answers given under idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(100), nullable=False, unique=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("queued_at", sa.Float, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("queue_timeout_s", sa.Float, nullable=False),
        sa.Column("max_preemptions", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("preemptions", sa.Integer, nullable=False),
        sa.Column("overtaken", sa.Integer, nullable=False),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("ray_job_id", sa.String(200)),
        sa.Column("submitted_at", sa.Float),
        sa.Column("lost_at", sa.Float),
        sa.Column("stale_result_at", sa.Float),
        sa.Column("cancel_requested_at", sa.Float),
        sa.Column("tracking_due", sa.String(16)),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("status_reason", sa.Text, nullable=False),
        sa.Column("progress", sa.JSON, nullable=False),
        sa.Column("plan", sa.JSON),
        sa.Column("error", sa.JSON),
        sa.Column("result", sa.JSON),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_status", "jobs", ["status", "seq"])
    op.create_index("jobs_by_name", "jobs", ["name", "seq"])
    op.create_table(
        "answers",
        sa.Column("scope", sa.String(20), primary_key=True),
        sa.Column("key", sa.String(200), primary_key=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
