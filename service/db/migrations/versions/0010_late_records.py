"""When late records of an attempt that has ended are collected."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it, empty: what ended before was collected."""
    op.add_column("attempts", sa.Column("collect_at", sa.Float))
    op.create_index("ix_attempts_collect_at", "attempts", ["collect_at"])
