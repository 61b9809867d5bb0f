"""Who trains in an attempt, and what a driver's word about its end was read from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both, empty: earlier attempts told neither."""
    op.add_column("job_progress", sa.Column("membership", sa.Text))
    op.add_column("attempts", sa.Column("reported_evidence", sa.Text))
