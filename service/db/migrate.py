"""Brings the store to the schema of this version, or says that it is behind.

`shardloom migrate` and `python -m service.db.migrate` are this module; of the settings they need
SHARDLOOM_DATABASE_URL only. The service migrates at start as well: this is for whoever wants a
migration to be a step of its own, which can fail by itself: a Job of Kubernetes, a part of compose.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from service.db.engine import knows_revision, migrate, newest_revision, open_engine
from service.db.engine import stored_revision as revision_over
from service.errors import ServiceError, StoreUnavailable
from service.settings import Settings

UP_TO_DATE = 0
BEHIND = 1
UNAVAILABLE = 3


@dataclass(frozen=True)
class Revisions:
    """Where a database was found (None: without tables) and where this version wants it."""

    found: str | None
    wanted: str

    @property
    def is_behind(self) -> bool:
        """Whether a migration is due."""
        return self.found != self.wanted


def bring_up(database_url: str) -> Revisions:
    """Migrate under the lock that replicas take; says from where. Raises `StoreUnavailable`."""
    engine = open_engine(database_url)
    try:
        return Revisions(migrate(engine), _newest())
    finally:
        engine.dispose()


def read_revisions(database_url: str) -> Revisions:
    """Where the database is, without a change to it; raises `StoreUnavailable`."""
    engine = open_engine(database_url)
    try:
        found = _stored(engine)
    finally:
        engine.dispose()
    if found is not None and not knows_revision(found):
        raise StoreUnavailable(
            f"the database {engine.url.render_as_string()} is at migration {found}, which this "
            "version does not know: a newer version of the service migrated it; run that version"
        )
    return Revisions(found, _newest())


def _stored(engine: Engine) -> str | None:
    # To connect to a SQLite file that is not there would make it.
    if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
        return None
    try:
        with engine.connect() as connection:
            return revision_over(connection)
    except DBAPIError as error:
        raise StoreUnavailable(
            f"cannot open the database {engine.url.render_as_string()} ({error.orig}); "
            "check SHARDLOOM_DATABASE_URL, and that the server is up"
        ) from error


def _newest() -> str:
    newest = newest_revision()
    assert newest is not None, "this version has migrations"
    return newest


def main(*, check: bool = False) -> int:
    """Migrate or, with `check`, only look; prints what was found and returns the exit code."""
    try:
        database_url = Settings().database_url
        revisions = read_revisions(database_url) if check else bring_up(database_url)
    except ValidationError as error:
        for fault in error.errors():
            name = "_".join(str(part) for part in fault["loc"]).upper()
            print(f"SHARDLOOM_{name}: {fault['msg']}", file=sys.stderr)
        return UNAVAILABLE
    except (ServiceError, OSError) as error:
        print(f"the database cannot be migrated: {error}", file=sys.stderr)
        return UNAVAILABLE
    print(_checked(revisions) if check else _migrated(revisions))
    return BEHIND if check and revisions.is_behind else UP_TO_DATE


def _migrated(revisions: Revisions) -> str:
    if not revisions.is_behind:
        return f"the database is at migration {revisions.wanted} already"
    return f"migrated the database from {revisions.found or 'nothing'} to {revisions.wanted}"


def _checked(revisions: Revisions) -> str:
    if not revisions.is_behind:
        return f"the database is at migration {revisions.wanted}, as this version needs it"
    return (
        f"the database is behind: at {revisions.found or 'nothing'}, this version needs "
        f"{revisions.wanted}; `shardloom migrate` brings it there (back it up first: a migration "
        "is not undone)"
    )


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
