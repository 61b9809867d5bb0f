"""Around every request: its id, safe headers, known hosts, bodies of bearable size. Pure ASGI."""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import answer_error
from service.errors import ServiceError
from service.request_context import about
from service.request_ids import request_id_from
from service.security.errors import BehindProxy, BodyTooLarge, ForeignHost
from service.security.hosts import is_known_host
from service.settings import Settings

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


class RequestIds:
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


class SafeHeaders:
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


class KnownHosts:
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


class BodyLimit:
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
