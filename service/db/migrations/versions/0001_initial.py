"""Jobs, attempts, streams, timeline, metrics and checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    _create_jobs()
    _create_attempts()
    _create_timeline()
    _create_metrics()
    _create_checkpoints()


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("num_failures", sa.Integer, nullable=False),
        sa.Column("retry_at", sa.Float),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("current_attempt_id", sa.String(48)),
        sa.Index("ix_jobs_name_id", "name", "id"),
        sa.Index("ix_jobs_status_id", "status", "id"),
    )
    op.create_table(
        "job_progress",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("total_steps", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("rows_per_s", sa.Float, nullable=False),
        sa.Column("eta_s", sa.Float),
        sa.Column("latest_metrics", sa.Text, nullable=False),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("project", sa.String(64), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(48), primary_key=True),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_submit_at", sa.Float),
        sa.Column("submitted_at", sa.Float),
        sa.Column("started_at", sa.Float),
        sa.Column("ended_at", sa.Float),
        sa.Column("end_reason", sa.String(32)),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("num_worker_failures", sa.Integer, nullable=False),
        sa.Column("reported_reason", sa.String(32)),
        sa.Column("reported_message", sa.Text),
        sa.Column("reported_at", sa.Float),
        sa.UniqueConstraint("job_id", "index"),
    )
    op.create_table(
        "streams",
        sa.Column("attempt_id", sa.String(48), sa.ForeignKey("attempts.id"), primary_key=True),
        sa.Column("stream", sa.String(64), primary_key=True),
        sa.Column("next_seq", sa.BigInteger, nullable=False),
    )


def _create_timeline() -> None:
    op.create_table(
        "timeline",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("attempt_id", sa.String(48)),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("actor", sa.String(32), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.Index("ix_timeline_job_id_id", "job_id", "id"),
        sqlite_autoincrement=True,
    )


def _create_metrics() -> None:
    op.create_table(
        "metric_names",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.UniqueConstraint("job_id", "name"),
    )
    op.create_table(
        "metric_points",
        sa.Column("name_id", sa.Integer, sa.ForeignKey("metric_names.id"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("value", sa.Float),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("attempt_index", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("path", sa.String(1024), primary_key=True),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("is_best", sa.Boolean, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
    )
