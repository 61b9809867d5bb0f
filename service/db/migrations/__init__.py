"""Alembic migrations of the store, run at every start of the service."""
