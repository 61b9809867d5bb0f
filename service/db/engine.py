"""The database engine: connections, transactions, migrations.

`open_engine` takes the URL of a SQLite file or of PostgreSQL. `Transactions` begins transactions of
all stores and turns errors of the database into `StoreUnavailable`; `repeated` retries those that
it undid. SQLite has one writer at a time: writers of this process queue for it, background threads
behind requests.
"""

from __future__ import annotations

import functools
import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    Executable,
    RowMapping,
    Select,
    Table,
    create_engine,
    event,
    func,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import (
    retry,
    retry_if_exception,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_fixed,
)

from service.errors import ServiceError, StoreUnavailable

logger = logging.getLogger(__name__)
_Parsed = TypeVar("_Parsed")
_WRITE_LOCK_TIMEOUT_S = 10.0
# serialization_failure and deadlock_detected
_CONFLICTS = frozenset({"40001", "40P01"})


# `is_background` is set where `write_in_background` was called.
_this_thread = threading.local()


# Over a SQLite file: the lock of the background thread that is next, and that of the writer.
# SQLite's own waiting polls at ever longer intervals. With a queue of their own for background
# threads, a request waits for at most one of them.
_write_locks: WeakKeyDictionary[Engine, tuple[threading.Lock, threading.Lock]] = WeakKeyDictionary()


def write_in_background() -> None:
    """Give writes of the calling thread a lower priority than those of requests, from now on."""
    _this_thread.is_background = True


@contextmanager
def _write_turn(engine: Engine) -> Iterator[None]:
    """Hold the right to write, among all stores over an engine; raises `StoreUnavailable`."""
    with ExitStack() as held:
        if engine.dialect.name == "sqlite":
            locks = _write_locks.setdefault(engine, (threading.Lock(), threading.Lock()))
            is_background = getattr(_this_thread, "is_background", False)
            for lock in locks if is_background else locks[1:]:
                if not lock.acquire(timeout=_WRITE_LOCK_TIMEOUT_S):
                    raise StoreUnavailable(
                        f"other writers held the database for {_WRITE_LOCK_TIMEOUT_S:g} s; "
                        "is it slow?"
                    )
                held.callback(lock.release)
        yield


class TransactionConflict(StoreUnavailable):
    """The database undid a transaction because of another one; a retry may pass."""

    code = StoreUnavailable.code


class Transactions:
    """Begins transactions on `engine`, for the stores; all raise `StoreUnavailable` on a failure.

    Errors about the written values (`DataError`, `IntegrityError`) pass through.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._unreadable: set[str] = set()

    def read(self, *, is_single: bool = False) -> AbstractContextManager[Connection]:
        """A transaction that reads; `is_single` spares SQLite one for a single statement."""
        return self._begin(is_write=False, is_single=is_single)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; committed when the block ends without an error."""
        with _write_turn(self.engine), self._begin(is_write=True) as connection:
            yield connection

    def rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        with self.read(is_single=True) as connection:
            return connection.execute(query).mappings().all()

    def readable(
        self, found: Iterable[RowMapping], parse: Callable[[RowMapping], _Parsed]
    ) -> list[_Parsed]:
        """What `parse` makes of rows; one for which it raises is left out and logged once."""
        readable = []
        for row in found:
            try:
                readable.append(parse(row))
            except ServiceError as error:
                if row["id"] not in self._unreadable:
                    logger.error("%s", error)
                self._unreadable.add(row["id"])
        return readable

    def execute(self, statement: Executable, values: Any = None) -> int:
        """Run one statement that writes; how many rows it changed."""
        with self.write() as connection:
            return connection.execute(statement, values).rowcount

    @contextmanager
    def _begin(self, *, is_write: bool, is_single: bool = False) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                connection.execution_options(is_write=is_write, is_single=is_single)
                with connection.begin():
                    yield connection
        except (DataError, IntegrityError):
            # About the written values, not the database: for the caller to explain.
            raise
        except (DBAPIError, PoolTimeout) as error:
            raise _unavailable(error) from error


def _unavailable(error: DBAPIError | PoolTimeout) -> StoreUnavailable:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if getattr(cause, "sqlstate", None) in _CONFLICTS:
        return TransactionConflict(f"the database kept undoing a transaction ({cause})")
    return StoreUnavailable(
        f"the database failed ({cause}); is it running, its disk full, or another "
        "process holding it?"
    )


# Retries a method of one transaction that the database undid because of another one.
repeated = retry(
    retry=retry_if_exception_type(TransactionConflict), stop=stop_after_attempt(4), reraise=True
)


