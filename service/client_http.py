"""The wire under the SDK: requests with retries, streams that resume, answers that are checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from service.client_errors import (
    ServiceUnreachable,
    ShardloomError,
    UnexpectedAnswer,
    error_of_response,
)
from service.client_retry import RETRIED_STATUSES, Patience, RetryPolicy
from service.client_sse import ServerEvent, parse_events
from service.credentials import find_key, tls_context

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

    Without `api_key` the one that `service.credentials` finds for the service is sent.
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

    def _patience(self, patience_s: float) -> Patience:
        return Patience(self._retry, patience_s, self._sleep, self._clock)

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
        self, path: str, params: Params, last_id: str, patience: Patience
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


def _noting_answers(chunks: Iterator[str], patience: Patience) -> Iterator[str]:
    for chunk in chunks:
        patience.note_answer()
        yield chunk
