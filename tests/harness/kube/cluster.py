"""The cluster of a test: an API server of ours, or that of SHARDLOOM_TEST_KUBECONFIG.

Both give the same: a namespace, clients, service accounts with rules. Faults, which
only ours can have, are under `server`, which is None on a real one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client import ApiClient

from tests.harness.kube.objects import read_definitions
from tests.harness.kube.server import KubeApiServer, Rule
from tests.harness.wait import wait_for

_CONFLICT = 409
_TOKEN_S = 3600


class InProcessCluster:
    """A namespace of its own in an API server of ours."""

    def __init__(self, server: KubeApiServer) -> None:
        self.server = server
        self.namespace = f"shardloom-test-{secrets.token_hex(3)}"
        server.add_namespace(self.namespace)

    def client(self) -> ApiClient:
        """A client of the administrator."""
        return self.server.client()

    def operator_client(self) -> ApiClient:
        """The client of operators, which is not noted and which no fault but `away` befalls."""
        return self.server.client(self.server.operator_token)

    def token_for(self, service_account: str, rules: Sequence[Rule]) -> str:
        """A token of a service account in the namespace, with a Role of these rules."""
        return self.server.token_for(service_account, rules, self.namespace)

    def kubeconfig(self, path: Path, token: str | None = None) -> str:
        """Write a kubeconfig and return its path."""
        return self.server.kubeconfig(path, token, self.namespace)

    def remove(self) -> None:
        """Delete the namespace, and mend what the test did to the server."""
        self.server.restore()
        self.server.remove_namespace(self.namespace)
        self.server.raise_crashes()


class RealCluster:
    """A namespace of its own in the cluster of a kubeconfig; KubeRay's definitions if missing."""

    def __init__(self, kubeconfig: str) -> None:
        self.server = None
        self._kubeconfig = kubeconfig
        self.namespace = f"shardloom-test-{secrets.token_hex(3)}"
        self._core = client.CoreV1Api(self.client())
        self._rbac = client.RbacAuthorizationV1Api(self.client())
        _install_definitions(self.client())
        self._core.create_namespace({"metadata": {"name": self.namespace}})

    def client(self) -> ApiClient:
        """A client of the kubeconfig's user."""
        return config.new_client_from_config(self._kubeconfig)

    def operator_client(self) -> ApiClient:
        """The client of operators."""
        return self.client()

    def token_for(self, service_account: str, rules: Sequence[Rule]) -> str:
        """A token of a service account in the namespace, with a Role of these rules."""
        about = {"metadata": {"name": service_account}}
        self._core.create_namespaced_service_account(self.namespace, about)
        self._rbac.create_namespaced_role(
            self.namespace, {**about, "rules": [dict(rule) for rule in rules if rule["verbs"]]}
        )
        reference = {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": service_account,
        }
        subjects = [{"kind": "ServiceAccount", "name": service_account}]
        binding = {**about, "roleRef": reference, "subjects": subjects}
        self._rbac.create_namespaced_role_binding(self.namespace, binding)
        request = {"spec": {"audiences": [], "expirationSeconds": _TOKEN_S}}
        answer = self._core.create_namespaced_service_account_token(
            service_account, self.namespace, request
        )
        return str(answer.status.token)

    def kubeconfig(self, path: Path, token: str | None = None) -> str:
        """Write a kubeconfig like the given one, with the namespace and perhaps a token."""
        said = yaml.safe_load(Path(self._kubeconfig).read_text(encoding="utf-8"))
        for context in said["contexts"]:
            context["context"]["namespace"] = self.namespace
        if token is not None:
            for user in said["users"]:
                user["user"] = {"token": token}
        path.write_text(yaml.safe_dump(said), encoding="utf-8")
        return str(path)

    def remove(self) -> None:
        """Delete the namespace and all that is in it."""
        with suppress(client.ApiException):
            self._core.delete_namespace(self.namespace)

    def has_operator(self) -> bool:
        """Whether KubeRay runs there."""
        found = client.AppsV1Api(self.client()).list_deployment_for_all_namespaces(
            label_selector="app.kubernetes.io/name=kuberay-operator"
        )
        return bool(found.items)


KubeCluster = InProcessCluster | RealCluster


def _install_definitions(api: client.ApiClient) -> None:
    """Make KubeRay's CustomResourceDefinitions where they are missing, and wait for them."""
    definitions: Any = client.ApiextensionsV1Api(api)
    for definition in read_definitions():
        try:
            definitions.create_custom_resource_definition(definition, _preload_content=False)
        except client.ApiException as error:
            if error.status != _CONFLICT:
                raise
    for definition in read_definitions():
        name = definition["metadata"]["name"]
        wait_for(partial(_is_established, definitions, name), f"{name} to be established")


def _is_established(definitions: Any, name: str) -> bool:
    conditions = definitions.read_custom_resource_definition(name).status.conditions or []
    return any(each.type == "Established" and each.status == "True" for each in conditions)


# ---- fixtures; tests/integration/conftest.py makes them known


@pytest.fixture(scope="session")
def kube_api_server() -> Iterator[KubeApiServer]:
    """One API server of ours for the session; each test has a namespace of its own in it."""
    with KubeApiServer() as server:
        yield server


@pytest.fixture
def kube(request: pytest.FixtureRequest) -> Iterator[KubeCluster]:
    """A namespace in the cluster of SHARDLOOM_TEST_KUBECONFIG if set, else in our API server."""
    if path := os.environ.get("SHARDLOOM_TEST_KUBECONFIG"):
        cluster = RealCluster(path)
    else:
        cluster = InProcessCluster(request.getfixturevalue("kube_api_server"))
    yield cluster
    cluster.remove()
