"""Transactions over an engine: one way to begin, to fail and to try again, for every store."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
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
