"""The store on a real PostgreSQL: the tests of the store and its migrations that take any database.

They are written once, for the fixtures `store` and `database_url`; here those are PostgreSQL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from service.store.sql import SqlJobStore
from tests.integration.postgresql import PostgresqlServer
from tests.unit.service import test_migrations, test_store, test_store_queries

_FIXTURES = {"store", "database_url"}


@pytest.fixture
def database_url(postgresql: PostgresqlServer) -> str:
    """A database without tables."""
    return postgresql.empty_database()


@pytest.fixture
def store(postgresql: PostgresqlServer) -> Iterator[SqlJobStore]:
    """A store on PostgreSQL."""
    opened = SqlJobStore.open(postgresql.migrated_database())
    yield opened
    opened.close()


def _take_tests(module: ModuleType) -> None:
    for name, function in vars(module).items():
        if name.startswith("test_") and _FIXTURES & inspect.signature(function).parameters.keys():
            globals()[name] = function


for _module in (test_store, test_migrations, test_store_queries):
    _take_tests(_module)
