"""What a queue, pauses, labels, several replicas and the retention of metrics need."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_LIVE = sa.text("status NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')")
_JOBS = sa.table(
    "jobs",
    sa.column("id", sa.String),
    sa.column("spec", sa.Text),
    sa.column("created_at", sa.Float),
    sa.column("queued_at", sa.Float),
)
_LABELS = sa.table(
    "job_labels",
    sa.column("job_id", sa.String),
    sa.column("key", sa.String),
    sa.column("value", sa.String),
)
_JOB_INDEXES = {
    "ix_jobs_project_id": ["project", "id"],
    "ix_jobs_project_status_id": ["project", "status", "id"],
}
# Names of people and keys are longer than those of the service's own parts.
_ACTOR_CHARS = 255
_CHUNK = 1000


def upgrade() -> None:
    """Add columns, labels and indexes; fill them from what is stored."""
    _add_job_columns()
    op.add_column("attempts", sa.Column("token_hash", sa.String(64)))
    _create_labels()
    _fill_labels()
    _widen_actor()
    _add_retention()


def _add_job_columns() -> None:
    for column in (
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("pause_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("queued_at", sa.Float),
        sa.Column("resume_from", sa.Text),
        sa.Column("queue_note", sa.Text),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_until", sa.Float),
    ):
        op.add_column("jobs", column)
    for name, columns in _JOB_INDEXES.items():
        op.create_index(name, "jobs", columns)
    op.create_index("ix_jobs_live", "jobs", ["id"], sqlite_where=_LIVE, postgresql_where=_LIVE)
    op.get_bind().execute(_JOBS.update().values(queued_at=_JOBS.c.created_at))


def _create_labels() -> None:
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("value", sa.String(255), nullable=False),
        sa.Index("ix_job_labels_key_value_job_id", "key", "value", "job_id"),
        sqlite_with_rowid=False,
    )


def _fill_labels() -> None:
    connection = op.get_bind()
    last = ""
    while True:
        query = sa.select(_JOBS.c.id, _JOBS.c.spec).where(_JOBS.c.id > last)
        found = connection.execute(query.order_by(_JOBS.c.id).limit(_CHUNK)).all()
        if not found:
            return
        labels = [
            {"job_id": job_id, "key": key, "value": value}
            for job_id, spec in found
            for key, value in (json.loads(spec).get("labels") or {}).items()
        ]
        if labels:
            connection.execute(_LABELS.insert(), labels)
        last = found[-1].id


def _widen_actor() -> None:
    # SQLite copies the table: the new one must know too that ids are never reused.
    with op.batch_alter_table("timeline", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.alter_column("actor", type_=sa.String(_ACTOR_CHARS), existing_nullable=False)


def _add_retention() -> None:
    op.add_column(
        "metric_names", sa.Column("num_points", sa.BigInteger, nullable=False, server_default="0")
    )
    op.add_column("metric_names", sa.Column("oldest_at", sa.Float))
    op.get_bind().exec_driver_sql(
        "UPDATE metric_names SET"
        " num_points = (SELECT count(*) FROM metric_points WHERE name_id = metric_names.id),"
        " oldest_at = (SELECT min(time) FROM metric_points WHERE name_id = metric_names.id)"
    )
    op.create_index("ix_metric_names_num_points", "metric_names", ["num_points"])
    op.create_index("ix_metric_names_oldest_at", "metric_names", ["oldest_at"])
