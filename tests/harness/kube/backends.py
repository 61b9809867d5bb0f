"""KubeRay backends on a namespace, with the rights that the chart gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from service.backends.base import Submission
from service.backends.kuberay.backend import KubeRayBackend
from service.backends.kuberay.client import KubeApi
from service.backends.kuberay.manifest import ClusterOptions
from service.backends.ray_jobs import RayJobsBackend
from service.domain.models import Observation, ObservedState
from tests.harness import kuberay
from tests.harness.kube.cluster import KubeCluster
from tests.harness.wait import scaled, wait_for
from tests.unit.k8s.rendering import build, of_kind

# Of one request: on a slow machine a server may take its time.
TIMEOUT_S = scaled(10.0)


def rules(namespace: str = "shardloom") -> list[dict[str, Any]]:
    """What the chart lets the service do in a namespace."""
    made = of_kind(build("gpu+isolated"), "Role")
    (found,) = [
        each["rules"]
        for each in made
        if each["metadata"]["name"] == "shardloom-own-clusters"
        and each["metadata"]["namespace"] == namespace
    ]
    return list(found)


def without(verbs: set[str], resources: set[str]) -> list[dict[str, Any]]:
    """The same without these verbs on these resources."""
    found = []
    for rule in rules():
        for resource in rule["resources"]:
            taken = verbs if resource in resources else set()
            left = [verb for verb in rule["verbs"] if verb not in taken]
            found += [{**rule, "resources": [resource], "verbs": left}] if left else []
    return found


class KubeRayBackends:
    """Backends of one namespace, as replicas of the service would open them."""

    def __init__(self, cluster: KubeCluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._opened: list[KubeRayBackend] = []
        self.api = client.CustomObjectsApi(cluster.client())
        self.core = client.CoreV1Api(cluster.client())
        for account in ("shardloom-ray-head", "shardloom-ray-worker"):
            about = {"metadata": {"name": account}}
            self.core.create_namespaced_service_account(cluster.namespace, about)

    def open(
        self,
        allowed: list[dict[str, Any]] | None = None,
        *,
        watches: bool = True,
        shared: RayJobsBackend | None = None,
        template: Callable[[], dict[str, Any]] = kuberay.template,
        clock: Callable[[], float] = time.time,
        **options: Any,
    ) -> KubeRayBackend:
        """Another replica, with the rights of the chart if not others."""
        number = len(self._opened)
        token = self.cluster.token_for(f"replica-{number}", rules() if allowed is None else allowed)
        config = self.cluster.kubeconfig(self._folder / f"config-{number}", token)
        api = KubeApi.open(Path(config), self.cluster.namespace, TIMEOUT_S)
        backend = KubeRayBackend(
            api,
            shared,
            template,
            ClusterOptions(self.cluster.namespace, **options),
            lambda address, token: RayJobsBackend(address, auth_token=token, timeout_s=TIMEOUT_S),
            clock,
        )
        if watches:
            backend.start()
        self._opened.append(backend)
        return backend

    def close(self) -> None:
        """Close all of them."""
        for backend in self._opened:
            backend.close()

    def rayjobs(self) -> dict[str, dict[str, Any]]:
        """All of the namespace, by name."""
        found = self.api.list_namespaced_custom_object(
            "ray.io", "v1", self.cluster.namespace, "rayjobs"
        )
        return {each["metadata"]["name"]: each for each in found["items"]}

    def secrets(self) -> list[str]:
        """Names of all Secrets."""
        found = self.core.list_namespaced_secret(self.cluster.namespace)
        return sorted(each.metadata.name for each in found.items)

    def secrets_of(self, sent: Submission) -> list[str]:
        """Names of those of an attempt."""
        return [name for name in self.secrets() if name.startswith(f"{sent.attempt_id}-env-")]

    def pods(self) -> list[str]:
        """Names of all pods."""
        found = self.core.list_namespaced_pod(self.cluster.namespace)
        return [each.metadata.name for each in found.items]

    def patch(self, name: str, change: dict[str, Any]) -> None:
        """Change a RayJob as somebody else would."""
        self.api.patch_namespaced_custom_object(
            "ray.io", "v1", self.cluster.namespace, "rayjobs", name, change
        )


@pytest.fixture
def backends(kube: KubeCluster, tmp_path: Path) -> Iterator[KubeRayBackends]:
    """A namespace without an operator: RayJobs stay as they are made."""
    found = KubeRayBackends(kube, tmp_path)
    yield found
    found.close()


def submission(number: int = 0, env: dict[str, str] | None = None, **need: Any) -> Submission:
    """An attempt of job `number`, on a cluster of its own with 2 workers without GPUs."""
    small = {"min_workers": 2, "max_workers": 2, "device": "cpu"}
    made = kuberay.submission(f"job-{number:012d}-a0", **small | need)
    return replace(made, env=env) if env else made


def wait_for_state(backend: KubeRayBackend, attempt_id: str, state: ObservedState) -> Observation:
    """The first observation of that state."""

    def observed() -> Observation | None:
        seen = backend.observe(attempt_id)
        return seen if seen.state is state else None

    return wait_for(observed, f"{attempt_id} to be {state}", 15)
