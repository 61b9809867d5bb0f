"""Pure ASGI middleware, in the order in which requests pass it (see `service.app`).

Request ids, metrics and security headers, trusted hosts, body limit, idempotency keys;
authentication is in `service.api.authentication`. Streamed responses pass through without being
buffered, except for requests with an idempotency key, whose response is stored before it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Row
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.api.errors import answer_error
from service.auth.crypto import MasterKeys
from service.auth.permissions import CLAIM_PATH, RULES
from service.auth.permissions import Scope as RuleScope
from service.db.idempotency import IdempotencyStore
from service.domain.auth import Principal
from service.network import is_loopback
from service.observability.logging_setup import about
from service.observability.metrics import ServiceMetrics
from service.settings import Settings
from trainer.protocol.events import MAX_RECORD_BYTES
from trainer.spec.base import FieldProblem

logger = logging.getLogger("service.access")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
_MAX_CALLER_CHARS = 255
# Set anew for each response, or wrong for a stored body.
_NOT_STORED = frozenset(
    {"content-encoding", "content-length", "date", "x-request-id", "set-cookie"}
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")
# A batch of records with the largest of them.
_MAX_DOCUMENT_BYTES = 2 * MAX_RECORD_BYTES
# A key or a code with which somebody comes in: of strangers no more is kept, and not for long.
_MAX_PUBLIC_BYTES = 16 << 10
_PUBLIC_BODY_S = 10.0
_JOB = re.compile(r"/v1/jobs/(job-[0-9a-z]{12})\b")
_ATTEMPT = re.compile(r"/v1/attempts/((job-[0-9a-z]{12})-a\d{1,6})\b")
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
# FastAPI writes the start-up script of Swagger UI into the page.
_DOCS_CSP = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
# uvicorn reads the first, and leaves both in place.
_PROXY_HEADERS = ("x-forwarded-for", "forwarded")
# Health probes may use any address of the service, and learn nothing.
READY_PATH = "/readyz"
_PROBES = frozenset({"/healthz", READY_PATH})
# In the state of a probe that would be refused if it asked for anything else.
UNTRUSTED = "untrusted"


async def refuse(error: errors.ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
    await answer_error(Request(scope), error)(scope, receive, send)


class RequestLogMiddleware:
    """Gives each request an id and safe headers, and counts responses by route, method, status and
    time to begin.

    The answer and the problem carry the id; what is logged meanwhile carries it as well, with the
    ids of the job and attempt that the path names.
    """

    def __init__(self, app: ASGIApp, telemetry: ServiceMetrics) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        chosen = Headers(scope=scope).get("x-request-id", "")
        request_id = chosen if _REQUEST_ID.fullmatch(chosen) else f"req-{secrets.token_hex(8)}"
        began = time.perf_counter()

        async def send_measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in safe_headers(scope["path"], scope["scheme"]).items():
                    headers.setdefault(name, value)
                duration_s, status = time.perf_counter() - began, message["status"]
                # The template, not the path: one series for all jobs.
                unknown = "(no route)" if "router" in scope else "(before routing)"
                route = getattr(scope.get("route"), "path", None) or unknown
                self._telemetry.answered(scope["method"], route, status, duration_s)
                level = logging.WARNING if status >= 500 else logging.DEBUG
                text = "%s %s -> %d in %.1f ms"
                logger.log(level, text, scope["method"], route, status, duration_s * 1e3)
            await send(message)

        with about(request_id=request_id, **ids_in(scope["path"])):
            await self._app(scope, receive, send_measured)


def ids_in(path: str) -> dict[str, str]:
    """The job and attempt that a path names by their ids."""
    if match := _ATTEMPT.match(path):
        return {"attempt_id": match[1], "job_id": match[2]}
    if match := _JOB.match(path):
        return {"job_id": match[1]}
    return {}


def safe_headers(path: str, scheme: str) -> dict[str, str]:
    """Security headers of every response to a request for `path` that does not set them itself."""
    if path.startswith("/dashboard"):
        policy = _PAGE_CSP
    elif path in ("/login", "/logout"):
        policy = _LOGIN_CSP
    else:
        policy = _DOCS_CSP if path == "/docs" else _API_CSP
    headers = {
        "Content-Security-Policy": policy,
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
        headers["Strict-Transport-Security"] = "max-age=31536000"
    return headers


class TrustedHostMiddleware:
    """Serves only requests for our own host names, against DNS rebinding.

    Without `auth=required` it refuses proxied requests as well: a proxy may let in anybody.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None if scope["type"] == "lifespan" else self._refusal(scope)
        is_probe = error is not None and scope["path"] in _PROBES
        if is_probe:
            scope.setdefault("state", {})[UNTRUSTED] = True
        if error is None or is_probe:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refuse(error, scope, receive, send)

    def _refusal(self, scope: Scope) -> errors.ServiceError | None:
        """Why a request with these headers is not served, unless it is a probe."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        has_key = headers.get("authorization", "").lower().startswith("bearer ")
        if not self._is_trusted(host, has_key or scope["path"] == CLAIM_PATH):
            return errors.ForeignHost(host)
        is_proxied = any(name in headers for name in _PROXY_HEADERS)
        return errors.BehindProxy() if is_proxied and self._settings.auth != "required" else None

    def _is_trusted(self, host: str, has_key: bool) -> bool:
        """Whether a Host header names us.

        If auth is `required`, any does where there is no list, or with a key or a driver's claim:
        drivers and Prometheus have names of their own for us, and no browser sends these by itself.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        known = self._settings.allowed_hosts
        is_any = self._settings.auth == "required" and (not known or has_key)
        return is_any or is_loopback(name) or name in map(str.lower, known)


