"""Tables of the store. Times are Unix seconds, sizes bytes.

jobs 1 ── 1 job_progress        what training reports often, outside the version guard
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
)


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
    Column("message", Text, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("num_failures", Integer, nullable=False),
    Column("retry_at", Float),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("current_attempt_id", String(48)),
    Index("ix_jobs_name_id", "name", "id"),
    Index("ix_jobs_status_id", "status", "id"),
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
    Column("message", Text, nullable=False),
    Column("num_worker_failures", Integer, nullable=False),
    Column("reported_reason", String(32)),
    Column("reported_message", Text),
    Column("reported_at", Float),
    Column("reported_evidence", JsonText),
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
    Column("message", Text, nullable=False),
    Column("actor", String(32), nullable=False),
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
    UniqueConstraint("job_id", "name"),
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
