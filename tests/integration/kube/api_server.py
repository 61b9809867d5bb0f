"""A Kubernetes API server in this process: plain REST that the official clients speak.

    with KubeApiServer() as server:
        kubernetes.config.load_kube_config(server.kubeconfig(tmp_path / "config"))

Enforced: schemas of built-in kinds and of the given CustomResourceDefinitions (unknown fields,
types, defaults, CEL rules), resource versions and conflicts, finalizers, owners, RBAC, quotas,
namespaces that end. Not there: managedFields and server-side apply, protobuf, tables, aggregation,
admission webhooks, PodSecurity, node and scheduler (a pod stays as it was written, without
defaults), OpenAPI documents.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from kubernetes.client import ApiClient, Configuration

from tests.integration.kube import http
from tests.integration.kube.auth import ADMIN_RULE, OPERATOR, Rule, Tokens, User
from tests.integration.kube.catalog import Catalog
from tests.integration.kube.faults import Faults
from tests.integration.kube.gc import GarbageCollector
from tests.integration.kube.resources import CRD, read_definitions
from tests.integration.kube.rest import Options, Rest, Target
from tests.integration.kube.store import Manifest, Store
from tests.integration.ports import free_port

CRD_FOLDER = Path(__file__).parents[4] / "shared" / "kuberay-crds"


class KubeApiServer:
    """The server, on a loopback port of its own while the context lasts.

    `crds` are the definitions to begin with: a folder of YAML files (KubeRay's by default), or
    none. `bookmark_every_s` is how often watches that want them get bookmarks.
    """

    def __init__(self, crds: Path | None = CRD_FOLDER, bookmark_every_s: float = 5.0) -> None:
        self.store = Store()
        self.rest = Rest(self.store)
        self.catalog = Catalog()
        self.tokens = Tokens()
        self.faults = Faults(away=self._go_away, back=self._come_back, wake=self._wake)
        self.bookmark_every_s = bookmark_every_s
        self.pod_logs: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        self.crashes: list[Exception] = []
        self.mutators: list[Callable[[Manifest], Manifest]] = []
        self.admin_token = self.tokens.issue(User("kubernetes-admin", None, (ADMIN_RULE,)))
        operator = User(OPERATOR, None, (ADMIN_RULE,))
        self._operator_token = self.tokens.issue(operator)
        self._collector = GarbageCollector(self.store, self.catalog.find)
        # None that an outgoing connection is given, while the server is away.
        self._port = free_port()
        self._listener: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        for name in ("default", "kube-system"):
            self.add_namespace(name)
        for definition in read_definitions(crds) if crds is not None else ():
            self.add_definition(definition)

    def __enter__(self) -> KubeApiServer:
        self._come_back()
        self._collector.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._go_away()
        self._collector.stop()
        if self.crashes and error is None:
            raise ExceptionGroup("requests that the API server failed on", self.crashes)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def kubeconfig(self, path: Path, token: str | None = None, namespace: str = "default") -> str:
        """Write a kubeconfig (of the administrator, or of a token) and return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token or self.admin_token}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "test", "namespace": namespace},
                }
            ],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(path)

    def token_for(
        self, service_account: str, rules: Sequence[Rule], namespace: str = "default"
    ) -> str:
        """A token of a service account whose Role in its namespace has these rules."""
        name = f"system:serviceaccount:{namespace}:{service_account}"
        return self.tokens.issue(User(name, namespace, tuple(rules)))

    def client(self, token: str | None = None) -> ApiClient:
        """A client of the official library: of the administrator, or of a token."""
        configuration = Configuration(host=self.url)
        configuration.api_key = {"authorization": f"Bearer {token or self.admin_token}"}
        return ApiClient(configuration)

    def operator_client(self) -> ApiClient:
        """A client that is not noted in `requests` and that no fault but `away` befalls."""
        return self.client(self._operator_token)

    def revoke(self, token: str) -> None:
        """Answer 401 to a token from now on."""
        self.tokens.revoke(token)

    def add_namespace(self, name: str) -> None:
        """Make a namespace."""
        resource = self.catalog.find("namespaces")
        assert resource is not None
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        with self.store.changed:
            self.rest.create(Target(resource), manifest, Options())
            self._collector.sweep()

    def add_definition(self, definition: Manifest) -> None:
        """Serve the kinds of a CustomResourceDefinition."""
        if "status" not in definition:
            definition = {**definition, "status": _established(definition)}
        name = definition["metadata"]["name"]
        about = {**definition["metadata"], "uid": f"crd-{name}", "generation": 1}
        self.catalog.define(definition)
        self.store.put((CRD.qualified, "", name), {**definition, "metadata": about})

    def remove_definition(self, name: str) -> None:
        """Take a definition like rayjobs.ray.io away, with all objects of its kind."""
        with self.store.changed:
            for key, _ in list(self.store.everything()):
                if key[0] == name or key == (CRD.qualified, "", name):
                    self.store.remove(key)
            self.catalog.forget(name)

    def compact(self) -> None:
        """Forget history: watches that go on from older versions get 410, and so do list pages."""
        self.store.compact()

    def get(self, qualified: str, namespace: str, name: str) -> Manifest | None:
        """An object as it is stored, for assertions without a client."""
        return self.store.get((qualified, namespace, name))

    def _go_away(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
            open_now = list(self._connections)
        if listener is None:
            return
        listener.shutdown()
        listener.server_close()
        for connection in open_now:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.faults.drop_watches()

    def _come_back(self) -> None:
        with self._lock:
            if self._listener is not None:
                return
            listener = http.Listener(("127.0.0.1", self._port), http.handler_for(self))
            self._listener = listener
        threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def _wake(self) -> None:
        with self.store.changed:
            self.store.changed.notify_all()

    def opened(self, connection: socket.socket) -> None:
        """Note a connection, so that it can be broken."""
        with self._lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._connections.discard(connection)


def _established(definition: Manifest) -> dict[str, Any]:
    names = json.loads(json.dumps(definition["spec"]["names"]))
    storage = [each["name"] for each in definition["spec"]["versions"] if each["storage"]]
    conditions = [
        {"type": "NamesAccepted", "status": "True", "reason": "NoConflicts", "message": ""},
        {"type": "Established", "status": "True", "reason": "InitialNamesAccepted", "message": ""},
    ]
    return {"acceptedNames": names, "storedVersions": storage, "conditions": conditions}
