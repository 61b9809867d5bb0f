"""Tables of the store. Times are Unix seconds, sizes bytes.

jobs 1 ── 1 job_progress        what training reports often, outside the version guard
jobs 1 ── n job_labels          those of the spec, for filters
jobs 1 ── n attempts 1 ── n streams
jobs 1 ── n timeline, checkpoints, metric_names 1 ── n metric_points
api_keys 1 ── n sessions
webhooks 1 ── n webhook_deliveries
sweeps 1 ── n sweep_trials

What each table is for is said in the module of its store. Changes need a migration.
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

from service.domain.models import JobStatus


class JsonText(TypeDecorator[Any]):
    """JSON stored as text in Python's dialect, which has NaN and infinity, unlike SQL's JSON."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


_ENDED = ", ".join(f"'{status}'" for status in JobStatus if status.is_terminal)
# Literal, not bound: a planner uses a partial index only for a query with the same text.
LIVE = f"status NOT IN ({_ENDED})"


class PlainText(TypeDecorator[str]):
    """Text of any origin: PostgreSQL cannot hold a NUL, which output of a worker may contain."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Write a text with U+FFFD in place of each NUL, on every database."""
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
    # The replica of the service that reconciles the job, and until when; outside the version.
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
    Column("job_id", ForeignKey("jobs.id"), nullable=False, index=True),
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
    Column("collect_at", Float, index=True),
    Column("token_hash", String(64)),  # of earlier versions
    # Hash of what the process made up that was given the job's secrets.
    Column("secrets_claim", String(64)),
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

# Responses to requests with an Idempotency-Key.
answers = Table(
    "answers",
    metadata,
    Column("principal", String(255), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_hash", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    # Null until the request was carried out.
    Column("status", Integer),
    Column("headers", JsonText),
    Column("sealed_body", Text),
    Index("ix_answers_created_at", "created_at"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("secret_hash", String(64), nullable=False),
    # Project -> role; "*" stands for all projects.
    Column("roles", JsonText, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("created_by", String(255), nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("last_used_at", Float),
)
sessions = Table(
    "sessions",
    metadata,
    Column("token_hash", String(64), primary_key=True),
    Column("key_id", ForeignKey("api_keys.id"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index("ix_sessions_expires_at", "expires_at"),
)
# Written before their job, which must not start without them: hence no foreign key.
job_secrets = Table(
    "job_secrets",
    metadata,
    Column("job_id", String(32), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("sealed", Text, nullable=False),
    Column("created_at", Float, nullable=False),
)
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("actor", String(255), nullable=False),
    Column("actor_kind", String(16), nullable=False),
    Column("action", String(128), nullable=False),
    Column("object", String(512), nullable=False),
    Column("remote", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("request_id", String(64), nullable=False),
    Index("ix_audit_log_actor_id", "actor", "id"),
    Index("ix_audit_log_object_id", "object", "id"),
    # Ids are never reused, or a cursor could skip a line.
    sqlite_autoincrement=True,
)

projects = Table(
    "projects",
    metadata,
    Column("name", String(64), primary_key=True),
    # Null is no limit.
    Column("max_workers", Integer),
    Column("max_running_jobs", Integer),
    Column("updated_at", Float, nullable=False),
)
locks = Table(
    "locks",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("until", Float, nullable=False),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("url", String(2048), nullable=False),
    Column("description", Text, nullable=False),
    # Kinds of timeline events, empty for all.
    Column("kinds", JsonText, nullable=False),
    # Encrypted: see service.auth.crypto.
    Column("secret", Text, nullable=False),
    Column("is_active", Boolean, nullable=False),
    Column("note", Text, nullable=False),
    Column("num_dead_in_a_row", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("ix_webhooks_project_id", "project", "id"),
)
# SQLite numbers rows by itself only where the key is an INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")
webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    # No foreign keys: a delivery may outlive its job, and a webhook deleted meanwhile must not
    # refuse a timeline event. Orphans are never claimed, and are pruned by age.
    Column("webhook_id", String(32), nullable=False),
    Column("job_id", String(32)),
    Column("event_id", BigInteger),
    Column("kind", String(32), nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", String(16), nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("next_try_at", Float, nullable=False),
    Column("claimed_until", Float, nullable=False),
    Column("ended_at", Float),
    Column("status_code", Integer),
    Column("message", Text, nullable=False),
    Index("ix_webhook_deliveries_due", "webhook_id", "state", "next_try_at"),
    Index("ix_webhook_deliveries_webhook_id_id", "webhook_id", "id"),
    sqlite_autoincrement=True,
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("status", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),
    # What never changes: the other fields of a sweep.
    Column("definition", JsonText, nullable=False),
    Index("ix_sweeps_status", "status"),
    Index("ix_sweeps_created_at_id", "created_at", "id"),
)
sweep_trials = Table(
    "sweep_trials",
    metadata,
    Column("sweep_id", ForeignKey("sweeps.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("values", JsonText, nullable=False),
    Column("created_at", Float, nullable=False),
    # No foreign key: a job may be deleted, and its trial stays.
    Column("job_id", String(32)),
    Column("rungs", JsonText, nullable=False),
    Column("stopped_at", BigInteger),
    Column("is_paused", Boolean, nullable=False),
    Column("message", PlainText, nullable=False),
)
