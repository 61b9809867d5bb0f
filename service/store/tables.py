"""Tables of the store. Times are Unix seconds, sizes bytes.

jobs 1 ── 1 job_progress        what training reports often, outside the version guard
jobs 1 ── n job_labels          those of the spec, for filters
jobs 1 ── n attempts 1 ── n streams
jobs 1 ── n timeline, checkpoints, metric_names 1 ── n metric_points
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)

from service.domain import JobStatus


class JsonText(TypeDecorator[Any]):
    """JSON kept as text in Python's dialect: it has NaN and infinity, SQL's own JSON has not."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Write a value as JSON."""
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Read a value back."""
        return None if value is None else json.loads(value)


_ENDED = ", ".join(f"'{status}'" for status in JobStatus if status.is_terminal)
# Spelled out, not bound: a planner uses a partial index only for a query with the same words.
LIVE = f"status NOT IN ({_ENDED})"


class PlainText(TypeDecorator[str]):
    """Text of any origin: PostgreSQL cannot hold a NUL, which the output of a worker may have."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Write a text with a mark where each NUL was, on every database alike."""
        return None if value is None else value.replace("\x00", "\ufffd")


# Named constraints can be changed by later migrations on any database.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("name", String(64), nullable=False),
    Column("spec", JsonText, nullable=False),
    Column("status", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("reason", String(32)),
    Column("message", PlainText, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("num_failures", Integer, nullable=False),
    Column("retry_at", Float),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("current_attempt_id", String(48)),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("pause_requested", Boolean, nullable=False, server_default=false()),
    Column("queued_at", Float),
    Column("resume_from", PlainText),
    Column("queue_note", JsonText),
    # Which replica of the service looks at the job, and until when. Outside the version guard.
    Column("lease_owner", String(255)),
    Column("lease_until", Float),
    Index("ix_jobs_name_id", "name", "id"),
    Index("ix_jobs_status_id", "status", "id"),
    Index("ix_jobs_project_id", "project", "id"),
    Index("ix_jobs_project_status_id", "project", "status", "id"),
    Index("ix_jobs_live", "id", sqlite_where=text(LIVE), postgresql_where=text(LIVE)),
)

job_labels = Table(
    "job_labels",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("value", String(255), nullable=False),
    Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),
    sqlite_with_rowid=False,
)

job_progress = Table(
    "job_progress",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("total_steps", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("rows_per_s", Float, nullable=False),
    Column("eta_s", Float),
    Column("latest_metrics", JsonText, nullable=False),
    # Null until an attempt told of its groups.
    Column("membership", JsonText),
    Column("advanced_at", Float),
    Column("checkpoint_at", Float),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("project", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_hash", String(64), nullable=False),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", String(48), primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("index", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_submit_at", Float),
    Column("submitted_at", Float),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("end_reason", String(32)),
    Column("message", PlainText, nullable=False),
    Column("num_worker_failures", Integer, nullable=False),
    Column("reported_reason", String(32)),
    Column("reported_message", PlainText),
    Column("reported_at", Float),
    Column("reported_evidence", JsonText),
    Column("token_hash", String(64)),
    UniqueConstraint("job_id", "index"),
)

streams = Table(
    "streams",
    metadata,
    Column("attempt_id", ForeignKey("attempts.id"), primary_key=True),
    Column("stream", String(64), primary_key=True),
    Column("next_seq", BigInteger, nullable=False),
)

timeline = Table(
    "timeline",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("attempt_id", String(48)),
    Column("time", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("message", PlainText, nullable=False),
    Column("actor", String(255), nullable=False),
    Column("data", JsonText, nullable=False),
    Index("ix_timeline_job_id_id", "job_id", "id"),
    # Ids are never reused, or a follower's cursor could skip a line.
    sqlite_autoincrement=True,
)

metric_names = Table(
    "metric_names",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("name", String(255), nullable=False),
    # At least as many points, and none older, than there are: retention looks closer at these.
    Column("num_points", BigInteger, nullable=False, server_default="0"),
    Column("oldest_at", Float),
    UniqueConstraint("job_id", "name"),
    Index("ix_metric_names_num_points", "num_points"),
    Index("ix_metric_names_oldest_at", "oldest_at"),
)

# `value` is null for NaN, which SQLite cannot hold.
metric_points = Table(
    "metric_points",
    metadata,
    Column("name_id", ForeignKey("metric_names.id"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("value", Float),
    Column("time", Float, nullable=False),
    Column("attempt_index", Integer, nullable=False),
    sqlite_with_rowid=False,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job_id", ForeignKey("jobs.id"), primary_key=True),
    Column("path", String(1024), primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("is_best", Boolean, nullable=False),
    Column("metrics", JsonText, nullable=False),
)
