"""Fixtures shared by the tests of the control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.backends.fake import FakeBackend
from service.settings import Settings
from service.store.sql import SqlJobStore
from tests.unit.service.house import House


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlJobStore]:
    """A store on a real SQLite file."""
    opened = SqlJobStore.open(f"sqlite:///{tmp_path / 'shardloom.db'}")
    yield opened
    opened.close()


@pytest.fixture
def house(store: SqlJobStore, tmp_path: Path) -> House:
    """A control plane without jobs."""
    settings = Settings(home=tmp_path, backend="fake", trainer_python="/usr/bin/my python")
    return House(store, FakeBackend(tmp_path / "fake"), settings)
