"""Deleting a job with everything that hangs on it, in whatever table."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Table, delete, select

from service.domain import JobStatus
from service.job_errors import JobNotEnded, JobNotFound
from service.store.keys import job_secrets
from service.store.schema import metadata
from service.store.tables import jobs


def delete_job(connection: Connection, job_id: str) -> None:
    """Delete a job that has ended; raises `JobNotFound` or `JobNotEnded`."""
    query = select(jobs.c.status).where(jobs.c.id == job_id).with_for_update()
    status = connection.execute(query).scalar_one_or_none()
    if status is None:
        raise JobNotFound(job_id)
    if not JobStatus(status).is_terminal:
        raise JobNotEnded(job_id, status)
    # Those that refer to others first.
    for table in reversed(metadata.sorted_tables):
        rows = _rows_of(table, job_id)
        if rows is not None:
            connection.execute(delete(table).where(rows))


def _rows_of(table: Table, job_id: str) -> ColumnElement[bool] | None:
    """Which rows of a table belong to a job, by its foreign keys; None if it has no such.

    What has none outlives the job, as the audit log does; secrets do not.
    """
    if table is jobs:
        return jobs.c.id == job_id
    if table is job_secrets:
        return job_secrets.c.job_id == job_id
    for key in sorted(table.foreign_keys, key=lambda key: key.column.table is not jobs):
        owners = _rows_of(key.column.table, job_id)
        if owners is not None and key.column.table is jobs:
            return key.parent == job_id
        if owners is not None:
            return key.parent.in_(select(key.column).where(owners))
    return None
