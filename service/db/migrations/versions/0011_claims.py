"""Which process was given the secrets of an attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it, empty: attempts that start now may claim theirs once more."""
    op.add_column("attempts", sa.Column("secrets_claim", sa.String(64)))
