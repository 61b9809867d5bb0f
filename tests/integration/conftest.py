"""The stack on real Ray, which costs the most to start, the API server, and a store of objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.kube.backends import backends  # noqa: F401
from tests.harness.kube.cluster import kube, kube_api_server  # noqa: F401
from tests.harness.object_store import ObjectStore, run_object_store
from tests.harness.stack import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Service and Ray, up for the whole test session; nothing of them may be left after it."""
    stack = Stack(tmp_path_factory.mktemp("shardloom"))
    with stack.running():
        yield stack


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """An empty bucket, for all tests of a file."""
    with run_object_store() as store:
        yield store
