"""Schema migration as a step of its own: `shardloom migrate`.

Needs SHARDLOOM_DATABASE_URL only. The service migrates at start as well; this is for deployments
where a migration should be able to fail by itself (a Kubernetes Job, a compose service).
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from service.db.engine import knows_revision, migrate, newest_revision, open_engine, stored_revision
from service.errors import ServiceError, StoreUnavailable
from service.settings import Settings, faults_of

UP_TO_DATE = 0
BEHIND = 1
UNAVAILABLE = 3


def bring_up(database_url: str) -> str | None:
    """Migrate, as `service.db.engine.migrate`; the revision that the database was at."""
    engine = open_engine(database_url)
    try:
        return migrate(engine)
    finally:
        engine.dispose()


def read_revision(database_url: str) -> str | None:
    """The revision, without changing the database; raises `StoreUnavailable`."""
    engine = open_engine(database_url)
    # To connect to a SQLite file that is not there would make it.
    if engine.dialect.name == "sqlite" and not Path(engine.url.database or "").exists():
        return None
    try:
        with engine.connect() as connection:
            found = stored_revision(connection)
    except DBAPIError as error:
        raise StoreUnavailable(
            f"cannot open the database {engine.url.render_as_string()} ({error.orig}); "
            "check SHARDLOOM_DATABASE_URL, and that the server is up"
        ) from error
    finally:
        engine.dispose()
    if found is not None and not knows_revision(found):
        raise StoreUnavailable(
            f"the database {engine.url.render_as_string()} is at migration {found}, which this "
            "version does not know: a newer version of the service migrated it; run that version"
        )
    return found


def main(*, check: bool = False) -> int:
    """Migrate or, with `check`, only look; prints what was found and returns the exit code."""
    try:
        database_url = Settings().database_url
        found = read_revision(database_url) if check else bring_up(database_url)
    except ValidationError as error:
        print(*faults_of(error), sep="\n", file=sys.stderr)
        return UNAVAILABLE
    except (ServiceError, OSError) as error:
        print(f"the database cannot be migrated: {error}", file=sys.stderr)
        return UNAVAILABLE
    found, wanted = found or "nothing", newest_revision()
    if found == wanted:
        follows = ", as this version needs it" if check else " already"
        print(f"the database is at migration {wanted}{follows}")
        return UP_TO_DATE
    if not check:
        print(f"migrated the database from {found} to {wanted}")
        return UP_TO_DATE
    print(
        f"the database is behind: at {found}, this version needs {wanted}; `shardloom migrate` "
        "brings it there (back it up first: a migration is not undone)"
    )
    return BEHIND
