"""Idempotency-Key on every POST: a request that is repeated with its key gets the first answer.

`POST /v1/jobs` and `:clone` keep their keys with the jobs that they made; what drivers post is
numbered. Everything else goes through here. Only what succeeded is kept, for a day and for whoever
asked: what was refused changed nothing, and may be asked again with the same key.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.middleware import refuse
from service.api.schemas import FieldFault
from service.errors import IdempotencyConflict, InvalidRequest, RequestUnderWay, ServiceError
from service.security.master_keys import MasterKeys
from service.security.principal import Principal
from service.store.answers import Answer, AnswerStore

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
_MAX_ASKER_CHARS = 255
# Said anew by each answer, or wrong for a body that was kept.
_NOT_KEPT = frozenset({"content-encoding", "content-length", "date", "x-request-id", "set-cookie"})


def takes_key_here(method: str, path: str) -> bool:
    """Whether this is what keeps the keys of a route."""
    is_elsewhere = path == "/v1/jobs" or path.endswith(":clone") or path.startswith("/v1/attempts/")
    return method == "POST" and path.startswith("/v1/") and not is_elsewhere


class Repeats:
    """Answers repeats; `clock` gives Unix seconds. Its requests have a principal already."""

    def __init__(
        self,
        app: ASGIApp,
        store: AnswerStore,
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
        asker = asker_of(principal)
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

    async def _repeat(self, known: Answer, request_hash: str, key: str, send: Send) -> None:
        if known.request_hash != request_hash:
            raise IdempotencyConflict(key)
        if known.status is None:
            raise RequestUnderWay(key)
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
        self._store.finish(asker, key, Answer(request_hash, answer.status, answer.headers, sealed))


def asker_of(principal: Principal) -> str:
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
        raise InvalidRequest([FieldFault(path="Idempotency-Key", code="key", message=message)])


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
