"""Request ids, metrics, security headers, trusted hosts, body limit, idempotency keys.

Measures every request, and gives what is logged meanwhile its ids. Pure ASGI: streams pass.

`POST /v1/jobs` and `:clone` keep their keys with the jobs that they made; what drivers post is
numbered. Everything else goes through here. Only what succeeded is kept, for a day and for whoever
asked: what was refused changed nothing, and may be asked again with the same key.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import answer_error
from service.auth.crypto import MasterKeys
from service.db.idempotency import IdempotencyStore, StoredResponse
from service.domain.auth import Principal
from service.errors import (
    BehindProxy,
    BodyTooLarge,
    ForeignHost,
    IdempotencyConflict,
    InvalidRequest,
    RequestInProgress,
    ServiceError,
)
from service.network import is_loopback
from service.observability.logging_setup import about
from service.observability.metrics import ServiceMetrics
from service.settings import Settings
from trainer.spec.base import FieldProblem

access_log = logging.getLogger("service.access")
_NOT_FOUND = "(no route)"
_JOB = re.compile(r"/v1/jobs/(job-[0-9a-z]{12})\b")
_ATTEMPT = re.compile(r"/v1/attempts/((job-[0-9a-z]{12})-a\d{1,6})\b")


class RequestMetricsMiddleware:
    """Counts answers by route, method and status, and the time until each began."""

    def __init__(self, app: ASGIApp, telemetry: ServiceMetrics) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def _note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note_answer(scope, message["status"], time.perf_counter() - began)
            await send(message)

        with about(**ids_in(scope["path"])):
            await self._app(scope, receive, _note)

    def _note_answer(self, scope: Scope, status: int, duration_s: float) -> None:
        # The template, not the path: one series for all jobs.
        route = getattr(scope.get("route"), "path", None) or _NOT_FOUND
        self._telemetry.answered(scope["method"], route, status, duration_s)
        level = logging.WARNING if status >= 500 else logging.DEBUG
        access_log.log(
            level, "%s %s -> %d in %.1f ms", scope["method"], route, status, duration_s * 1e3
        )


def ids_in(path: str) -> dict[str, str]:
    """The job and attempt that a path names by their ids."""
    if match := _ATTEMPT.match(path):
        return {"attempt_id": match[1], "job_id": match[2]}
    if match := _JOB.match(path):
        return {"job_id": match[1]}
    return {}


# Ids of requests: what a client may choose, and what we choose for it.

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")


def request_id_from(header: str | None) -> str:
    """The id that a client chose, if it is fit for a log, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return f"req-{secrets.token_hex(8)}"


# Which hosts and sites a request may come through, and where the service may listen. Pure.

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_known_host(header: str, settings: Settings) -> bool:
    """Whether we answer for a Host header.

    In local mode a name that somebody's DNS may point at this machine is refused, or a web page
    could talk to us through its reader's browser.
    """
    name = host_name(header)
    if name in settings.allowed_hosts:
        return True
    if settings.auth == "required":
        return not settings.allowed_hosts
    return is_loopback(name)


def is_foreign(
    origin: str | None, fetch_site: str | None, host: str, allowed_origins: Collection[str]
) -> bool:
    """Whether a browser says that a request was made by a page of another site.

    `origin`, `fetch_site` and `host` are the headers Origin, Sec-Fetch-Site and Host. Programs
    send neither of the first two.
    """
    if origin is not None and origin in allowed_origins:
        return False
    if origin is not None:
        return origin == "null" or _place_of(origin) != host.lower()
    return fetch_site in ("cross-site", "same-site")


def _place_of(origin: str) -> str | None:
    """Host and port of an Origin header; None if it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


# Around every request: its id, safe headers, known hosts, bodies of bearable size. Pure ASGI.

logger = logging.getLogger(__name__)
_API_CSP = "default-src 'none'; frame-ancestors 'none'"
# Vue compiles the pages' templates in the browser, hence 'unsafe-eval', and NiceGUI writes
# its start-up script and styles into the page. Nothing comes from, or goes to, another host.
_PAGE_CSP = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_LOGIN_CSP = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
# FastAPI's pages of documentation come from its usual CDN.
_DOCS_CSP = (
    "default-src 'none'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "style-src 'unsafe-inline' https://cdn.jsdelivr.net; "
    "img-src data: https://fastapi.tiangolo.com; connect-src 'self'; frame-ancestors 'none'"
)
# uvicorn reads the first, and leaves both where they are.
_PROXY_HEADERS = ("x-forwarded-for", "forwarded")
_HSTS = "max-age=31536000"
# Whoever looks after a service's health calls it by whatever address it has, and learns nothing.
_PROBES = frozenset({"/healthz", "/readyz"})


async def refuse(error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with the problem of an error."""
    await answer_error(Request(scope), error)(scope, receive, send)


class RequestIdMiddleware:
    """Gives each request an id, which the answer, the problem and the log lines carry."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request under its id."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(Headers(scope=scope).get("x-request-id"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with about(request_id=request_id):
            await self._app(scope, receive, send_with_id)


class SecurityHeadersMiddleware:
    """Adds what tells browsers to be careful to every answer that does not say otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request with safe headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in safe_headers(scope["path"], scope["scheme"]).items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_safely)


def safe_headers(path: str, scheme: str) -> dict[str, str]:
    """Headers of every answer to a request for `path`."""
    headers = {
        "Content-Security-Policy": _csp_of(path),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    }
    if path.startswith("/v1/"):
        headers["Cache-Control"] = "no-store"
    if scheme == "https":
        headers["Strict-Transport-Security"] = _HSTS
    return headers


