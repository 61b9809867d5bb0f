"""Indexes by which each webhook finds what is due, and a deleted job its idempotency keys."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_idempotency_keys_job_id", "idempotency_keys", ["job_id"])
    due = ["webhook_id", "state", "next_try_at"]
    op.create_index("ix_webhook_deliveries_due", "webhook_deliveries", due)
    op.drop_index("ix_webhook_deliveries_state_next_try_at", "webhook_deliveries")
