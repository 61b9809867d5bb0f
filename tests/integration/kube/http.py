"""HTTP of the API server: one request at a time per connection, watches as chunked streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.integration.kube import auth, lists, metadata, patch
from tests.integration.kube.catalog import Route
from tests.integration.kube.errors import ApiError, bad_request, no_such_path, too_large
from tests.integration.kube.faults import Fault
from tests.integration.kube.resources import CRD
from tests.integration.kube.rest import Options, Target, deletion_of

if TYPE_CHECKING:
    from tests.integration.kube.api_server import KubeApiServer

_MOST_BODY_BYTES = 3 * 1024 * 1024
_DEFAULT_WATCH_S = 1800.0


class Listener(ThreadingHTTPServer):
    """Threads end with the process; the port is taken again after `away`."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up; nobody needs a traceback for that."""


def _number(text: str) -> int | float:
    """As Go reads numbers: 1.0 is an integer."""
    value = float(text)
    return int(value) if value.is_integer() else value


class _HangUp(Exception):
    """The answer is lost on purpose."""


def handler_for(server: KubeApiServer) -> type[BaseHTTPRequestHandler]:
    """A handler class of its own for each server."""
    return type("Handler", (_Handler,), {"kube": server})


class _Handler(BaseHTTPRequestHandler):
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
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
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

    def _answer_request(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self._body()
        user = self.kube.tokens.user_of(self.headers.get("Authorization"))
        is_noted = user.name != auth.OPERATOR
        if is_noted:
            self.kube.requests.append(f"{self.command} {self.path}")
        document = self.kube.catalog.document(parts.path) if self.command == "GET" else None
        if document is not None:
            self._befall("get", parts.path, is_noted)
            self._send(200, document)
            return
        route = self.kube.catalog.route(self.command, parts.path, query)
        loses_answer = self._befall(route.verb, parts.path, is_noted)
        self._authorize(user, route)
        if not route.target.resource.kind:
            raise no_such_path()
        if route.verb == "watch":
            self._stream(route, query)
            return
        code, answer, warnings = self._do(route, query, body)
        if loses_answer:
            raise _HangUp
        self._send(code, answer, warnings)

    def _befall(self, verb: str, path: str, is_noted: bool) -> bool:
        """Let faults happen; says whether the answer is to be lost."""
        met: list[Fault] = self.kube.faults.take(verb, path) if is_noted else []
        for fault in met:
            time.sleep(fault.delay_s)
            if fault.error is not None:
                raise fault.error
        return any(fault.loses_answer for fault in met)

    def _authorize(self, user: auth.User, route: Route) -> None:
        target = route.target
        access = auth.Access(
            route.verb, target.resource, target.subresource, target.namespace, target.name
        )
        if not auth.allows(user, access):
            raise auth.refusal(user, access)

    def _do(self, route: Route, query: dict[str, str], body: Any) -> tuple[int, Any, list[str]]:
        rest, target = self.kube.rest, route.target
        options = Options(query.get("fieldValidation") or "Warn", query.get("dryRun") == "All")
        if target.resource is CRD and route.verb not in ("get", "list"):
            return 200, self._change_definition(route, body), []
        if route.verb == "get":
            return 200, self._get(target), []
        if route.verb == "list":
            wanted = lists.selection(target.resource, target.namespace, query)
            return 200, lists.listed(self.kube.store, wanted, query), []
        if route.verb == "create":
            metadata.check_type(body, target.resource)
            for mutate in self.kube.mutators:
                body = mutate(body)
            return 201, rest.create(target, body, options), options.warnings
        if route.verb == "update":
            return 200, rest.update(target, body, options), options.warnings
        if route.verb == "patch":
            media_type = (self.headers.get("Content-Type") or "").split(";")[0].strip()
            custom = target.resource.custom

            def change(manifest: dict[str, Any]) -> Any:
                return patch.patched(manifest, body, media_type, custom=custom)

            return 200, rest.patch(target, change, options), options.warnings
        if route.verb == "delete":
            return 200, rest.delete(target, deletion_of(body, query), options.dry_run), []
        return 200, self._delete_collection(target, query, body), []

    def _get(self, target: Target) -> Any:
        manifest = self.kube.rest.get(target)
        if target.subresource == "log":
            return self.kube.pod_logs.get((target.namespace, target.name), "")
        return manifest

    def _change_definition(self, route: Route, body: Any) -> Any:
        if route.verb == "create":
            self.kube.add_definition(body)
            return self.kube.get(CRD.qualified, "", body["metadata"]["name"])
        if route.verb == "delete":
            gone = self.kube.rest.get(route.target)
            self.kube.remove_definition(route.target.name)
            return gone
        raise no_such_path()

    def _delete_collection(self, target: Target, query: dict[str, str], body: Any) -> Any:
        wanted = lists.selection(target.resource, target.namespace, query)
        found = lists.listed(self.kube.store, wanted, query)
        for each in found["items"]:
            about = each["metadata"]
            one = Target(target.resource, about.get("namespace", ""), about["name"])
            self.kube.rest.delete(one, deletion_of(body, query))
        return found

    def _stream(self, route: Route, query: dict[str, str]) -> None:
        wanted = lists.selection(route.target.resource, route.target.namespace, query)
        dropped = self.kube.faults.watch_lease()
        timeout_s = float(query.get("timeoutSeconds") or _DEFAULT_WATCH_S)
        pace = lists.Pace(timeout_s, self.kube.bookmark_every_s, dropped)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self._send_chunks(lists.watched(self.kube.store, wanted, query, pace))
        if dropped.is_set():
            raise _HangUp
        self.wfile.write(b"0\r\n\r\n")

    def _send_chunks(self, events: Iterator[dict[str, Any]]) -> None:
        for event in events:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()

    def _body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MOST_BODY_BYTES:
            self.close_connection = True
            raise too_large(_MOST_BODY_BYTES)
        raw = self.rfile.read(length)
        if not raw:
            return None
        try:
            if "yaml" in (self.headers.get("Content-Type") or ""):
                return yaml.safe_load(raw)
            return json.loads(raw, parse_float=_number)
        except (ValueError, yaml.YAMLError) as error:
            raise bad_request(f"couldn't parse the body of the request: {error}") from error

    def _send_error(self, error: ApiError) -> None:
        headers = {}
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(error.retry_after_s)
        is_path = error.code == 404 and not error.details
        self._send(
            error.code, "404 page not found\n" if is_path else error.status(), headers=headers
        )

    def _send(
        self,
        code: int,
        answer: Any,
        warnings: list[str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        is_text = isinstance(answer, str)
        payload = answer.encode() if is_text else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        for text in warnings or ():
            quoted = text.replace('"', '\\"')
            self.send_header("Warning", f'299 - "{quoted}"')
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)
