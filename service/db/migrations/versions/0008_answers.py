"""Answers to requests with an Idempotency-Key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table, empty."""
    op.create_table(
        "answers",
        sa.Column("principal", sa.String(255), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("headers", sa.Text),
        sa.Column("sealed_body", sa.Text),
        sa.PrimaryKeyConstraint("principal", "key", name=op.f("pk_answers")),
    )
    op.create_index("ix_answers_created_at", "answers", ["created_at"])