def is_foreign(
    origin: str | None, fetch_site: str | None, host: str, allowed_origins: Collection[str]
) -> bool:
    """Whether a browser says that a request was made by a page of another site.

    `origin`, `fetch_site` and `host` are the headers Origin, Sec-Fetch-Site and Host. Programs
    send neither of the first two.
    """
    if origin is None:
        return fetch_site in ("cross-site", "same-site")
    if origin in allowed_origins:
        return False
    try:
        return origin == "null" or urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:
        return True


def is_public(scope: Scope) -> bool:
    """Whether a request needs no credentials."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    rule = RULES.get((method, scope["path"]))
    return rule is not None and rule.scope is RuleScope.PUBLIC


class _Body:
    """A request's body: at most `limit_bytes`, and whole within `limit_s`, if any."""

    def __init__(self, receive: Receive, limit_bytes: int, limit_s: float | None) -> None:
        self._receive = receive
        self._limit_bytes, self._limit_s = limit_bytes, limit_s
        self._deadline = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        self._num_bytes = 0

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise errors.BodyTooSlow(self._limit_s) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limit_bytes:
            raise errors.BodyTooLarge(self._limit_bytes)
        if not message.get("more_body"):
            self._deadline = None
        return message


class BodyLimitMiddleware:
    """Refuses bodies above `limit_bytes`, with or without a Content-Length.

    Only archives of code may be that large: documents are parsed in the event loop, where all wait.
    Those of public routes are small, and come soon: anybody may send one.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit_bytes, limit_s = self._limit_bytes, None
        if is_public(scope):
            limit_bytes, limit_s = min(limit_bytes, _MAX_PUBLIC_BYTES), _PUBLIC_BODY_S
        elif scope["path"] != "/v1/code":
            limit_bytes = min(limit_bytes, _MAX_DOCUMENT_BYTES)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit_bytes:
            await refuse(errors.BodyTooLarge(limit_bytes), scope, receive, send)
            return
        await self._app(scope, _Body(receive, limit_bytes, limit_s).receive, send)


def takes_key_here(method: str, path: str) -> bool:
    """Whether `IdempotencyMiddleware` handles the keys of a route.

    `POST /v1/jobs` and `:clone` store their keys with the jobs, in one transaction: a service that
    is killed in between makes none twice. Drivers number their events.
    """
    is_elsewhere = path == "/v1/jobs" or path.endswith(":clone") or path.startswith("/v1/attempts")
    return method == "POST" and path.startswith("/v1/") and not is_elsewhere


@dataclass
class IdempotencyMiddleware:
    """Answers a request that repeats an idempotency key with the stored first response.

    Only successful responses are stored, encrypted, by caller and key. Runs behind authentication.
    """

    app: ASGIApp
    store: IdempotencyStore
    master: MasterKeys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if key is None or not takes_key_here(scope["method"], scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            if not (1 <= len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
                message = f"has 1 to {MAX_KEY_CHARS} printable ASCII characters"
                raise errors.InvalidRequest([FieldProblem("Idempotency-Key", "key", message)])
            await self._serve(scope, receive, send, key)
        except errors.ServiceError as error:
            await refuse(error, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, key: str) -> None:
        caller = caller_key(scope["state"]["principal"])
        body = await Request(scope, receive).body()
        hashed = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
        digests = b"\n".join(hashlib.sha256(part).digest() for part in hashed)
        request_hash = hashlib.sha256(digests).hexdigest()
        known = await run_in_threadpool(self.store.begin, caller, key, request_hash, time.time())
        if known is not None:
            await self._replay(known, request_hash, key)(scope, receive, send)
            return
        messages: list[Message] = []
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        async def collect(message: Message) -> None:
            messages.append(message)

        try:
            await self.app(scope, receive_again, collect)
        finally:
            await run_in_threadpool(self._store_response, caller, key, messages)
        for message in messages:
            await send(message)

    def _replay(self, known: Row[Any], request_hash: str, key: str) -> Response:
        if known.request_hash != request_hash:
            raise errors.IdempotencyConflict(key)
        if known.status is None:
            raise errors.RequestInProgress(key)
        body = self.master.decrypt(known.sealed_body) if known.sealed_body else ""
        return Response(body, known.status, {**dict(known.headers), "Idempotent-Replayed": "true"})

    def _store_response(self, caller: str, key: str, messages: Sequence[Message]) -> None:
        """Store a response; forget the key of one that failed, so that it may be tried again."""
        status = 0
        raw: list[tuple[bytes, bytes]] = []
        if messages:
            status, raw = messages[0]["status"], messages[0]["headers"]
        if not 200 <= status < 300:
            self.store.forget(caller, key)
            return
        pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw)
        headers = [pair for pair in pairs if pair[0] not in _NOT_STORED]
        body = b"".join(message.get("body", b"") for message in messages)
        sealed = self.master.encrypt(body.decode()) if body else ""
        self.store.finish(caller, key, status, headers, sealed)


def caller_key(principal: Principal) -> str:
    """Whose keys and rates a principal's are: at most 255 characters, as the database takes."""
    # Names need not be unique.
    caller = f"{principal.kind}:{principal.credential_id or principal.name}"
    if len(caller) <= _MAX_CALLER_CHARS and caller.isprintable():
        return caller
    digest = hashlib.sha256(caller.encode(errors="backslashreplace")).hexdigest()
    return f"{principal.kind}:sha256:{digest}"
