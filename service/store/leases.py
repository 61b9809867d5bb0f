"""Leases: which replica of the service looks at which live job.

A lease spares replicas from looking at the same jobs twice; it is not what keeps jobs safe. Two
replicas that look at one job, because of a late clock or a slow machine, are kept apart by the
version of the job, and by the attempt's id being its submission's. So a replica reads the time off
its own clock, and no lease is renewed before half of it has passed. A job that rests, queued or
paused, has nothing to look at and is nobody's.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, select, text, update

from service.domain import JobStatus
from service.store.tables import LIVE, jobs

_AT_REST = [JobStatus.QUEUED.value, JobStatus.PAUSED.value]


def claim(connection: Connection, owner: str, lease_s: float, now: float, limit: int) -> list[str]:
    """Renew what `owner` holds, take up to `limit` more, and name every live job that it holds."""
    is_own = jobs.c.lease_owner == owner
    until = now + lease_s
    _take(connection, is_own & (jobs.c.lease_until < now + lease_s / 2), owner, until)
    is_free = jobs.c.lease_owner.is_(None) | ((jobs.c.lease_until <= now) & ~is_own)
    _take(connection, is_free, owner, until, limit)
    held = select(jobs.c.id).where(text(LIVE), _wants_look(), is_own, jobs.c.lease_until > now)
    return list(connection.execute(held.order_by(jobs.c.id)).scalars())


def _wants_look() -> ColumnElement[bool]:
    is_asked = jobs.c.cancel_requested | jobs.c.pause_requested
    return jobs.c.status.not_in(_AT_REST) | is_asked


def _take(
    connection: Connection,
    wanted: ColumnElement[bool],
    owner: str,
    until: float,
    limit: int | None = None,
) -> None:
    """Lease what is wanted; rows that another transaction holds are left for the next time."""
    ids = select(jobs.c.id).where(text(LIVE), _wants_look(), wanted)
    chosen = ids.order_by(jobs.c.id).limit(limit).with_for_update(skip_locked=True)
    statement = update(jobs).where(jobs.c.id.in_(chosen))
    connection.execute(statement.values(lease_owner=owner, lease_until=until))


def release(connection: Connection, owner: str) -> None:
    """Give back every lease of `owner`, so that another replica need not wait for their end."""
    held = update(jobs).where(text(LIVE), jobs.c.lease_owner == owner)
    connection.execute(held.values(lease_owner=None, lease_until=None))
