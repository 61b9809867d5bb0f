"""Alembic's entry: runs the migrations over the connection that `service.db.engine` gives."""

from __future__ import annotations

from alembic import context

from service.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter most things in place: Alembic copies the table instead.
    render_as_batch=True,
)
context.run_migrations()
