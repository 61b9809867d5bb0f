"""The stack on real Ray, the service on a scripted cluster, the API server, a store of objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.backends.fake import Script
from tests.harness.kube.backends import backends  # noqa: F401
from tests.harness.kube.cluster import kube, kube_api_server  # noqa: F401
from tests.harness.object_store import ObjectStore, run_object_store
from tests.harness.service_process import ServiceProcess
from tests.harness.stack import Stack
from tests.harness.wait import free_port


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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """The service on a cluster where attempts run until their driver says otherwise."""
    with ServiceProcess(tmp_path, free_port()) as started:
        started.cluster.play("default", Script(("pending", "running")))
        yield started
