"""Writers of one process take turns at a SQLite database, whichever store they write through."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from service.errors import StoreUnavailable
from service.store import transactions
from service.store.sql import SqlJobStore
from service.store.transactions import Transactions, write_in_background


def test_a_writer_waits_for_the_one_before_it_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SqlJobStore.open(f"sqlite:///{tmp_path / 'turns.db'}").engine
    first, second = Transactions(engine), Transactions(engine)
    writes, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with first.write():
            writes.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert writes.wait(30)
    with second.read() as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1, "readers never wait"
    monkeypatch.setattr(transactions, "_TURN_S", 0.01)
    with pytest.raises(StoreUnavailable, match="other writers"), second.write():
        pass
    may_end.set()
    holder.join()
    with second.write() as connection:
        connection.execute(text("DELETE FROM answers"))


def test_the_background_stands_in_a_queue_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Transactions(SqlJobStore.open(f"sqlite:///{tmp_path / 'turns.db'}").engine)
    refused = list[StoreUnavailable]()

    def look() -> None:
        write_in_background()
        try:
            with store.write():
                pass
        except StoreUnavailable as error:
            refused.append(error)

    monkeypatch.setattr(transactions, "_TURN_S", 0.01)
    turns = transactions._turns.setdefault(store.engine, transactions._Turns())
    with turns._background_lock:
        with store.write() as connection:
            connection.execute(text("DELETE FROM answers"))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert len(refused) == 1, "it waits for the others in the background, as requests do not"
