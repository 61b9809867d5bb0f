"""Opening the database: settings per dialect, transactions that lock up front, and migrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError

from service.errors import StoreUnavailable
from service.store.wal import AUTOCHECKPOINT_PAGES

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_MS = 10_000
# Only the first ten connections stay open when nobody uses them. A SQLite file takes more than
# there are threads that want one: about 40 of the API, 32 of the dashboard and those of the
# reconciler. A PostgreSQL server takes 100 by default, and serves several replicas.
_POOL_SIZE = 10
_POOL_OVERFLOW = {"sqlite": 80, "postgresql": 20}
_POSTGRESQL = "postgresql+psycopg"
_POSTGRESQL_OPTIONS = {
    # What a server that hangs, or a statement that waits for another, may hold up a request.
    "connect_timeout": 5,
    "options": (
        "-c statement_timeout=60s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
    ),
    "keepalives_idle": 15,
    "application_name": "shardloom",
}
# Any number will do: the replicas of a service that start together migrate one after another.
_MIGRATION_LOCK = 5_301_871


def open_engine(database_url: str) -> Engine:
    """An engine for the URL; SQLite files and their folder are made if missing.

    Raises `StoreUnavailable` if the URL is none, or names a database that cannot be used.
    """
    try:
        return _engine_of(make_url(database_url))
    except (ArgumentError, ImportError) as error:
        raise StoreUnavailable(
            f"cannot use the database URL {_without_password(database_url)} ({error}); "
            "SHARDLOOM_DATABASE_URL reads as in sqlite:////FOLDER/FILE.db or "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from error


def _engine_of(url: URL) -> Engine:
    if url.drivername in ("postgresql", "postgres", _POSTGRESQL):
        return _postgresql_engine(url.set(drivername=_POSTGRESQL))
    if url.get_backend_name() != "sqlite":
        raise ArgumentError(f"the service knows no database of the kind '{url.drivername}'")
    return _sqlite_engine(url)


def _postgresql_engine(url: URL) -> Engine:
    given = {key: value for key, value in _POSTGRESQL_OPTIONS.items() if key not in url.query}
    return create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_OVERFLOW["postgresql"],
        # Found out before a transaction begins, not in the middle: the server was restarted.
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args=given,
    )


def _sqlite_engine(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise ArgumentError("a database in memory has nothing to share between threads")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_size=_POOL_SIZE, max_overflow=_POOL_OVERFLOW["sqlite"])
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _without_password(database_url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", database_url)


def _prepare_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # The driver must not open transactions of its own: `_begin_sqlite` does.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    for pragma in (
        # First, as the others may have to wait for another process.
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        # An acknowledged record must survive a power cut, so every commit reaches the disk.
        "synchronous=FULL",
        f"wal_autocheckpoint={AUTOCHECKPOINT_PAGES}",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: a read that turns into a write later could not be retried.
    is_write = connection.get_execution_options().get("is_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")


def migration_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for our migrations, run over `connection`."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def migrate(engine: Engine, revision: str = "head") -> str | None:
    """Bring the schema to `revision`; raises `StoreUnavailable` if it cannot be opened.

    Returns the revision that it was at, None for a database without tables. All steps are one
    transaction. Replicas that start together wait for the first of them: on SQLite for its write
    lock, on PostgreSQL for an advisory lock.
    """
    try:
        with engine.connect().execution_options(is_write=True) as connection, connection.begin():
            _wait_for_other_migrations(connection)
            found = stored_revision(connection)
            command.upgrade(migration_config(connection), revision)
            return found
    except CommandError as error:
        raise StoreUnavailable(
            f"the database {engine.url.render_as_string()} is of another version of the service "
            f"({error}); run that version, or set SHARDLOOM_DATABASE_URL to another database"
        ) from error
    except DBAPIError as error:
        raise StoreUnavailable(
            f"cannot open the database {engine.url.render_as_string()} ({error.orig}); "
            "check SHARDLOOM_DATABASE_URL and the rights on its folder"
        ) from error


def _wait_for_other_migrations(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        # As long as it takes: the limits are for requests.
        for limit in ("statement_timeout", "lock_timeout"):
            connection.exec_driver_sql(f"SET LOCAL {limit} = 0")
        connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))


def newest_revision() -> str | None:
    """The revision that this version of the service was written for."""
    return ScriptDirectory.from_config(migration_config()).get_current_head()


def knows_revision(revision: str) -> bool:
    """Whether this version of the service can tell what a database at `revision` looks like."""
    known = ScriptDirectory.from_config(migration_config()).walk_revisions()
    return revision in {each.revision for each in known}


def stored_revision(connection: Connection) -> str | None:
    """The revision that the database is at."""
    return MigrationContext.configure(connection).get_current_revision()