def insert_for(dialect: Dialect, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An insert with `on_conflict_do_update` and `on_conflict_do_nothing`."""
    if dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def upsert(connection: Connection, table: Table, values: Mapping[str, Any], *keys: str) -> None:
    """Write a row, new or known by its `keys`."""
    connection.execute(_upsert_of(connection.dialect, table, tuple(values), keys), dict(values))


@functools.lru_cache
def _upsert_of(
    dialect: Dialect, table: Table, columns: tuple[str, ...], keys: tuple[str, ...]
) -> sqlite.Insert | postgresql.Insert:
    # Made once: that takes longer than to run it.
    statement = insert_for(dialect, table)
    changed = {name: statement.excluded[name] for name in columns if name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changed)


_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_TIMEOUT_MS = 10_000
# Ten connections stay open when idle. For a SQLite file there are enough for every thread: about 40
# of the API, 32 of the dashboard and those of the reconciler. A PostgreSQL server takes 100 by
# default, and serves several replicas.
_POOL_SIZE = 10
_POOL_OVERFLOW = {"sqlite": 80, "postgresql": 20}
_POSTGRESQL = "postgresql+psycopg"
_POSTGRESQL_OPTIONS = {
    # How long a server that hangs, or a lock, may delay a request.
    "connect_timeout": 5,
    "options": (
        "-c statement_timeout=60s -c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
    ),
    # That a network drops packets is noticed after 15 minutes otherwise. The last one is in ms.
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "tcp_user_timeout": 20_000,
    "application_name": "shardloom",
}
# Key of the advisory lock under which replicas that start together migrate one after another.
_MIGRATION_LOCK = 5_301_871


def open_engine(database_url: str) -> Engine:
    """An engine for the URL; a SQLite file and its folder are made if missing.

    Raises `StoreUnavailable` for an invalid URL or an unsupported database.
    """
    try:
        url = make_url(database_url)
        if url.drivername in ("postgresql", "postgres", _POSTGRESQL):
            given = {k: v for k, v in _POSTGRESQL_OPTIONS.items() if k not in url.query}
            return create_engine(
                url.set(drivername=_POSTGRESQL),
                pool_size=_POOL_SIZE,
                max_overflow=_POOL_OVERFLOW["postgresql"],
                # A restart of the server is noticed before a transaction begins.
                pool_pre_ping=True,
                isolation_level="READ COMMITTED",
                connect_args=given,
            )
        if url.get_backend_name() != "sqlite":
            raise ArgumentError(f"the service supports no database '{url.drivername}'")
        return _sqlite_engine(url)
    except (ArgumentError, ImportError) as error:
        shown = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", database_url)
        raise StoreUnavailable(
            f"cannot use the database URL {shown} ({error}); "
            "SHARDLOOM_DATABASE_URL reads as in sqlite:////FOLDER/FILE.db or "
            "postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from error


def _sqlite_engine(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise ArgumentError("a database in memory cannot be shared between threads")
    file = Path(url.database)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.touch(mode=0o600)  # SQLite gives its logs the same
    engine = create_engine(url, pool_size=_POOL_SIZE, max_overflow=_POOL_OVERFLOW["sqlite"])
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # `_begin_sqlite` opens transactions, not the driver.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    for pragma in (
        # First, as the others may have to wait for another process.
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
        # An acknowledged record must survive a power cut, so every commit reaches the disk.
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    _use_wal(cursor)
    cursor.close()


def _is_busy(error: BaseException) -> bool:
    return isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY


@retry(
    retry=retry_if_exception(_is_busy),
    stop=stop_after_delay(_BUSY_TIMEOUT_MS / 1e3),
    wait=wait_fixed(0.01),
    reraise=True,
)
def _use_wal(cursor: sqlite3.Cursor) -> None:
    # Where two connections change it at once, SQLite fails for one at once, whatever the time-out.
    cursor.execute("PRAGMA journal_mode=WAL")


def _begin_sqlite(connection: Connection) -> None:
    # A writer locks at once: a read that turned into a write later could not be retried.
    options = connection.get_execution_options()
    if not options.get("is_single"):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("is_write") else "BEGIN")


def migration_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration for our migrations, run over `connection`."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def migrate(engine: Engine, revision: str = "head") -> str | None:
    """Bring the schema to `revision` in one transaction; raises `StoreUnavailable`.

    Returns the revision that it was at, None for a database without tables. Replicas that start
    together wait for the first: for SQLite's write lock, or an advisory lock of PostgreSQL.
    """
    try:
        with engine.connect().execution_options(is_write=True) as connection, connection.begin():
            if connection.dialect.name == "postgresql":
                # As long as it takes: the limits are for requests.
                for limit in ("statement_timeout", "lock_timeout"):
                    connection.exec_driver_sql(f"SET LOCAL {limit} = 0")
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
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


@functools.cache
def known_revisions() -> tuple[str, ...]:
    """The revisions that this version of the service knows, the newest first."""
    scripts = ScriptDirectory.from_config(migration_config())
    return tuple(each.revision for each in scripts.walk_revisions())


def newest_revision() -> str:
    """The revision that this version of the service needs."""
    return known_revisions()[0]


def stored_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
