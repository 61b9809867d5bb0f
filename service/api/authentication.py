"""Authentication middleware: credentials, CSRF, rate limits, audit log.

Every route that is not public needs a principal; roles are checked later, where the route is known
(`service.api.deps`). Each caller has a token bucket and a limit of open requests. Credentials of
streams and websockets are checked again while these last. Every request that may change something
is written to the audit log, refused ones included.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from urllib.parse import quote

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.api.middleware import (
    READY_PATH,
    SAFE_METHODS,
    UNTRUSTED,
    caller_key,
    is_foreign,
    is_public,
    refuse,
)
from service.auth.authenticator import Credentials
from service.auth.permissions import CLAIM_PATH
from service.auth.security import Security
from service.domain.auth import LOCAL, AuditRecord, Principal
from service.observability.logging_setup import request_id
from service.settings import Settings
from trainer.spec.base import FieldProblem

logger = logging.getLogger(__name__)
SESSION_COOKIE = "shardloom-session"
CSRF_COOKIE = "shardloom-csrf"
CSRF_HEADER = "x-csrf-token"
LOGIN_PATH = "/login"
# With the longest silence of a stream, 15 s, it outlives its key by half a minute.
_RECHECK_S = 15.0
_MAX_BUCKETS = 10_000


class RateLimiter:
    """Token buckets: `per_s` requests per second of a caller in the long run, `burst` at once.

    The least recently used are dropped first. Use it in the event loop only.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        # How many requests are left, and at what time.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now: float) -> float:
        """Take one request; seconds to wait where it is refused, else 0."""
        left, at = self._buckets.pop(caller, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - at) * self._per_s)
        wait_s = 0.0 if left >= 1.0 else (1.0 - left) / self._per_s
        self._buckets[caller] = (left if wait_s else left - 1.0, now)
        if len(self._buckets) > _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait_s


