"""Fixtures shared by the tests of the control plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store.sql import SqlJobStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlJobStore]:
    """A store on a real SQLite file."""
    opened = SqlJobStore.open(f"sqlite:///{tmp_path / 'shardloom.db'}")
    yield opened
    opened.close()
