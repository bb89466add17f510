"""Indexes for what the dispatcher asks each second; without them it reads every job that ever was."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("jobs_by_ray_job", "jobs", ["ray_job_id"])
    op.create_index("jobs_by_tracking_due", "jobs", ["tracking_due"])