def _csp_of(path: str) -> str:
    if path.startswith("/dashboard"):
        return _PAGE_CSP
    if path in ("/login", "/logout"):
        return _LOGIN_CSP
    return _DOCS_CSP if path in ("/docs", "/redoc") else _API_CSP


class TrustedHostMiddleware:
    """Answers only for hosts that are ours: no web page reaches us by a name of its own.

    In local mode it answers no proxy either, which may let in anybody.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for a host of ours, refuse others."""
        if scope["type"] == "lifespan" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        error = self._fault_of(Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refuse(error, scope, receive, send)

    def _fault_of(self, headers: Headers) -> ServiceError | None:
        host = headers.get("host", "")
        if not is_known_host(host, self._settings):
            return ForeignHost(host)
        is_passed_on = any(name in headers for name in _PROXY_HEADERS)
        return BehindProxy() if is_passed_on and self._settings.auth == "local" else None


class BodyLimitMiddleware:
    """Refuses bodies above `limit_bytes`, whether or not they say their length before."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request unless its body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > self._limit_bytes:
            await refuse(BodyTooLarge(self._limit_bytes), scope, receive, send)
            return
        await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, is_answered, is_refused = 0, False, False

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit_bytes:
                raise BodyTooLarge(self._limit_bytes)
            return message

        async def send_unless_refused(message: Message) -> None:
            nonlocal is_answered, is_refused
            # The framework makes something else of an error while it reads a body.
            if num_bytes > self._limit_bytes and not is_answered:
                if not is_refused:
                    is_refused = True
                    await refuse(BodyTooLarge(self._limit_bytes), scope, receive, send)
                return
            is_answered = True
            await send(message)

        await self._app(scope, receive_counted, send_unless_refused)


# Idempotency-Key on every POST: a request that is repeated with its key gets the first answer.

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
_MAX_ASKER_CHARS = 255
# Said anew by each answer, or wrong for a body that was kept.
_NOT_KEPT = frozenset({"content-encoding", "content-length", "date", "x-request-id", "set-cookie"})


def takes_key_here(method: str, path: str) -> bool:
    """Whether this is what keeps the keys of a route."""
    is_elsewhere = path == "/v1/jobs" or path.endswith(":clone") or path.startswith("/v1/attempts/")
    return method == "POST" and path.startswith("/v1/") and not is_elsewhere


class IdempotencyMiddleware:
    """Answers repeats; `clock` gives Unix seconds. Its requests have a principal already."""

    def __init__(
        self,
        app: ASGIApp,
        store: IdempotencyStore,
        master: MasterKeys,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._app = app
        self._store = store
        self._master = master
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if key is None or not takes_key_here(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            _check_key(key)
            await self._serve(scope, receive, send, key)
        except ServiceError as error:
            await refuse(error, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, key: str) -> None:
        principal: Principal = scope["state"]["principal"]
        asker = caller_key(principal)
        body = await _read(receive)
        request_hash = _hash_of(scope, body)
        known = await run_in_threadpool(self._store.begin, asker, key, request_hash, self._clock())
        if known is not None:
            await self._repeat(known, request_hash, key, send)
            return
        answer = _Collected()
        try:
            await self._app(scope, _replayed(body, receive), answer)
        finally:
            await run_in_threadpool(self._keep, asker, key, request_hash, answer)
        for message in answer.messages:
            await send(message)

    async def _repeat(self, known: StoredResponse, request_hash: str, key: str, send: Send) -> None:
        if known.request_hash != request_hash:
            raise IdempotencyConflict(key)
        if known.status is None:
            raise RequestInProgress(key)
        headers = [(name.encode(), value.encode()) for name, value in known.headers]
        headers.append((b"idempotent-replayed", b"true"))
        body = self._master.open(known.sealed_body).encode() if known.sealed_body else b""
        start = {"type": "http.response.start", "status": known.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    def _keep(self, asker: str, key: str, request_hash: str, answer: _Collected) -> None:
        if not 200 <= answer.status < 300:
            self._store.forget(asker, key)
            return
        sealed = self._master.seal(answer.body.decode()) if answer.body else ""
        self._store.finish(
            asker, key, StoredResponse(request_hash, answer.status, answer.headers, sealed)
        )


def caller_key(principal: Principal) -> str:
    """Whose keys a principal's are: at most 255 characters, which the database has room for."""
    # Names need not be unique.
    asker = f"{principal.kind}:{principal.credential_id or principal.name}"
    is_short = len(asker) <= _MAX_ASKER_CHARS and asker.isprintable()
    digest = hashlib.sha256(asker.encode(errors="backslashreplace")).hexdigest()
    return asker if is_short else f"{principal.kind}:sha256:{digest}"


class _Collected:
    """An answer that is held back until it is kept."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        """0 if the app raised instead of answering."""
        return next((m["status"] for m in self.messages if "status" in m), 0)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        raw: list[tuple[bytes, bytes]] = next(
            (m["headers"] for m in self.messages if "headers" in m), []
        )
        pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw]
        return tuple(pair for pair in pairs if pair[0] not in _NOT_KEPT)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def _check_key(key: str) -> None:
    if not (1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        message = f"has 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest([FieldProblem(path="Idempotency-Key", code="key", message=message)])


async def _read(receive: Receive) -> bytes:
    """The whole body; how long it may be was judged before."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


def _hash_of(scope: Scope, body: bytes) -> str:
    parts = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    return hashlib.sha256(b"\n".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
