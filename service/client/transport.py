"""The connection under the SDK: HTTP with retries, server-sent event streams, checked answers.

Requests that are safe to repeat are retried with exponential backoff when the service is away
(transport errors) or overloaded (HTTP 429, 502, 503, 504). Streams are resumed after the last
event id. Durations are in seconds. Errors: `service.client.errors`.
"""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import TypeAdapter, ValidationError

from service.client.credentials import find_key, local_token, tls_context
from service.client.errors import (
    CredentialsUnusable,
    InvalidRequest,
    ProblemError,
    ServiceUnreachable,
    ShardloomError,
    UnexpectedAnswer,
    error_of_response,
)
from service.network import is_loopback
from service.schemas.common import Page, Problem
from service.schemas.jobs import JobDetail
from trainer.spec.base import FieldProblem

DEFAULT_URL = "http://127.0.0.1:8700"
REQUEST_TIMEOUT_S = 30.0
# The service sends a keep-alive far more often than this on an open stream.
STREAM_SILENCE_S = 60.0
# How long one who waits goes on asking a service that is away; restarting one takes seconds.
PATIENCE_S = 120.0
# How long an answer may take that is asked for when the time is as good as over.
_LAST_LOOK_S = 1.0
RETRIED_STATUSES = frozenset({408, 429, 502, 503, 504})
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)
_FIRST_DELAY_S = 0.2
_MAX_DOUBLINGS = 30
Answer = TypeVar("Answer")
Item = TypeVar("Item")
Params = Mapping[str, str | int | float | Sequence[str] | None]


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter: how long to wait after each failure, and when to give up."""

    num_retries: int = 4
    max_delay_s: float = 5.0

    def delay_s(self, num_failures: int, jitter: float) -> float:
        """Seconds to wait after failure number `num_failures` (from 1).

        `jitter` in [0, 1) scales the delay down by up to a half, so that clients spread out.
        """
        num_doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        return min(_FIRST_DELAY_S * 2.0**num_doublings, self.max_delay_s) * (1 - jitter / 2)


@dataclass
class RetryBudget:
    """Counts failures in a row; gives up when neither retries nor `patience_s` are left.

    It does not sleep beyond `deadline` (of the clock).
    """

    policy: RetryPolicy
    patience_s: float
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """The service has answered: earlier failures no longer count."""
        self._num_failures = 0
        self._answered_s = self.clock()

    def wait(self, error: ShardloomError) -> None:
        """Sleep before the next try, or raise `error` when there is none left."""
        self._num_failures += 1
        has_retries = self._num_failures <= self.policy.num_retries
        if not has_retries and self.clock() - self._answered_s >= self.patience_s:
            raise error
        delay_s = self.policy.delay_s(self._num_failures, random.random())
        self.sleep(min(delay_s, max(0.0, self.deadline - self.clock())))


def is_transient(error: ShardloomError) -> bool:
    """Whether the same request may be answered later: the service is away, overloaded or at it."""
    if isinstance(error, ProblemError) and error.code == "request_under_way":
        return True
    if isinstance(error, ProblemError | UnexpectedAnswer):
        return error.status in RETRIED_STATUSES
    return isinstance(error, ServiceUnreachable) and not error.is_distrusted


# ---- the connection


def path_of(kind: str, name: str, *parts: str) -> str:
    """Path of something by its id or name, or of what is below it; raises `InvalidRequest`."""
    names = (name, *parts)
    if not {"", ".", ".."}.isdisjoint(names) or any("/" in each for each in names):
        # A URL has no such names: the request would be about what is above, or of no route.
        raise refusal(
            f"{'/'.join(names)!r} names nothing in {kind}: an id or a name is not '', . or .., "
            "and has no /"
        )
    return f"/v1/{kind}/{'/'.join(quote(each, safe='', errors='replace') for each in names)}"


job_path = partial(path_of, "jobs")


def refusal(detail: str, fields: Sequence[FieldProblem] = ()) -> InvalidRequest:
    """The error of a request that is not sent."""
    problem = Problem(
        title="Not sent", status=422, detail=detail, code="not_sent", fields=[*fields]
    )
    return InvalidRequest(problem)


def items_of_pages(read: Callable[[str | None], Page[Item]]) -> Iterator[Item]:
    """Items of every page, read as they are consumed; `read` takes a page's `next`."""
    page = read(None)
    yield from page.items
    while page.next is not None:
        page = read(page.next)
        yield from page.items


