"""What the tests share that costs seconds to start: the stack on real Ray, PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kube.fixtures import api_server, kube, shared_api_server  # noqa: F401
from tests.integration.postgresql import PostgresqlServer, run_server
from tests.integration.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Service and Ray, up for the whole test session."""
    stack = Stack(tmp_path_factory.mktemp("shardloom"))
    stack.up()
    yield stack
    stack.down()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A PostgreSQL server, up for the whole test session."""
    with run_server() as server:
        yield server
