"""The Python SDK: a typed, synchronous client of the REST API.

    with ShardloomClient("http://127.0.0.1:8700") as client:
        job = client.submit(yaml.safe_load(open("job.yaml")))
        job = client.wait(job.id)

A job is named by its id, a unique prefix of it, or its name (the newest of that name). Requests
that are safe to repeat are retried with backoff: every GET, and `submit`, which always carries
an Idempotency-Key. Nothing else is ever sent twice. What follows a job (`wait`, `follow_*`)
outlasts a restart of the service. Errors: see `service.client_errors`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from service.api.schemas import (
    AttemptOut,
    CheckpointOut,
    ClusterOut,
    JobDetail,
    JobPlan,
    JobSummary,
    LogLine,
    LogsOut,
    MetricsOut,
    Page,
    SubmitJob,
    TimelineEventOut,
)
from service.client_errors import (
    ServiceUnreachable,
    ShardloomError,
    UnexpectedAnswer,
    error_of_response,
)
from service.client_retry import PATIENCE_S, RETRIED_STATUSES, Patience, RetryPolicy
from service.client_sse import ServerEvent, parse_events
from service.domain import JobStatus

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


class ShardloomClient:
    """A connection to one service; close it, or use it as a context manager."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
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
        # A proxy from the environment has no business between us and our own machine.
        is_loopback = url.host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            base_url=url, timeout=timeout_s, transport=transport, trust_env=not is_loopback
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ---- jobs

    def submit(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> JobDetail:
        """Create a job from a spec document; raises `InvalidRequest` with the faulty fields.

        With the same `idempotency_key` the same spec makes one job, however often it is sent.
        """
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        body = SubmitJob(spec=dict(spec)).model_dump()
        response = self._with_retries(
            lambda: self._http.post("/v1/jobs", json=body, headers=headers)
        )
        return self._parse(response, JobDetail)

    def plan(self, spec: Mapping[str, Any]) -> JobPlan:
        """Check a spec without creating a job, and say which groups it would form."""
        body = SubmitJob(spec=dict(spec)).model_dump()
        response = self._once(
            lambda: self._http.post("/v1/jobs", json=body, params={"dry_run": "true"})
        )
        return self._parse(response, JobPlan)

    def list_jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 50,
        statuses: Sequence[JobStatus] = (),
        name: str | None = None,
    ) -> Page[JobSummary]:
        """One page of jobs, newest first; `next` of a page is the `after` of the following one."""
        params = {"after": after, "limit": limit, "status": list(statuses), "name": name}
        return self._get("/v1/jobs", Page[JobSummary], params)

    def iter_jobs(
        self, *, statuses: Sequence[JobStatus] = (), name: str | None = None
    ) -> Iterator[JobSummary]:
        """Every job, newest first, fetched page by page as they are consumed."""
        after: str | None = None
        while True:
            page = self.list_jobs(after=after, statuses=statuses, name=name)
            yield from page.items
            if page.next is None:
                return
            after = page.next

    def get_job(self, job: str) -> JobDetail:
        """Read a job; raises `NotFound`."""
        return self._get(_job_path(job), JobDetail)

    def cancel(self, job: str) -> JobDetail:
        """Ask a job to stop; raises `Conflict` if it has ended. Sent once, never retried."""
        response = self._once(lambda: self._http.post(f"{_job_path(job)}:cancel"))
        return self._parse(response, JobDetail)

    def wait(
        self,
        job: str,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
        patience_s: float = PATIENCE_S,
    ) -> JobDetail:
        """Block until the job has ended and return it; raises `TimeoutError` after `timeout_s`.

        A service that does not answer is asked again for `patience_s` (never beyond `timeout_s`).
        """
        deadline = math.inf if timeout_s is None else self._clock() + timeout_s
        while True:
            left_s = max(0.0, deadline - self._clock())
            found = self._get(_job_path(job), JobDetail, patience_s=min(patience_s, left_s))
            if found.status.is_terminal:
                return found
            if self._clock() >= deadline:
                raise TimeoutError(f"job {found.id} is {found.status} after {timeout_s} s")
            self._sleep(poll_s)

    # ---- what a job left behind

    def attempts(self, job: str) -> list[AttemptOut]:
        """Attempts of a job, oldest first."""
        return self._get(_job_path(job, "attempts"), Page[AttemptOut]).items

    def checkpoints(self, job: str) -> list[CheckpointOut]:
        """Committed checkpoints that still exist, in step order."""
        return self._get(_job_path(job, "checkpoints"), Page[CheckpointOut]).items

    def metrics(
        self, job: str, *, names: Sequence[str] = (), max_points: int | None = None
    ) -> MetricsOut:
        """Downsampled series of the metrics asked for (all of them where none is named)."""
        params = {"name": list(names), "max_points": max_points}
        return self._get(_job_path(job, "metrics"), MetricsOut, params)

    def events(self, job: str, *, after: int = 0, limit: int = 200) -> list[TimelineEventOut]:
        """Timeline lines with an id above `after`, in order, at most `limit`."""
        params = {"after": after, "limit": limit}
        return self._get(_job_path(job, "events"), Page[TimelineEventOut], params).items

    def iter_events(self, job: str, *, after: int = 0) -> Iterator[TimelineEventOut]:
        """Every timeline line so far with an id above `after`, fetched page by page."""
        while page := self.events(job, after=after):
            yield from page
            after = page[-1].id

    def follow_events(
        self, job: str, *, after: int = 0, patience_s: float = PATIENCE_S
    ) -> Iterator[TimelineEventOut]:
        """Timeline lines as they happen, until the job has ended; survives broken connections.

        A service that does not answer is asked again for `patience_s`.
        """
        for event in self._stream(_job_path(job, "events"), {"after": after}, patience_s):
            yield self._parse_event(event, TimelineEventOut)

    def logs(
        self,
        job: str,
        *,
        source: str | None = None,
        tail: int | None = None,
        after: str | None = None,
    ) -> LogsOut:
        """A piece of the newest attempt's logs: of `source` (`driver`, `rank-N`) or of all.

        `tail` keeps the last lines of each source; `after` takes a `cursor` of an earlier answer.
        """
        params = {"source": source, "tail": tail, "after": after}
        return self._get(_job_path(job, "logs"), LogsOut, params)

    def read_logs(self, job: str, *, source: str | None = None, tail: int | None = None) -> LogsOut:
        """All log lines so far, asked for piece by piece; parameters as for `logs`."""
        answer = self.logs(job, source=source, tail=tail)
        lines = piece = answer.lines
        while piece:
            answer = self.logs(job, source=source, after=answer.cursor)
            piece = answer.lines
            lines = lines + piece
        return answer.model_copy(update={"lines": lines})

    def follow_logs(
        self,
        job: str,
        *,
        source: str | None = None,
        tail: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Iterator[LogLine]:
        """Log lines as they are written, until the job has ended; survives broken connections.

        A service that does not answer is asked again for `patience_s`.
        """
        params = {"source": source, "tail": tail}
        for event in self._stream(_job_path(job, "logs"), params, patience_s):
            yield self._parse_event(event, LogLine)

    # ---- the service itself

    def cluster(self) -> ClusterOut:
        """What the service knows of the cluster behind it."""
        return self._get("/v1/cluster", ClusterOut)

    def is_alive(self) -> bool:
        """Whether a service answers right now; one attempt, never raises `ServiceUnreachable`."""
        try:
            return self._http.get("/healthz", timeout=2.0).is_success
        except httpx.TransportError:
            return False

    # ---- plumbing

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

    def _parse(self, response: httpx.Response, answer: type[Answer]) -> Answer:
        return self._validate(response.content, answer, str(response.url))

    def _parse_event(self, event: ServerEvent, answer: type[Answer]) -> Answer:
        return self._validate(event.data, answer, self.base_url)

    @staticmethod
    def _validate(text: str | bytes, answer: type[Answer], url: str) -> Answer:
        try:
            return TypeAdapter(answer).validate_json(text)
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


def _job_path(job: str, part: str = "") -> str:
    path = f"/v1/jobs/{quote(job, safe='')}"
    return f"{path}/{part}" if part else path
