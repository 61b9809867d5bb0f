"""Writers of a process take turns on SQLite; a dropped network to PostgreSQL is noticed."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from sqlalchemy import event, text

from service.db import engine as engine_module
from service.db.engine import Transactions, open_engine, write_in_background
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
