"""When training last got further, and when it last saved: for alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both, empty: nobody noted them."""
    op.add_column("job_progress", sa.Column("advanced_at", sa.Float))
    op.add_column("job_progress", sa.Column("checkpoint_at", sa.Float))
