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

_JOBS = sa.table("jobs", sa.column("id", sa.String), sa.column("spec", sa.Text))


def upgrade() -> None:
    """Drop `parallelism.sync` from the specs of jobs with one replica."""
    connection = op.get_bind()
    for job_id, text in connection.execute(sa.select(_JOBS.c.id, _JOBS.c.spec)).all():
        spec = json.loads(text)
        if _num_replicas(spec) == 1 and spec["parallelism"].pop("sync", None) is not None:
            changed = _JOBS.update().where(_JOBS.c.id == job_id).values(spec=json.dumps(spec))
            connection.execute(changed)


def _num_replicas(spec: dict[str, dict[str, object]]) -> int:
    workers, group = (spec["parallelism"].get(key) for key in ("workers", "shard_group_size"))
    if isinstance(workers, dict):
        workers = workers["max"]
    assert isinstance(workers, int)
    assert isinstance(group, int)
    return workers // group
