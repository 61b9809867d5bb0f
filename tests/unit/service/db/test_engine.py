"""SQLite: writers of a process take turns, and its log is moved into the database beside them."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, text

from service.db import engine as engine_module
from service.db.engine import Transactions, WalCheckpointer, open_engine, write_in_background
from service.db.jobs import JobStore
from service.errors import StoreUnavailable
from tests.harness.wait import scaled


def test_a_writer_waits_for_the_one_before_it_and_not_for_ever(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Transactions(store.engine), Transactions(store.engine)
    writes, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with first.write():
            writes.set()
            may_end.wait(scaled(30))

    holder = threading.Thread(target=hold)
    holder.start()
    assert writes.wait(scaled(30))
    with second.read() as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1, "readers never wait"
    monkeypatch.setattr(engine_module, "_WRITE_LOCK_TIMEOUT_S", 0.01)
    with pytest.raises(StoreUnavailable, match="other writers"), second.write():
        pass
    may_end.set()
    holder.join()
    with second.write() as connection:
        connection.execute(text("DELETE FROM answers"))


def test_the_background_stands_in_a_queue_of_its_own(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = Transactions(store.engine)
    refused = list[StoreUnavailable]()

    def look() -> None:
        write_in_background()
        try:
            with transactions.write():
                pass
        except StoreUnavailable as error:
            refused.append(error)

    monkeypatch.setattr(engine_module, "_WRITE_LOCK_TIMEOUT_S", 0.01)
    with transactions.write() as connection:
        connection.execute(text("DELETE FROM answers"))
    background, _ = engine_module._write_locks[store.engine]
    with background:
        with transactions.write() as connection:
            connection.execute(text("DELETE FROM answers"))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(refused) == 1, "it waits for the others in the background, as requests do not"


def test_a_network_to_postgresql_that_drops_packets_is_noticed_within_a_minute() -> None:
    asked = dict[str, object]()
    engine = open_engine("postgresql://host/name")

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: object, _record: object, _args: object, options: dict[str, int]) -> None:
        asked.update(options)
        raise ConnectionError

    with suppress(ConnectionError):
        engine.connect()
    assert 0 < asked["tcp_user_timeout"] <= 60_000


# ---- the write-ahead log


def test_a_long_log_is_moved_while_somebody_writes(store: JobStore, tmp_path: Path) -> None:
    path = tmp_path / "shardloom.db"
    transactions, keeper = Transactions(store.engine), WalCheckpointer(store.engine)
    with transactions.write() as connection:
        connection.execute(text("CREATE TABLE filling (content BLOB)"))
        connection.execute(text("INSERT INTO filling VALUES (zeroblob(5000000))"))
    before = path.stat().st_size
    with transactions.write() as connection:
        connection.execute(text("INSERT INTO filling VALUES (zeroblob(10))"))
        assert keeper.shorten()
    assert path.stat().st_size > before + 5_000_000
    with transactions.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM filling")).scalar_one() == 2


def test_a_short_log_and_another_database_are_left_alone(store: JobStore) -> None:
    assert not WalCheckpointer(store.engine).shorten()
    away = WalCheckpointer(create_engine("postgresql+psycopg://host/name"))
    away.start()
    assert not away.shorten()
    away.close()
