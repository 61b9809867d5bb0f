"""The stores on a real PostgreSQL: the tests of stores and reconciler that take any database.

They are written once, for the fixtures `store` and `database_url`; here those are PostgreSQL's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from service.store.sql import SqlJobStore
from tests.integration.postgresql import PostgresqlServer
from tests.unit.service import (
    test_keys,
    test_migrate,
    test_migrations,
    test_queue_keeper,
    test_reconciler,
    test_store,
    test_store_queries,
    test_webhooks,
)
from tests.unit.service.conftest import app_settings, house  # noqa: F401
from tests.unit.service.test_keys import clock, keys  # noqa: F401
from tests.unit.service.test_migrate import configured  # noqa: F401
from tests.unit.service.test_webhooks import outbox  # noqa: F401

# By which fixtures the tests of a module ask for a database.
_TAKEN = {
    test_store: {"store", "database_url"},
    test_store_queries: {"store", "database_url"},
    test_migrations: {"database_url"},
    test_migrate: {"database_url", "configured"},
    test_reconciler: {"house"},
    test_queue_keeper: {"house"},
    test_keys: {"keys"},
    test_webhooks: {"outbox"},
}


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


def _take_tests(module: ModuleType, fixtures: set[str]) -> None:
    for name, function in vars(module).items():
        if name.startswith("test_") and fixtures & inspect.signature(function).parameters.keys():
            assert name not in globals(), f"two tests are called {name}"
            globals()[name] = function


for _module, _fixtures in _TAKEN.items():
    _take_tests(_module, _fixtures)
