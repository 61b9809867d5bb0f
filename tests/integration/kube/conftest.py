"""Fixtures of the tests with Kubernetes: the API server, to break, and the operator stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.kube.cluster import KubeCluster
from tests.harness.kube.operator import RayJobOperator, operator_for
from tests.harness.kube.server import KubeApiServer


@pytest.fixture
def server(kube: KubeCluster) -> KubeApiServer:
    """The API server, to break."""
    if kube.server is None:
        pytest.skip("a real API server takes no injected faults")
    return kube.server


@pytest.fixture
def operator(kube: KubeCluster) -> Iterator[RayJobOperator]:
    """The operator stand-in, whose Ray does as the test says."""
    with operator_for(kube, poll_s=0.05) as found:
        if found is None:
            pytest.skip("KubeRay itself runs here: its Ray takes no script")
        yield found
