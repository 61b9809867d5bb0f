"""Projects with quotas, and locks that replicas of the service take in turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both, empty: a project without a row has no quota."""
    op.create_table(
        "projects",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("max_workers", sa.Integer),
        sa.Column("max_running_jobs", sa.Integer),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_projects"),
    )
    op.create_table(
        "locks",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("until", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_locks"),
    )
