"""Fixtures over the cluster of a suite; tests/integration/conftest.py makes them known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.cluster import KubeCluster, kube_cluster

_NO_CRDS = f"KubeRay's definitions are not at {CRD_FOLDER}"


@pytest.fixture
def kube() -> Iterator[KubeCluster]:
    """A namespace in our API server, or in the cluster of KUBECONFIG."""
    if not CRD_FOLDER.is_dir():
        pytest.skip(_NO_CRDS)
    with kube_cluster() as cluster:
        yield cluster


@pytest.fixture
def api_server() -> Iterator[KubeApiServer]:
    """Our API server, whatever KUBECONFIG says: for what only it can do."""
    if not CRD_FOLDER.is_dir():
        pytest.skip(_NO_CRDS)
    with KubeApiServer() as server:
        yield server
