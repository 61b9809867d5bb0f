"""The cluster that a suite runs against: the API server of ours, or that of KUBECONFIG.

Both give the same: a namespace, clients, service accounts with rules. What only ours can do
(faults, compaction) is under `server`, which is None on a real one.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import yaml
from kubernetes import client, config
from kubernetes.client import ApiClient

from tests.integration.kube.api_server import CRD_FOLDER, KubeApiServer
from tests.integration.kube.auth import Rule
from tests.integration.kube.operator import RayJobOperator
from tests.integration.kube.resources import read_definitions

_CONFLICT, _NOT_THERE = 409, 404
_TOKEN_S = 3600


class KubeCluster(Protocol):
    """What a test needs of a cluster."""

    namespace: str
    server: KubeApiServer | None

    def client(self, token: str | None = None) -> ApiClient:
        """A client of the administrator, or of a token."""

    def operator_client(self) -> ApiClient:
        """The client of operators."""

    def token_for(self, service_account: str, rules: Sequence[Rule]) -> str:
        """A token of a service account in the namespace, with a Role of these rules."""

    def kubeconfig(self, path: Path, token: str | None = None) -> str:
        """Write a kubeconfig and return its path."""


class InProcessCluster:
    """A namespace of its own in an API server of ours."""

    def __init__(self, server: KubeApiServer) -> None:
        self.server: KubeApiServer | None = server
        self._server = server
        self.namespace = f"shardloom-test-{secrets.token_hex(3)}"
        server.add_namespace(self.namespace)

    def client(self, token: str | None = None) -> ApiClient:
        """A client of the administrator, or of a token."""
        return self._server.client(token)

    def operator_client(self) -> ApiClient:
        """The client of operators."""
        return self._server.operator_client()

    def token_for(self, service_account: str, rules: Sequence[Rule]) -> str:
        """A token of a service account in the namespace, with a Role of these rules."""
        return self._server.token_for(service_account, rules, self.namespace)

    def kubeconfig(self, path: Path, token: str | None = None) -> str:
        """Write a kubeconfig and return its path."""
        return self._server.kubeconfig(path, token, self.namespace)


class RealCluster:
    """A namespace of its own in the cluster of a kubeconfig; KubeRay's definitions if missing."""

    def __init__(self, kubeconfig: str) -> None:
        self.server: KubeApiServer | None = None
        self._kubeconfig = kubeconfig
        self.namespace = f"shardloom-test-{secrets.token_hex(3)}"
        self._core = client.CoreV1Api(self.client())
        self._rbac = client.RbacAuthorizationV1Api(self.client())
        install_definitions(self.client())
        self._core.create_namespace({"metadata": {"name": self.namespace}})

    def client(self, token: str | None = None) -> ApiClient:
        """A client of the kubeconfig's user, or of a token."""
        configuration = client.Configuration()
        config.load_kube_config(self._kubeconfig, client_configuration=configuration)
        if token is not None:
            configuration.cert_file = configuration.key_file = None
            configuration.api_key = {"authorization": f"Bearer {token}"}
            configuration.refresh_api_key_hook = None
        return client.ApiClient(configuration)

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
        self._rbac.create_namespaced_role_binding(
            self.namespace,
            {
                **about,
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "Role",
                    "name": service_account,
                },
                "subjects": [{"kind": "ServiceAccount", "name": service_account}],
            },
        )
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


def install_definitions(api: client.ApiClient) -> None:
    """Make KubeRay's CustomResourceDefinitions where they are missing, and wait for them."""
    definitions: Any = client.ApiextensionsV1Api(api)
    for definition in read_definitions(CRD_FOLDER):
        try:
            definitions.create_custom_resource_definition(definition, _preload_content=False)
        except client.ApiException as error:
            if error.status != _CONFLICT:
                raise
    for definition in read_definitions(CRD_FOLDER):
        _wait_for_definition(definitions, definition["metadata"]["name"])


def _wait_for_definition(definitions: Any, name: str) -> None:
    for _ in range(100):
        found = definitions.read_custom_resource_definition(name)
        conditions = found.status.conditions or []
        if any(each.type == "Established" and each.status == "True" for each in conditions):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{name} is not established: look at the API server's log")


@contextmanager
def kube_cluster() -> Iterator[KubeCluster]:
    """The cluster of KUBECONFIG if that is set, else one in process."""
    with ExitStack() as stack:
        if os.environ.get("KUBECONFIG"):
            real = RealCluster(os.environ["KUBECONFIG"])
            stack.callback(real.remove)
            yield real
        else:
            yield InProcessCluster(stack.enter_context(KubeApiServer()))


@contextmanager
def operator_for(cluster: KubeCluster, **options: Any) -> Iterator[RayJobOperator | None]:
    """The stand-in for KubeRay; None where the real one runs."""
    if isinstance(cluster, RealCluster) and cluster.has_operator():
        yield None
        return
    with RayJobOperator(cluster, namespace=cluster.namespace, **options) as operator:
        yield operator
