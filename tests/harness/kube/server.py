"""A Kubernetes API server in this process: plain REST that the official clients speak.

    with KubeApiServer() as server:
        kubernetes.config.load_kube_config(server.kubeconfig(tmp_path / "config"))

What is enforced of objects, and what not, is in `objects`. Requests are authenticated by bearer
token and authorized by rules of roles; who shows none is `anonymous`. Server-side apply is that of
the only manager of all fields. Not there: pages, strategic merge patches (they are applied as merge
patches, which replace lists), protobuf, admission webhooks, PodSecurity, node and scheduler,
namespaces that end slowly, schemas in OpenAPI documents. A request that no client of ours makes is
a crash, which fails the test.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from kubernetes.client import ApiClient, Configuration

from tests.harness.kube import watch
from tests.harness.kube.objects import (
    BUILT_IN,
    LOG,
    ApiError,
    GarbageCollector,
    Resource,
    Store,
    Target,
    Verbs,
    discovery,
    forbidden,
    read_definitions,
    resources_of,
)
from tests.harness.wait import free_port

Rule = Mapping[str, Sequence[str]]

OPERATOR = "system:serviceaccount:kuberay-system:kuberay-operator"
VERSION = {"gitVersion": "v1.36.2+in-process"}
_ADMIN_RULE: Rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
_ON_ONE = {"GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_ON_MANY = {"GET": "list", "POST": "create"}
_DEFAULT_WATCH_S = 1800.0


@dataclass(frozen=True)
class User:
    """A caller; `rules` hold in `namespace`, or everywhere where that is None."""

    name: str
    namespace: str | None = None
    rules: tuple[Rule, ...] = ()

    def may(self, verb: str, target: Target) -> bool:
        """Whether one of the rules covers a request."""
        if self.namespace is not None and self.namespace != target.namespace:
            return False
        return any(_covers(rule, verb, target) for rule in self.rules)


ADMIN = User("kubernetes-admin", None, (_ADMIN_RULE,))


def _named(target: Target) -> str:
    """A resource as rules name it, like rayjobs/status."""
    plural = target.resource.plural
    return f"{plural}/{target.subresource}" if target.subresource else plural


def _covers(rule: Rule, verb: str, target: Target) -> bool:
    names = rule.get("resourceNames")
    return (
        _has(rule.get("verbs", ()), verb)
        and _has(rule.get("apiGroups", ()), target.resource.group)
        and _has(rule.get("resources", ()), _named(target))
        and (not names or target.name in names)
    )


def _has(values: Sequence[str], value: str) -> bool:
    return "*" in values or value in values


# ---- faults to inject: refusals, lost answers, watches that drop, an outage

_REASONS = {
    302: "Found",
    401: "Unauthorized",
    403: "Forbidden",
    408: "RequestTimeout",
    409: "Conflict",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass
class Fault:
    """What happens to the next `times` requests of a verb on a path that match.

    Without an error they are done, and their answers lost.
    """

    verb: str
    path: str
    times: int
    error: ApiError | None = None

    def meets(self, verb: str, path: str) -> bool:
        """Whether a request is one of those."""
        return self.verb in ("*", verb) and re.search(self.path, path) is not None


@dataclass
class Faults:
    """Faults that wait for a request. Verbs are those of Kubernetes (create, list, watch, ...).

    `away()` is an API server that is not there (connections are refused, open ones break),
    `back()` its return at the same address.
    """

    away: Callable[[], None]
    back: Callable[[], None]
    _waiting: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self,
        code: int,
        *,
        times: int = 1,
        verb: str = "*",
        path: str = "",
        message: str = "injected",
    ) -> None:
        """Answer the next matching requests with an HTTP error instead of doing them."""
        self._add(Fault(verb, path, times, ApiError(code, _REASONS[code], message)))

    def lose_answer(self, *, verb: str, path: str) -> None:
        """Do the next matching request, but hang up instead of answering."""
        self._add(Fault(verb, path, 1))

    def clear(self) -> None:
        """Inject nothing more; a server that is away comes back."""
        with self._lock:
            self._waiting.clear()
        self.back()

    def take(self, verb: str, path: str) -> list[Fault]:
        """Faults that befall a request; each is used up by one."""
        with self._lock:
            met = [fault for fault in self._waiting if fault.meets(verb, path)]
            for fault in met:
                fault.times -= 1
            self._waiting = [fault for fault in self._waiting if fault.times > 0]
            return met

    def _add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(fault)


# ---- the server


class KubeApiServer:
    """The server, on a loopback port of its own while the context lasts.

    `requests` are those of everybody but the operator.
    """

    def __init__(self) -> None:
        self.store = Store()
        self.verbs = Verbs(self.store)
        self.faults = Faults(away=self._go_away, back=self._come_back)
        # Set when watches that are open now are to break.
        self.dropped = threading.Event()
        self.requests: list[str] = []
        self.crashes: list[Exception] = []
        self.anonymous: User | None = None
        self.resources = list(BUILT_IN)
        self._users: dict[str, User] = {}
        self.admin_token = self._issue(ADMIN)
        self.operator_token = self._issue(User(OPERATOR, None, (_ADMIN_RULE,)))
        self._collector = GarbageCollector(self.verbs, self.find)
        # None that an outgoing connection is given, while the server is away.
        self._port = free_port()
        self._listener: ThreadingHTTPServer | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._serve_definitions()

    def __enter__(self) -> KubeApiServer:
        self._come_back()
        self._collector.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._go_away()
        self._collector.stop()
        self.raise_crashes()

    def raise_crashes(self) -> None:
        """Raise what requests failed on by a mistake of the server itself."""
        crashes, self.crashes = self.crashes, []
        if crashes:
            raise ExceptionGroup("requests that the API server failed on", crashes)

    def restore(self) -> None:
        """Forget faults and noted requests, and serve all definitions again."""
        self.faults.clear()
        self.requests.clear()
        self.anonymous = None
        self._serve_definitions()

    def _serve_definitions(self) -> None:
        for definition in read_definitions():
            if self.find(definition["metadata"]["name"]) is None:
                self.resources += resources_of(definition)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def kubeconfig(self, path: Path, token: str | None = None, namespace: str = "default") -> str:
        """Write a kubeconfig (of the administrator, or of a token) and return its path."""
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token or self.admin_token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(path)

    def token_for(self, service_account: str, rules: Sequence[Rule], namespace: str) -> str:
        """A token of a service account whose Role in its namespace has these rules."""
        name = f"system:serviceaccount:{namespace}:{service_account}"
        return self._issue(User(name, namespace, tuple(rules)))

    def _issue(self, user: User) -> str:
        token = secrets.token_urlsafe(24)
        self._users[token] = user
        return token

    def user_of(self, authorization: str | None) -> User:
        """The caller by the Authorization header; raises 401 for a stranger."""
        if authorization is None and self.anonymous is not None:
            return self.anonymous
        scheme, _, token = (authorization or "").partition(" ")
        user = self._users.get(token.strip())
        if scheme.lower() != "bearer" or user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def client(self, token: str | None = None) -> ApiClient:
        """A client of the official library: of the administrator, or of a token."""
        configuration = Configuration(host=self.url)
        configuration.api_key = {"authorization": f"Bearer {token or self.admin_token}"}
        return ApiClient(configuration)

    def add_namespace(self, name: str) -> None:
        """Make a namespace."""
        self.verbs.create(Target(self.find("namespaces")), {"metadata": {"name": name}})

    def remove_namespace(self, name: str) -> None:
        """Delete a namespace and all that is in it at once, whatever finalizers say."""
        with self.store.changed:
            for key in self.store.everything():
                if key[1] == name or key == ("namespaces", "", name):
                    self.store.remove(key)

    def remove_definition(self, name: str) -> None:
        """Take a definition like rayjobs.ray.io away, with all objects of its kind."""
        with self.store.changed:
            for key in self.store.everything():
                if key[0] == name:
                    self.store.remove(key)
            self.resources = [each for each in self.resources if each.qualified != name]

    def find(self, qualified: str) -> Resource | None:
        """A kind by its qualified name."""
        return next((each for each in self.resources if each.qualified == qualified), None)

    # ---- what a path says

    def route(self, method: str, path: str, query: Mapping[str, str]) -> tuple[str, Target]:
        """Verb and target of a request.

        A kind that is not served is told by a resource without a kind: who may not ask for it is
        not told that it is not served.
        """
        parts = [part for part in path.split("/") if part]
        root = 2 if parts[0] == "api" else 3
        where, rest, namespace = parts[:root], parts[root:], ""
        if rest[0] == "namespaces" and len(rest) >= 3:
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = [*rest, "", ""][:3]
        group = where[1] if root == 3 else ""
        found = [each for each in self.resources if (_root(each), each.plural) == (where, plural)]
        verb = (_ON_ONE if name else _ON_MANY)[method]
        if verb == "list" and query.get("watch") in ("1", "true", "True"):
            verb = "watch"
        resource = found[0] if found else Resource(group, where[-1], plural, kind="")
        return verb, Target(resource, namespace, name, subresource)

    # ---- being there

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
        self.dropped.set()
        self.dropped = threading.Event()
        with self.store.changed:
            self.store.changed.notify_all()

    def _come_back(self) -> None:
        with self._lock:
            if self._listener is not None:
                return
            handler = type("Handler", (_Handler,), {"kube": self})
            listener = _Listener(("127.0.0.1", self._port), handler)
            self._listener = listener
        threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def opened(self, connection: socket.socket) -> None:
        """Note a connection, so that it can be broken."""
        with self._lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._connections.discard(connection)


def _root(resource: Resource) -> list[str]:
    group = ["apis", resource.group] if resource.group else ["api"]
    return [*group, resource.version]


class _Listener(ThreadingHTTPServer):
    """Threads end with the process; the port is taken again after `away`."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up; nobody needs a traceback for that."""


