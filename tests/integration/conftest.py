"""The running stack that the tests on real Ray share: starting it costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Service and Ray, up for the whole test session."""
    stack = Stack(tmp_path_factory.mktemp("shardloom"))
    stack.up()
    yield stack
    stack.down()
