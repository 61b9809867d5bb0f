"""Opening the database: pragmas, transactions that lock up front, and migrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from service.errors import StoreUnavailable

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_MS = 10_000
# More connections than threads that want one: about 40 of the API, 32 of the dashboard and those
# of the reconciler. Only the first ten stay open when nobody uses them.
_POOL_SIZE = 10
_POOL_OVERFLOW = 80


def open_engine(database_url: str) -> Engine:
    """An engine for the URL; SQLite files and their folder are made if missing.

    Raises `StoreUnavailable` if the URL is none, or names a database that cannot be used.
    """
    try:
        return _engine_of(make_url(database_url))
    except (ArgumentError, ImportError) as error:
        raise StoreUnavailable(
            f"cannot use the database URL {_without_password(database_url)} ({error}); "
            "SHARDLOOM_DATABASE_URL reads as in sqlite:////FOLDER/FILE.db"
        ) from error


def _engine_of(url: URL) -> Engine:
    options = {"pool_size": _POOL_SIZE, "max_overflow": _POOL_OVERFLOW}
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, **options)
    if url.database in (None, "", ":memory:"):
        raise ArgumentError("a database in memory has nothing to share between threads")
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, **options)
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
        "journal_mode=WAL",
        # An acknowledged record must survive a power cut, so every commit reaches the disk.
        "synchronous=FULL",
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
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


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to `revision`; raises `StoreUnavailable` if it cannot be opened."""
    try:
        with engine.connect().execution_options(is_write=True) as connection, connection.begin():
            command.upgrade(migration_config(connection), revision)
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


def newest_revision() -> str | None:
    """The revision that this version of the service was written for."""
    return ScriptDirectory.from_config(migration_config()).get_current_head()


def stored_revision(connection: Connection) -> str | None:
    """The revision that the database is at."""
    return MigrationContext.configure(connection).get_current_revision()
