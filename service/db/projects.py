"""Quotas of projects, and locks between replicas of the service.

A lock is a row with an owner and an expiry, taken in one statement: at most one replica holds it.
What must not be done by two is written in a transaction that renews it (`Lock.keep`), whatever the
clocks say. All of this raises `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, or_, select, update

from service.db.engine import Transactions, insert_for, upsert
from service.db.tables import locks, projects
from service.domain.models import Project
from service.errors import LockLost, ProjectNotFound


class ProjectStore(Transactions):
    def list(self) -> list[Project]:
        """Every project that has quotas, by name."""
        rows = self.rows(select(projects).order_by(projects.c.name))
        return [Project(**row) for row in rows]

    def put(self, project: Project, now: float) -> None:
        """Set the quotas of a project, new or known. `now` is Unix seconds."""
        with self.write() as connection:
            upsert(connection, projects, {**vars(project), "updated_at": now}, "name")

    def remove(self, name: str) -> None:
        """Remove the quotas of a project; raises `ProjectNotFound`."""
        if self.execute(delete(projects).where(projects.c.name == name)) != 1:
            raise ProjectNotFound(name)


# Each start of a job is fenced by it.
_KEEP = update(locks).where(locks.c.name == bindparam("lock"), locks.c.owner == bindparam("holder"))


@dataclass(frozen=True)
class Lock:
    """A lock that `owner` held at least until it was taken or kept last."""

    name: str
    owner: str
    length_s: float

    def keep(self, connection: Connection, now: float) -> None:
        """Renew it within a transaction, which then counts only if nobody else has it meanwhile.

        Raises `LockLost` where somebody has. `now` is Unix seconds.
        """
        kept = {"lock": self.name, "holder": self.owner, "until": now + self.length_s}
        if connection.execute(_KEEP, kept).rowcount != 1:
            raise LockLost(self.name, self.owner)


@contextmanager
def hold_lock(
    transactions: Transactions, name: str, owner: str, now: float, length_s: float
) -> Iterator[Lock | None]:
    """Hold a lock for `owner` over the block; None where somebody else does.

    It is given back at the end, and runs out by itself at `now` (Unix seconds) + `length_s`.
    """
    values = {"owner": owner, "until": now + length_s}
    with transactions.write() as connection:
        statement = insert_for(connection.dialect, locks).values(name=name, **values)
        statement = statement.on_conflict_do_update(
            index_elements=["name"],
            set_=values,
            where=or_(locks.c.owner == owner, locks.c.until <= now),
        )
        # PostgreSQL does not tell the number of rows of an insert, so the row is returned.
        is_held = connection.execute(statement.returning(locks.c.name)).first() is not None
    try:
        yield Lock(name, owner, length_s) if is_held else None
    finally:
        if is_held:
            own = (locks.c.name == name, locks.c.owner == owner)
            transactions.execute(delete(locks).where(*own))
