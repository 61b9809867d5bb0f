"""The log of SQLite is moved into the database beside those who write, and nothing gets lost."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine, text

from service.store.sql import SqlJobStore
from service.store.transactions import Transactions
from service.store.wal import WalKeeper


def test_a_long_log_is_moved_while_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = SqlJobStore.open(f"sqlite:///{path}")
    transactions, keeper = Transactions(store.engine), WalKeeper(store.engine)
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
    store.close()


def test_a_short_log_and_another_database_are_left_alone(tmp_path: Path) -> None:
    store = SqlJobStore.open(f"sqlite:///{tmp_path / 'jobs.db'}")
    assert not WalKeeper(store.engine).shorten()
    store.close()
    away = WalKeeper(create_engine("postgresql+psycopg://host/name"))
    away.start()
    assert not away.shorten()
    away.close()
