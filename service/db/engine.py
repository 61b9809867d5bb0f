"""Engine, transactions, SQLite WAL checkpoints.

Transactions over an engine: one way to begin, to fail and to try again, for every store.

SQLite lets the transaction that makes the log too long move it, which takes tens of milliseconds
that somebody's request has to wait for. Here a thread of its own does it, and hinders nobody.
"""

from __future__ import annotations

import functools
import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.errors import StoreUnavailable

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_MAX_TRIES = 4
_TURN_S = 10.0
# serialization_failure and deadlock_detected: PostgreSQL undid the transaction to end a tie.
_TIES = frozenset({"40001", "40P01"})


class _Turns:
    """The turn to write to a SQLite file, which has one writer at a time.

    SQLite itself lets the others look again and again, at ever longer intervals: the writers of
    this process are better off in a queue. Those in the background stand in one of their own, so
    that a request waits for one of them at most, however many there are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._background_lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold the turn; raises `StoreUnavailable`."""
        with ExitStack() as held:
            if _this_thread.is_background:
                held.enter_context(_held(self._background_lock))
            held.enter_context(_held(self._lock))
            yield


class _Thread(threading.local):
    is_background = False


_this_thread = _Thread()
_turns: WeakKeyDictionary[Engine, _Turns] = WeakKeyDictionary()


def write_in_background() -> None:
    """Let what the calling thread writes from now on stand behind what requests write."""
    _this_thread.is_background = True


@contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    if not lock.acquire(timeout=_TURN_S):
        raise StoreUnavailable(f"other writers held the database for {_TURN_S:g} s; is it slow?")
    try:
        yield
    finally:
        lock.release()


def _turn(engine: Engine) -> AbstractContextManager[None]:
    """The turn to write, among all stores over an engine."""
    if engine.dialect.name != "sqlite":
        return nullcontext()
    return _turns.setdefault(engine, _Turns()).take()


class TransactionTied(StoreUnavailable):
    """The database undid a transaction because of another one; the same again may pass."""


class Transactions:
    """Begins transactions on `engine`; both methods raise `StoreUnavailable` if it fails.

    Errors about the values that were to be written (`DataError`, `IntegrityError`) pass through.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._begin(is_write=False) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; committed when the block ends without an error."""
        with _turn(self.engine), self._begin(is_write=True) as connection:
            yield connection

    @contextmanager
    def _begin(self, *, is_write: bool) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                connection.execution_options(is_write=is_write)
                with connection.begin():
                    yield connection
        except (DataError, IntegrityError):
            # About what was to be written, not about the database: for the caller to explain.
            raise
        except (DBAPIError, PoolTimeout) as error:
            raise _unavailable(error) from error


def _unavailable(error: DBAPIError | PoolTimeout) -> StoreUnavailable:
    cause = error.orig if isinstance(error, DBAPIError) else error
    if getattr(cause, "sqlstate", None) in _TIES:
        return TransactionTied(f"the database undid a transaction again and again ({cause})")
    return StoreUnavailable(
        f"the database did not do its part ({cause}); is it running, its disk full, or another "
        "process holding it?"
    )


def repeated(method: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Run a method of one transaction again when the database undid it because of another."""

    @functools.wraps(method)
    def run(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        for _ in range(_MAX_TRIES - 1):
            try:
                return method(*args, **kwargs)
            except TransactionTied:
                continue
        return method(*args, **kwargs)

    return run


# INSERT ... ON CONFLICT, which SQLite and PostgreSQL spell alike but SQLAlchemy keeps apart.


def insert_for(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An insert that knows `on_conflict_do_update` and `on_conflict_do_nothing`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


# Moving what SQLite wrote from its log into the database file, beside those who write.

logger = logging.getLogger(__name__)
# Where a transaction has to do it after all: pages of 4 KiB.
AUTOCHECKPOINT_PAGES = 16_384
_INTERVAL_S = 1.0
_MIN_LOG_BYTES = 4 << 20


class WalCheckpointer:
    """Keeps the log of a SQLite file short; does nothing for any other database."""

    def __init__(self, engine: Engine, interval_s: float = _INTERVAL_S) -> None:
        is_file = engine.dialect.name == "sqlite" and engine.url.database
        self._path = Path(str(engine.url.database)) if is_file else None
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wal", daemon=True)

    def start(self) -> None:
        """Begin to look at the log, every `interval_s`."""
        if self._path is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, after a move that is under way."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self.shorten()
            except (OSError, sqlite3.Error) as error:
                # The log grows until a transaction does it.
                logger.warning("the log of the database stays as long as it is for now: %s", error)

    def shorten(self, min_bytes: int = _MIN_LOG_BYTES) -> bool:
        """Move what is in the log if it has `min_bytes`; whether it was moved.

        Neither readers nor writers are waited for, and what they still need stays.
        """
        if (
            self._path is None
            or _size_of(self._path.with_name(self._path.name + "-wal")) < min_bytes
        ):
            return False
        with closing(sqlite3.connect(self._path, isolation_level=None, timeout=1.0)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")
        return True


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# Opening the database: settings per dialect, transactions that lock up front, and migrations.

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
