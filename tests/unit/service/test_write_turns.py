"""Writers of one process take turns at a SQLite database, whichever store they write through."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from service.errors import StoreUnavailable
from service.store import transactions
from service.store.sql import SqlJobStore
from service.store.transactions import Transactions


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
