"""Specs of jobs with one copy of the tables no longer hold a sync policy.

The first version stored its defaults there, which a spec may not say any more: with one copy
there is nothing to sync.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_JOBS = sa.table(
    "jobs",
    sa.column("id", sa.String),
    sa.column("spec", sa.Text),
    sa.column("reason", sa.String),
)
_ATTEMPTS = sa.table(
    "attempts", sa.column("end_reason", sa.String), sa.column("reported_reason", sa.String)
)


def upgrade() -> None:
    """Drop `parallelism.sync` from the specs of jobs with one replica."""
    connection = op.get_bind()
    for job_id, text in connection.execute(sa.select(_JOBS.c.id, _JOBS.c.spec)).all():
        spec = json.loads(text)
        if _num_replicas(spec) == 1 and spec["parallelism"].pop("sync", None) is not None:
            changed = _JOBS.update().where(_JOBS.c.id == job_id).values(spec=json.dumps(spec))
            connection.execute(changed)


def downgrade() -> None:
    """Turn the reason `diverged`, which the first version does not know, into `training_error`.

    The first version reads the specs that it stored itself, also without a sync policy. It leaves
    out jobs that were submitted since, as their specs hold fields it does not know; they are kept,
    and are shown again after the next upgrade. The reasons do not come back.
    """
    for table, name in (
        (_JOBS, "reason"),
        (_ATTEMPTS, "end_reason"),
        (_ATTEMPTS, "reported_reason"),
    ):
        unknown = table.c[name] == "diverged"
        op.get_bind().execute(table.update().where(unknown).values({name: "training_error"}))


def _num_replicas(spec: dict[str, dict[str, object]]) -> int:
    workers, group = (spec["parallelism"].get(key) for key in ("workers", "shard_group_size"))
    if isinstance(workers, dict):
        workers = workers["max"]
    assert isinstance(workers, int)
    assert isinstance(group, int)
    return workers // group