class ConcurrencyLimiter:
    """Counts the open requests and streams of each caller. Use it in the event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def one_of(self, caller: str) -> Iterator[None]:
        """Hold one more open; raises `TooManyOpen` where the caller has `most` of them already."""
        if self._num_open[caller] >= self._most:
            raise errors.TooManyOpen(self._most)
        self._num_open[caller] += 1
        try:
            yield
        finally:
            self._num_open[caller] -= 1
            if not self._num_open[caller]:
                del self._num_open[caller]


_MAX_OBJECT_CHARS = 512
# What an editor asks for with every change, and of which nothing is left.
_DRY_RUNS = (("POST", "/v1/jobs", b"dry_run=true"), ("POST", "/v1/plans", b""))
_MAX_ACTOR_CHARS = 255
_CLOSED_FOR_POLICY = 1008


class AuthenticationMiddleware:
    """Admits or refuses each connection; `clock` gives seconds for rates and streams."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        security: Security,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._settings = settings
        self._security = security
        self.clock = clock
        self._principals = RateLimiter(settings.rate_limit_per_s, settings.rate_limit_burst)
        self._attempts = RateLimiter(
            settings.attempt_rate_limit_per_s, settings.attempt_rate_limit_burst
        )
        # Apart: a program with a wrong key keeps nobody behind its address from signing in.
        self._sign_ins = RateLimiter(per_s=0.5, burst=20)
        self._wrong_keys = RateLimiter(per_s=0.5, burst=20)
        # Programs that have lost their key go on asking; browsers are led to the form.
        self._unknown = RateLimiter(per_s=5.0, burst=100)
        self._noted_refusals = RateLimiter(per_s=0.01, burst=3)
        self._open = ConcurrencyLimiter(settings.max_open_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        response, connection = _Recorder(send), HTTPConnection(scope)
        with ExitStack() as held:
            held.callback(self._audit, scope, response)
            try:
                await self._admit(scope, connection)
                self._hold_open(scope, held)
            except errors.ServiceError as error:
                await self._refuse(error, scope, receive, response)
            else:
                await self._serve_admitted(scope, connection, receive, response)

    async def _serve_admitted(
        self, scope: Scope, connection: HTTPConnection, receive: Receive, response: _Recorder
    ) -> None:
        check = _CredentialsCheck(self, connection)

        async def send_while_admitted(message: Message) -> None:
            if message.get("more_body") and not await check.is_still_admitted():
                # Without an end, or a download would look whole.
                raise OSError("the credentials of a stream have ended")
            await response(message)

        try:
            await self._app(scope, receive, send_while_admitted)
        except ClientDisconnect:
            # Nobody waits for an answer, and a body that was cut off is never handled.
            response.status = HTTPStatus.BAD_REQUEST
        except OSError:
            if check.is_admitted:
                raise

    async def _admit(self, scope: Scope, connection: HTTPConnection) -> None:
        """Set the principal of a request; raises `ServiceError` where it may not come in."""
        state = scope.setdefault("state", {})
        if "\x00" in scope["path"] or b"%00" in scope["query_string"]:
            # No database keeps it, and none can be asked for it.
            raise errors.InvalidRequest([FieldProblem("url", "nul", "holds a NUL character")])
        is_open = is_public(scope)
        if is_open and scope["method"] in SAFE_METHODS:
            if scope["path"] == READY_PATH:
                state["principal"] = await self._known(connection)
            return
        if is_open:
            # All drivers of a cluster start at one address.
            limiter = self._attempts if scope["path"] == CLAIM_PATH else self._sign_ins
            self._limit(limiter, _remote(scope))
            principal = LOCAL if self._settings.auth == "none" else None
        else:
            principal = await self._signed_in(connection)
        state["principal"] = principal
        if scope["method"] not in SAFE_METHODS:
            self._check_origin(connection, principal)

    async def principal_of(self, connection: HTTPConnection) -> Principal:
        """The principal of a connection; raises `NotSignedIn`."""
        credentials = credentials_of(connection)
        authenticator = self._security.authenticator
        if authenticator.is_quick(credentials):
            return authenticator.principal_of(credentials)
        return await run_in_threadpool(authenticator.principal_of, credentials)

    async def _known(self, connection: HTTPConnection) -> Principal | None:
        """Who asks what is public but tells some more than others; a wrong key is no fault.

        A job's own code is not told more, and neither is who would get nothing else here.
        """
        if UNTRUSTED in connection.scope["state"]:
            return None
        is_stranger = credentials_of(connection) == Credentials()
        principal = None
        with suppress(errors.ServiceError):
            principal = await (self.principal_of if is_stranger else self._signed_in)(connection)
        return None if principal is None or principal.kind == "attempt" else principal

    async def _signed_in(self, connection: HTTPConnection) -> Principal:
        """The principal of a connection; raises `TooManyRequests`, also after many failures."""
        try:
            principal = await self.principal_of(connection)
        except errors.NotSignedIn:
            has_none = credentials_of(connection) == Credentials()
            limiter = self._unknown if has_none else self._wrong_keys
            self._limit(limiter, _remote(connection.scope))
            raise
        if principal.kind != "local":
            limiter = self._attempts if principal.kind == "attempt" else self._principals
            self._limit(limiter, caller_key(principal))
        return principal

    def _hold_open(self, scope: Scope, held: ExitStack) -> None:
        """Count a connection as open until `held` ends; raises `TooManyOpen`.

        Strangers are counted by address and path: sign-ins keep no driver from its token. What
        they send without a body, as probes do, takes no time and is not counted.
        """
        principal: Principal | None = scope["state"].get("principal")
        if principal is None and scope["method"] in SAFE_METHODS:
            return
        stranger = f"anonymous:{scope['path']}:{_remote(scope)}"
        if principal is None or principal.kind != "local":
            held.enter_context(self._open.one_of(caller_key(principal) if principal else stranger))

    def _limit(self, limiter: RateLimiter, caller: str) -> None:
        wait_s = limiter.take(caller, self.clock())
        if wait_s > 0:
            raise errors.TooManyRequests(math.ceil(wait_s))

    def _check_site(self, connection: HTTPConnection) -> None:
        """Raise `ForeignOrigin` for what a page of another site does."""
        headers = connection.headers
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if is_foreign(origin, site, headers.get("host", ""), self._settings.allowed_origins):
            raise errors.ForeignOrigin(origin or "another site")

    def _check_origin(self, connection: HTTPConnection, principal: Principal | None) -> None:
        """Refuse what a page of another site does with the rights that a browser brings along."""
        if principal is not None and principal.kind not in ("local", "session"):
            return
        self._check_site(connection)
        # Forms carry the token in a field, which their handlers check; NiceGUI's own transport
        # cannot carry one, and is bound to a page by an id that other sites do not know.
        is_form = connection.scope["path"].startswith(("/dashboard/", "/login", "/logout"))
        if principal is not None and principal.kind == "session" and not is_form:
            cookie = connection.cookies.get(SESSION_COOKIE, "")
            expected = self._security.master.mac("csrf-tokens", cookie)
            if connection.headers.get(CSRF_HEADER) != expected:
                raise errors.CsrfRefused

    async def _refuse(
        self, error: errors.ServiceError, scope: Scope, receive: Receive, response: _Recorder
    ) -> None:
        connection = HTTPConnection(scope)
        wants_page = "text/html" in connection.headers.get("accept", "")
        if isinstance(error, errors.NotSignedIn) and wants_page and scope["method"] in SAFE_METHODS:
            query = scope["query_string"].decode("latin-1")
            wanted = scope["path"] + (f"?{query}" if query else "")
            location = f"{LOGIN_PATH}?next={quote(wanted, safe='/')}"
            await RedirectResponse(location, HTTPStatus.SEE_OTHER)(scope, receive, response)
            return
        await refuse(error, scope, receive, response)

    def _audit(self, scope: Scope, response: _Recorder) -> None:
        if scope["method"] in SAFE_METHODS:
            return
        path, route = scope["path"], getattr(scope.get("route"), "path", None)
        remote = _remote(scope)
        # What drivers report is in the timeline already, and the pages' transport says nothing.
        is_report = path.startswith(("/v1/attempts/", "/dashboard/_nicegui"))
        is_report |= (scope["method"], path, scope["query_string"]) in _DRY_RUNS
        is_denied = response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        source = f"{remote}:{path[:_MAX_OBJECT_CHARS]}"
        if is_report and not (is_denied and self._is_among_first(source)):
            return
        principal = scope["state"].get("principal")
        # A job's own code can send what it likes, too.
        is_untrusted = principal is None or principal.kind == "attempt"
        is_refused = response.status >= HTTPStatus.BAD_REQUEST
        caller = caller_key(principal) if principal else remote
        if is_untrusted and is_refused and not self._is_among_first(caller):
            return
        self._security.audit.append(
            AuditRecord(
                id=0,
                time=time.time(),
                actor=plain(principal.name)[:_MAX_ACTOR_CHARS] if principal else "anonymous",
                actor_kind=principal.kind if principal else "none",
                action=plain(f"{scope['method']} {route or path}")[:128],
                object=plain(response.location or path)[:_MAX_OBJECT_CHARS],
                remote=remote[:64],
                status=response.status,
                request_id=request_id.get(),
            )
        )

    def _is_among_first(self, source: str) -> bool:
        """Whether few refusals came from there lately: nobody may fill the log with them."""
        return not self._noted_refusals.take(source, self.clock())

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = HTTPConnection(scope)
        with ExitStack() as held:
            try:
                self._check_site(connection)
                principal = await self._signed_in(connection)
                scope.setdefault("state", {})["principal"] = principal
                self._hold_open(scope, held)
            except errors.ServiceError as error:
                logger.info("a websocket is refused: %s", error)
                await receive()
                await send({"type": "websocket.close", "code": _CLOSED_FOR_POLICY})
                return
            await self._serve_admitted_socket(scope, connection, receive, send)

    async def _serve_admitted_socket(
        self, scope: Scope, connection: HTTPConnection, receive: Receive, send: Send
    ) -> None:
        check = _CredentialsCheck(self, connection)

        async def receive_while_admitted() -> Message:
            message = await receive()
            if await check.is_still_admitted():
                return message
            await send({"type": "websocket.close", "code": _CLOSED_FOR_POLICY})
            return {"type": "websocket.disconnect", "code": _CLOSED_FOR_POLICY}

        await self._app(scope, receive_while_admitted, send)


class _Recorder:
    """Passes a response on, and records its status and the location of what it created."""

    def __init__(self, send: Send) -> None:
        self._send = send
        # What the server makes of an app that raises.
        self.status: int = HTTPStatus.INTERNAL_SERVER_ERROR
        self.location: str | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status == HTTPStatus.CREATED:
                self.location = MutableHeaders(scope=message).get("location")
        await self._send(message)


class _CredentialsCheck:
    """Checks the credentials of a long connection again from time to time."""

    def __init__(self, middleware: AuthenticationMiddleware, connection: HTTPConnection) -> None:
        self._middleware = middleware
        self._connection = connection
        self._clock = middleware.clock
        self._checked_at = self._clock()
        self.is_admitted = True

    async def is_still_admitted(self) -> bool:
        """Whether the credentials still count, as of at most `_RECHECK_S` ago."""
        if self._clock() - self._checked_at < _RECHECK_S:
            return self.is_admitted
        self._checked_at = self._clock()
        try:
            await self._middleware.principal_of(self._connection)
        except errors.NotSignedIn:
            self.is_admitted = False
        except errors.ServiceError:
            # An unreachable database says nothing about the credentials.
            logger.warning("cannot check the credentials of a stream again")
        return self.is_admitted


def credentials_of(connection: HTTPConnection) -> Credentials:
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    # Any other is for a proxy before us, as Basic is.
    if scheme.lower() == "bearer":
        return Credentials(bearer=token.strip())
    return Credentials(cookie=connection.cookies.get(SESSION_COOKIE))


def plain(text: str) -> str:
    """A text as every database and terminal takes it: printable ASCII, the rest escaped."""
    is_plain = text.isascii() and text.isprintable()
    return text if is_plain else text.encode("unicode_escape").decode("ascii")


def _remote(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""
