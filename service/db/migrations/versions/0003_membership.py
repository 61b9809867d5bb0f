"""Who trains in an attempt, and what a driver's word about its end was read from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_JOBS = sa.table("jobs", sa.column("reason", sa.String))
_ATTEMPTS = sa.table(
    "attempts", sa.column("end_reason", sa.String), sa.column("reported_reason", sa.String)
)
# What the second version would have called it.
_FORMER_REASONS = {
    "hang": "workers_lost",
    "device_oom": "workers_lost",
    "host_oom": "workers_lost",
    "host_lost": "workers_lost",
    "preempted": "workers_lost",
    "no_room": "workers_lost",
    "non_finite": "training_error",
    "rows_skipped": "training_error",
    "run_in_use": "storage_error",
}


def upgrade() -> None:
    """Add both, empty: earlier attempts told neither."""
    op.add_column("job_progress", sa.Column("membership", sa.Text))
    op.add_column("attempts", sa.Column("reported_evidence", sa.Text))


def downgrade() -> None:
    """Drop both, and call the reasons that the second version does not know by their old names.

    What is dropped does not come back, and neither do the reasons.
    """
    op.drop_column("attempts", "reported_evidence")
    op.drop_column("job_progress", "membership")
    for table, name in (
        (_JOBS, "reason"),
        (_ATTEMPTS, "end_reason"),
        (_ATTEMPTS, "reported_reason"),
    ):
        for reason, former in _FORMER_REASONS.items():
            unknown = table.c[name] == reason
            op.get_bind().execute(table.update().where(unknown).values({name: former}))
