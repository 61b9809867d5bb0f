"""HTTP, retries, SSE parser.

When the SDK tries again, and when it gives up. No request is made here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from service.client.credentials import find_key, tls_context
from service.client.errors import (
    ServerFault,
    ServiceUnreachable,
    ShardloomError,
    UnexpectedAnswer,
    error_of_response,
)

# How long followers go on asking a service that does not answer; restarting one takes seconds.
PATIENCE_S = 120.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter: how long to wait after each failure, and when to give up."""

    num_retries: int = 4
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def delay_s(self, num_failures: int, jitter: float) -> float:
        """Seconds to wait after failure number `num_failures` (from 1).

        `jitter` in [0, 1) scales the delay down by up to a half, so that clients spread out.
        """
        num_doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        return min(self.first_delay_s * 2.0**num_doublings, self.max_delay_s) * (1 - jitter / 2)


class RetryBudget:
    """Counts failures in a row; gives up when neither retries nor `patience_s` are left."""

    def __init__(
        self,
        policy: RetryPolicy,
        patience_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._patience_s = patience_s
        self._sleep = sleep
        self._clock = clock
        self.note_answer()

    def note_answer(self) -> None:
        """Somebody answered: what failed before no longer counts."""
        self._num_failures = 0
        self._answered_s = self._clock()

    def endure(self, error: ShardloomError) -> None:
        """Sleep before the next try, or raise `error` when there is none left."""
        self._num_failures += 1
        has_retries = self._num_failures <= self._policy.num_retries
        if not has_retries and self._clock() - self._answered_s >= self._patience_s:
            raise error
        self._sleep(self._policy.delay_s(self._num_failures, random.random()))


def may_pass(error: ShardloomError) -> bool:
    """Whether the same request may be answered later: the service is away or overloaded."""
    if isinstance(error, ServerFault):
        return error.status in RETRIED_STATUSES
    return isinstance(error, ServiceUnreachable)


# A minimal parser of server-sent events (the HTML standard's event stream format).


@dataclass(frozen=True)
class ServerEvent:
    """One event. `id` is the newest id seen on the stream so far, empty if none was sent."""

    name: str
    data: str
    id: str = ""


def split_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Complete lines of a text that arrives in chunks; an unfinished last line is dropped.

    Only CR, LF and CRLF end a line: `str.splitlines` would also cut at U+2028 inside JSON.
    """
    pending = ""
    for chunk in chunks:
        pending += chunk
        # A CR at the end may be the first half of a CRLF whose LF has not arrived yet.
        held_back = "\r" if pending.endswith("\r") else ""
        ready = pending[: len(pending) - len(held_back)]
        *lines, rest = ready.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        yield from lines
        pending = rest + held_back


def parse_events(chunks: Iterable[str], last_id: str = "") -> Iterator[ServerEvent]:
    """Events of a stream that arrives in arbitrary chunks of text.

    Comments (keep-alives) are skipped; an event cut off by the end of the stream is dropped, so
    that it is sent again after a reconnection.
    """
    name, data = "message", list[str]()
    for line in split_lines(chunks):
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data), last_id)
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value


# The wire under the SDK: requests with retries, streams that resume, answers that are checked.

DEFAULT_URL = "http://127.0.0.1:8700"
REQUEST_TIMEOUT_S = 30.0
# The service sends a keep-alive far more often than this on an open stream.
STREAM_SILENCE_S = 60.0
Answer = TypeVar("Answer")
Params = Mapping[str, str | int | float | Sequence[str] | None]


class _Passing(Exception):
    """A failure that may go away by itself; `error` is what to raise when it does not."""

    def __init__(self, error: ShardloomError) -> None:
        self.error = error
        super().__init__(str(error))


def if_version(version: int | None) -> dict[str, str]:
    """Headers of a change that is meant for a job at `version` only, if one is given."""
    return {} if version is None else {"If-Match": f'"{version}"'}


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
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ServiceUnreachable(base_url, f"not a valid URL: {error}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ServiceUnreachable(base_url, "a URL reads http://HOST:PORT")
        key = api_key or find_key(self.base_url)
        # A proxy from the environment has no business between us and our own machine.
        is_loopback = url.host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            transport=transport,
            trust_env=not is_loopback,
            verify=tls_context() if url.scheme == "https" else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _get(
        self,
        path: str,
        answer: type[Answer],
        params: Params | None = None,
        patience_s: float = 0.0,
    ) -> Answer:
        sent = {key: value for key, value in (params or {}).items() if value is not None}
        response = self._with_retries(lambda: self._http.get(path, params=sent), patience_s)
        return self._parse(response, answer)

    def _once(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        try:
            return self._checked(send)
        except _Passing as failure:
            raise failure.error from failure.__cause__

    def _with_retries(
        self, send: Callable[[], httpx.Response], patience_s: float = 0.0
    ) -> httpx.Response:
        patience = self._patience(patience_s)
        while True:
            try:
                return self._checked(send)
            except _Passing as failure:
                patience.endure(failure.error)

    def _patience(self, patience_s: float) -> RetryBudget:
        return RetryBudget(self._retry, patience_s, self._sleep, self._clock)

    def _checked(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send once; raises `_Passing` for what may go away, `ProblemError` for a refusal."""
        try:
            response = send()
        except httpx.TransportError as error:
            raise _Passing(self._unreachable(error)) from error
        self._raise_for_status(response)
        return response

    @staticmethod
    def _raise_for_status(response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        error = error_of_response(response)
        raise _Passing(error) if response.status_code in RETRIED_STATUSES else error

    def _stream(self, path: str, params: Params, patience_s: float) -> Iterator[ServerEvent]:
        """Events of an SSE stream until its `end` event, resumed after the last id when it breaks.

        Only failures in a row count: whatever arrives clears them, be it a keep-alive.
        """
        last_id, patience = "", self._patience(patience_s)
        while True:
            try:
                for event in self._open_stream(path, params, last_id, patience):
                    if event.name == "end":
                        return
                    last_id = event.id
                    yield event
                broken: ShardloomError = ServiceUnreachable(self.base_url, "the stream broke off")
            except httpx.TransportError as error:
                broken = self._unreachable(error)
            except _Passing as failure:
                broken = failure.error
            patience.endure(broken)

    def _open_stream(
        self, path: str, params: Params, last_id: str, patience: RetryBudget
    ) -> Iterator[ServerEvent]:
        sent = {key: value for key, value in params.items() if value is not None}
        headers = {"Accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=STREAM_SILENCE_S)
        with self._http.stream(
            "GET", path, params=sent, headers=headers, timeout=timeout
        ) as response:
            self._raise_for_status(response)
            yield from parse_events(_noting_answers(response.iter_text(), patience), last_id)

    def _save(self, path: str, params: Params, target: Path) -> Path:
        """Write an answer to a file, which is replaced once all is there; raises OSError."""
        partial = target.with_name(f"{target.name}.partial")
        try:
            with self._http.stream("GET", path, params=params) as response:
                self._raise_for_status(response)
                with partial.open("wb") as file:
                    file.writelines(response.iter_bytes())
        except _Passing as failure:
            raise failure.error from failure.__cause__
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        return partial.replace(target)

    def _parse(self, response: httpx.Response, answer: type[Answer]) -> Answer:
        return self._validate(response.content, answer, str(response.url))

    def _parse_event(self, event: ServerEvent, answer: type[Answer]) -> Answer:
        return self._validate(event.data, answer, self.base_url)

    @staticmethod
    def _validate(text: str | bytes, answer: type[Answer], url: str) -> Answer:
        try:
            # A job in an answer was accepted once: what newer checks refuse can still be shown.
            return TypeAdapter(answer).validate_json(text, context={"stored": True})
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"]) or "body"
            raise UnexpectedAnswer(url, f"{where}: {fault['msg']}") from None

    def _unreachable(self, error: httpx.TransportError) -> ServiceUnreachable:
        return ServiceUnreachable(self.base_url, str(error) or type(error).__name__)


def _noting_answers(chunks: Iterator[str], patience: RetryBudget) -> Iterator[str]:
    for chunk in chunks:
        patience.note_answer()
        yield chunk
