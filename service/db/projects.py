"""Projects with their quotas, and locks that keep two replicas from doing the same at once.

A lock is a row with an owner and a time: whoever finds it free or run out takes it in one
statement, so at most one holds it at any time, as far as their clocks agree within its length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, RowMapping, delete, or_, select

from service.db.engine import Transactions, insert_for
from service.db.tables import locks, projects
from service.domain.models import Project
from service.errors import ProjectNotFound


class ProjectStore:
    """Quotas by project; every method raises `StoreUnavailable` if the database is away."""

    def __init__(self, engine: Engine) -> None:
        self._transactions = Transactions(engine)

    def get(self, name: str) -> Project:
        """Read a project; raises `ProjectNotFound`."""
        query = select(projects).where(projects.c.name == name)
        with self._transactions.read() as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise ProjectNotFound(name)
        return _project_of(row)

    def list(self) -> list[Project]:
        """Every project that has quotas, by name."""
        with self._transactions.read() as connection:
            found = connection.execute(select(projects).order_by(projects.c.name)).mappings()
            return [_project_of(row) for row in found]

    def put(self, project: Project, now: float) -> Project:
        """Set the quotas of a project, new or known. `now` is Unix seconds."""
        quotas = {
            "max_workers": project.max_workers,
            "max_running_jobs": project.max_running_jobs,
            "updated_at": now,
        }
        with self._transactions.write() as connection:
            statement = insert_for(connection, projects).values(name=project.name, **quotas)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["name"], set_=quotas)
            )
        return Project(project.name, project.max_workers, project.max_running_jobs, now)

    def remove(self, name: str) -> None:
        """Take the quotas of a project away; raises `ProjectNotFound`."""
        with self._transactions.write() as connection:
            gone = connection.execute(delete(projects).where(projects.c.name == name))
        if gone.rowcount != 1:
            raise ProjectNotFound(name)


class Locks:
    """Locks by name, for `owner`."""

    def __init__(self, engine: Engine, owner: str) -> None:
        self._transactions = Transactions(engine)
        self._owner = owner

    @contextmanager
    def hold(self, name: str, now: float, length_s: float) -> Iterator[bool]:
        """Hold a lock over the block; False where somebody else does.

        It is given back at the end, and runs out by itself at `now` (Unix seconds) + `length_s`.
        """
        with self._transactions.write() as connection:
            is_held = self._take(connection, name, now, now + length_s)
        try:
            yield is_held
        finally:
            if is_held:
                self._give_back(name)

    def _take(self, connection: Connection, name: str, now: float, until: float) -> bool:
        values = {"owner": self._owner, "until": until}
        statement = insert_for(connection, locks).values(name=name, **values)
        statement = statement.on_conflict_do_update(
            index_elements=["name"],
            set_=values,
            where=or_(locks.c.owner == self._owner, locks.c.until <= now),
        )
        # Asked back, as the number of rows of an insert is not told on PostgreSQL.
        taken = connection.execute(statement.returning(locks.c.name))
        return taken.scalar_one_or_none() is not None

    def _give_back(self, name: str) -> None:
        own = delete(locks).where(locks.c.name == name, locks.c.owner == self._owner)
        with self._transactions.write() as connection:
            connection.execute(own)


def _project_of(row: RowMapping) -> Project:
    return Project(row["name"], row["max_workers"], row["max_running_jobs"], row["updated_at"])
