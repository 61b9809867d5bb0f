"""The stack on real Ray, which costs the most to start, and the API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.kube.backends import backends  # noqa: F401
from tests.harness.kube.cluster import kube, kube_api_server  # noqa: F401
from tests.harness.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Service and Ray, up for the whole test session; nothing of them may be left after it."""
    stack = Stack(tmp_path_factory.mktemp("shardloom"))
    with stack.running():
        yield stack