class _HangUp(Exception):
    """The answer is lost on purpose."""


class _Handler(BaseHTTPRequestHandler):
    """One request at a time per connection, watches as chunked streams."""

    kube: KubeApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.kube.opened(self.connection)

    def finish(self) -> None:
        self.kube.closed(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in `KubeApiServer.requests` instead."""

    def do_GET(self) -> None:
        try:
            try:
                self._answer_request()
            except ApiError as error:
                self._send_error(error)
            except (_HangUp, OSError):
                raise
            except Exception as error:
                self.kube.crashes.append(error)
                self._send_error(ApiError(500, "InternalError", f"Internal error: {error!r}"))
        except (_HangUp, OSError):
            self.close_connection = True

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _answer_request(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self._body()
        user = self.kube.user_of(self.headers.get("Authorization"))
        is_noted = user.name != OPERATOR
        if is_noted:
            self.kube.requests.append(f"{self.command} {self.path}")
        if parts.path == "/version":
            self._befall("get", parts.path, is_noted)
            self._send(200, VERSION)
            return
        known = discovery(parts.path.rstrip("/"), self.kube.resources)
        if known is not None:
            self._send(200, known)
            return
        verb, target = self.kube.route(self.command, parts.path, query)
        loses_answer = self._befall(verb, parts.path, is_noted)
        if not user.may(verb, target):
            raise _refusal(user, verb, target)
        if not target.resource.kind:
            # Without details, so that it is answered in plain text.
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if verb == "watch":
            self._stream(target, query)
            return
        answer = self._do(verb, target, query, body)
        if loses_answer:
            raise _HangUp
        self._send(201 if verb == "create" else 200, answer)

    def _befall(self, verb: str, path: str, is_noted: bool) -> bool:
        """Let faults happen; says whether the answer is to be lost."""
        met = self.kube.faults.take(verb, path) if is_noted else []
        for fault in met:
            if fault.error is not None:
                raise fault.error
        return bool(met)

    def _do(self, verb: str, target: Target, query: Mapping[str, str], body: Any) -> Any:
        verbs = self.kube.verbs
        is_strict = query.get("fieldValidation") == "Strict"
        if verb == "get" and target.subresource == "log":
            return verbs.get(target)["metadata"]["annotations"][LOG]
        if verb == "get":
            return verbs.get(target)
        if verb == "list":
            wanted = watch.selection(target.resource, target.namespace, query)
            return watch.listed(self.kube.store, wanted)
        if verb == "create":
            return verbs.create(target, body, is_strict=is_strict)
        if verb == "update":
            return verbs.update(target, body, is_strict=is_strict)
        if verb == "patch" and "apply-patch" in self.headers.get("Content-Type", ""):
            return verbs.apply(target, body, is_strict=is_strict)
        if verb == "patch":
            return verbs.patch(target, body, is_strict=is_strict)
        options = body or {}
        is_foreground = options.get("propagationPolicy") == "Foreground"
        uid = (options.get("preconditions") or {}).get("uid")
        return verbs.delete(target, is_foreground=is_foreground, uid=uid)

    def _stream(self, target: Target, query: Mapping[str, str]) -> None:
        if "sendInitialEvents" in query:
            why = (
                "sendInitialEvents: Forbidden: is forbidden for watch without the WatchList feature"
            )
            raise ApiError(422, "Invalid", why)
        wanted = watch.selection(target.resource, target.namespace, query)
        dropped = self.kube.dropped
        timeout_s = float(query.get("timeoutSeconds") or _DEFAULT_WATCH_S)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for event in watch.watched(self.kube.store, wanted, query, timeout_s, dropped):
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        if dropped.is_set():
            raise _HangUp
        self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> Any:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(raw) if raw else None

    def _send_error(self, error: ApiError) -> None:
        is_path = error.code == 404 and not error.details
        self._send(error.code, "404 page not found\n" if is_path else error.status())

    def _send(self, code: int, answer: Any) -> None:
        is_text = isinstance(answer, str)
        payload = answer.encode() if is_text else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _refusal(user: User, verb: str, target: Target) -> ApiError:
    """403 in the words of RBAC."""
    where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
    why = (
        f'User "{user.name}" cannot {verb} resource "{_named(target)}" '
        f'in API group "{target.resource.group}" {where}'
    )
    return forbidden(target.resource, target.name, why)