class _KeyAuth(httpx.Auth):
    """Sends the key given, or the one found for a service, if any.

    Where that does not count it looks for the local token: a service that was started anew has
    another one, and SHARDLOOM_API_KEY may be for another service.
    """

    def __init__(self, url: str, given: str | None) -> None:
        self._url = url
        self._may_change = given is None
        self._key = given or find_key(url)
        if self._key and not (self._key.isascii() and self._key.isprintable()):
            # Said here, as the error of the request would tell the key.
            raise CredentialsUnusable(
                f"the API key for {url} holds a line end or another character that no key has; "
                "check SHARDLOOM_API_KEY, or keep it anew with `shardloom login`"
            )

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        response = yield self._with_key(request)
        if response.status_code == httpx.codes.UNAUTHORIZED and self._may_change:
            token = local_token(self._url)
            if token is not None and token != self._key:
                self._key = token
                yield self._with_key(request)

    def _with_key(self, request: httpx.Request) -> httpx.Request:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class Connection:
    """A connection to one service; close it, or use it as a context manager.

    Without `api_key` the one that `service.client.credentials` finds for the service is sent.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        retry: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._clock = clock
        self._timeout_s = timeout_s
        try:
            url = httpx.URL(self.base_url)
            url.host.encode("idna")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ServiceUnreachable(base_url, f"not a valid URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ServiceUnreachable(base_url, "a URL reads http://HOST:PORT")
        try:
            self._http = httpx.Client(
                base_url=url,
                auth=_KeyAuth(self.base_url, api_key),
                timeout=timeout_s,
                transport=transport,
                # A proxy from the environment has no business between us and our own machine.
                trust_env=not is_loopback(url.host),
                verify=tls_context() if url.scheme == "https" else True,
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            cause = (
                f"the proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names is not usable: {error}"
            )
            raise ServiceUnreachable(base_url, cause) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _get(
        self, path: str, answer: type[Answer], params: Params | None = None, **options: Any
    ) -> Answer:
        return self._request("GET", path, answer, repeatable=True, params=params, **options)

    def _polled(
        self,
        path: str,
        answer: type[Answer],
        timeout_s: float | None,
        poll_s: float,
        patience_s: float = PATIENCE_S,
    ) -> Iterator[Answer]:
        """Answers of a path, one every `poll_s`, until `timeout_s` are over.

        A service that does not answer is asked again for `patience_s` (never beyond `timeout_s`).
        A job that was named is asked for by its id from then on.
        """
        deadline = math.inf if timeout_s is None else self._clock() + timeout_s
        is_answered = False
        while True:
            try:
                found = self._get(path, answer, patience_s=patience_s, deadline=deadline)
            except ServiceUnreachable:
                if is_answered and self._clock() >= deadline:
                    return
                raise
            is_answered = True
            if isinstance(found, JobDetail):
                path = job_path(found.id)
            yield found
            left_s = deadline - self._clock()
            if left_s <= 0:
                return
            self._sleep(min(poll_s, left_s))

    def _request(self, method: str, path: str, answer: type[Answer], **options: Any) -> Answer:
        """Send a request and check its answer; `options` as of `_send`."""
        response = self._send(method, path, **options)
        return self._validate(response.content, answer, str(response.url))

    def _create(
        self,
        path: str,
        answer: type[Answer],
        body: dict[str, Any],
        idempotency_key: str | None = None,
        *,
        force: bool = False,
    ) -> Answer:
        """POST something once, however often it has to be sent: always with an Idempotency-Key."""
        options = {
            "headers": {"Idempotency-Key": idempotency_key or str(uuid.uuid4())},
            "params": {"force": "true"} if force else None,
        }
        return self._request("POST", path, answer, repeatable=True, json=body, **options)

    def _send(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = False,
        is_change: bool | None = None,
        patience_s: float = 0.0,
        deadline: float = math.inf,
        params: Params | None = None,
        target: Path | None = None,
        **content: Any,
    ) -> httpx.Response:
        """Send a request, again while its failures are transient if it is `repeatable`.

        Without an answer, the error of one that `is_change` (None: each POST) says whether any try
        may have arrived.
        After `deadline` (of the clock) it is not sent again, nor waited for longer than
        `_LAST_LOOK_S`. The answer is read, or written to `target`, which is replaced once all is
        there (raises OSError). `content` is as in `httpx.Client.request`.
        """
        budget, may_have_arrived = self._budget(patience_s, deadline), False
        is_change = method == "POST" if is_change is None else is_change
        while True:
            if deadline < math.inf:
                left_s = max(deadline - self._clock(), _LAST_LOOK_S)
                content["timeout"] = min(left_s, self._timeout_s)
            try:
                with self._answer(method, path, params, **content) as response:
                    if target is None:
                        response.read()
                    else:
                        _save(response, target)
                    return response
            except ShardloomError as error:
                is_sent = not isinstance(error.__cause__, _NEVER_SENT)
                if isinstance(error, ProblemError | UnexpectedAnswer):
                    is_sent = error.status != httpx.codes.TOO_MANY_REQUESTS
                may_have_arrived |= is_change and is_sent
                if isinstance(error, ServiceUnreachable):
                    error.may_have_arrived = may_have_arrived
                if not repeatable or not is_transient(error) or self._clock() >= deadline:
                    raise
                failure = error
            budget.wait(failure)

    def _stream(
        self, path: str, answer: type[Answer], params: Params, patience_s: float
    ) -> Iterator[Answer]:
        """What the events of an SSE stream hold, until its `end` event; resumed when it breaks.

        Only failures in a row count: a stream that brought anything, be it a keep-alive, clears
        them.
        """
        last_id, budget = "", self._budget(patience_s)
        while True:
            try:
                for event in self._open_stream(path, params, last_id, budget):
                    if event.event == "end":
                        return
                    last_id = event.id or last_id
                    yield self._validate(event.data, answer, self.base_url)
                failure: ShardloomError = ServiceUnreachable(self.base_url, "the stream broke off")
            except ShardloomError as error:
                if not is_transient(error):
                    raise
                failure = error
            budget.wait(failure)

    def _open_stream(
        self, path: str, params: Params, last_id: str, budget: RetryBudget
    ) -> Iterator[ServerSentEvent]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=STREAM_SILENCE_S)
        with self._answer("GET", path, params, headers=headers, timeout=timeout) as response:
            events = EventSource(response).iter_sse()
            try:
                # Keep-alives have no data.
                yield from (event for event in events if event.data)
            finally:
                if response.num_bytes_downloaded:
                    budget.reset()

    def _download(self, path: str, params: Params, target: Path) -> Path:
        """Write what a GET answers to a file, which is replaced once all is there; OSError."""
        self._send("GET", path, repeatable=True, params=params, target=target)
        return target

    def _budget(self, patience_s: float, deadline: float = math.inf) -> RetryBudget:
        return RetryBudget(self._retry, patience_s, self._sleep, self._clock, deadline)

    @contextmanager
    def _answer(
        self, method: str, path: str, params: Params | None, **content: Any
    ) -> Iterator[httpx.Response]:
        """An answer that is a success, yet to be read; raises the error that another stands for,
        `ServiceUnreachable` for those of a connection, and `InvalidRequest`.
        """
        given = {key: value for key, value in (params or {}).items() if value is not None}
        try:
            request = self._http.build_request(method, path, params=given, **content)
        except (httpx.InvalidURL, TypeError, ValueError) as error:
            raise refusal(
                f"the request cannot be written ({error}); leave out binary values, sets, .nan, "
                ".inf, texts that are no UTF-8 and names of more than 64 KiB"
            ) from None
        try:
            with closing(self._http.send(request, stream=True)) as response:
                if not response.is_success:
                    response.read()
                    raise error_of_response(response)
                yield response
        except httpx.RequestError as error:
            cause = str(error) or type(error).__name__
            raise ServiceUnreachable(self.base_url, cause) from error

    @staticmethod
    def _validate(text: str | bytes, answer: type[Answer], url: str) -> Answer:
        try:
            # A job in an answer was accepted once: what newer checks refuse can still be shown.
            return TypeAdapter(answer).validate_json(text, context={"stored": True})
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"]) or "body"
            raise UnexpectedAnswer(url, f"{where}: {fault['msg']}") from None


def _save(response: httpx.Response, target: Path) -> None:
    partial = target.absolute().with_name(f"{target.name}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(response.iter_bytes())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
