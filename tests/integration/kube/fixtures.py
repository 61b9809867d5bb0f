"""Fixtures over the cluster of a suite; tests/integration/conftest.py makes them known."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.cluster import InProcessCluster, KubeCluster, RealCluster


def _skip_without_definitions() -> None:
    if not CRD_FOLDER.is_dir():
        pytest.skip(f"KubeRay's definitions are not at {CRD_FOLDER}")


@pytest.fixture(scope="session")
def shared_api_server() -> Iterator[KubeApiServer]:
    """One API server of ours for all tests that keep to a namespace of their own."""
    _skip_without_definitions()
    with KubeApiServer() as server:
        yield server


@pytest.fixture
def kube(request: pytest.FixtureRequest) -> Iterator[KubeCluster]:
    """A namespace in our API server, or in the cluster of KUBECONFIG."""
    _skip_without_definitions()
    if os.environ.get("KUBECONFIG"):
        real = RealCluster(os.environ["KUBECONFIG"])
        yield real
        real.remove()
        return
    server: KubeApiServer = request.getfixturevalue("shared_api_server")
    yield InProcessCluster(server)
    server.mutators.clear()


@pytest.fixture
def api_server() -> Iterator[KubeApiServer]:
    """An API server of ours, whatever KUBECONFIG says: for what only it can do."""
    _skip_without_definitions()
    with KubeApiServer() as server:
        yield server
