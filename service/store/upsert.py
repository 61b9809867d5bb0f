"""INSERT ... ON CONFLICT, which SQLite and PostgreSQL spell alike but SQLAlchemy keeps apart."""

from __future__ import annotations

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_for(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An insert that knows `on_conflict_do_update` and `on_conflict_do_nothing`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
