"""Routes of what a job records: logs, timeline, metrics, checkpoints."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse

from service.api.deps import ContextDep, JobDep, StreamDep, ThreadRoute, download, on_storage
from service.api.sse import LogFollower, TimelineFollower, stream
from service.domain.models import Checkpoint, TimelineEvent
from service.errors import InvalidRequest
from service.jobs.logs import LEVELS, LogFilter, LogPiece, LogPosition, as_zip, logs_of
from service.jobs.run_storage import run_dir_of
from service.schemas.common import Page
from service.schemas.jobs import (
    LogLevel,
    LogLine,
    LogsOut,
    MetricSeries,
    MetricsOut,
)
from trainer.spec.base import MAX_INTEGER, FieldProblem

router = APIRouter(prefix="/v1", tags=["records"], route_class=ThreadRoute)
_EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": {}}}}
MAX_SERIES = 100
MAX_KINDS = 50
_MAX_RANK = 10**6 - 1
# A search that found nothing so far returns after this time, with its cursor.
_SEARCH_S = 0.5
_RESUME = "Resume a stream behind this event."
# Unix seconds up to the year 9999.
Moment = Annotated[float | None, Query(ge=0, le=253_402_300_799, description="Unix seconds.")]
AttemptId = Annotated[
    str | None, Query(max_length=64, description="Attempt id; the newest if left away.")
]


def get_filter(
    ranks: Annotated[
        list[Annotated[int, Query(ge=0, le=_MAX_RANK)]] | None,
        Query(alias="rank", max_length=1024, description="Only logs of these ranks."),
    ] = None,
    level: Annotated[LogLevel | None, Query(description="Only lines of this level on.")] = None,
    q: Annotated[
        str,
        Query(max_length=200, description="Only lines with this text; `*` stands for anything."),
    ] = "",
    since: Moment = None,
    until: Moment = None,
) -> LogFilter:
    min_level = LEVELS[level.upper()] if level else None
    return LogFilter(tuple(ranks or ()), min_level, q, since, until)


FilterDep = Annotated[LogFilter, Depends(get_filter)]


@router.get(
    "/jobs/{job}/logs",
    summary="Log lines of a job: a piece, or a stream with `follow`",
    response_model=LogsOut,
    responses=_EVENT_STREAM,
)
@on_storage()
def get_logs(
    job: JobDep,
    context: ContextDep,
    is_stream: StreamDep,
    wanted: FilterDep,
    attempt: AttemptId = None,
    source: Annotated[str | None, Query(examples=["driver", "rank-0"])] = None,
    after: Annotated[str | None, Query(description="`cursor` of an earlier answer.")] = None,
    tail: Annotated[
        int | None,
        Query(ge=0, le=100_000, description="Look at the last lines of each log only."),
    ] = None,
    follow: bool = False,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", description=_RESUME)] = None,
) -> LogsOut | StreamingResponse:
    """Lines of `source` or of all that fit. They come from run storage and outlive the cluster.

    Without `attempt` a stream goes on into the attempts that replace a lost one.
    """
    follower = LogFollower(context.store, context.settings, job, attempt, source, wanted)
    cursor = last_event_id or after
    if cursor:
        follower.start_at(LogPosition.decode(cursor))
    elif tail is not None:
        follower.start_at_tail(tail)
    if follow or is_stream:
        return stream(follower.poll_in_time, context)
    pieces, sources = _read_some(follower), follower.sources()
    return LogsOut(
        attempt_id=follower.position.attempt_id,
        sources=sources,
        lines=[LogLine.model_validate(piece) for piece in pieces],
        cursor=follower.position.encode(),
        more=follower.has_more,
    )


def _read_some(follower: LogFollower) -> list[LogPiece]:
    deadline = time.monotonic() + _SEARCH_S
    while True:
        pieces = follower.read()
        if pieces or not follower.has_more or time.monotonic() > deadline:
            return pieces


@router.get(
    "/jobs/{job}/logs:download",
    summary="All logs of a job, or of one attempt, in a ZIP archive",
    response_class=StreamingResponse,
    responses=_ARCHIVE,
)
@on_storage()
def download_logs(
    job: JobDep,
    context: ContextDep,
    attempt: Annotated[
        str | None, Query(max_length=64, description="Attempt id; all of them if left away.")
    ] = None,
) -> StreamingResponse:
    """Made while it is sent, so that its size does not matter."""
    attempts = [found.id for found in context.store.list_attempts(job.id)]
    if attempt is not None and attempt not in attempts:
        raise InvalidRequest([FieldProblem("attempt", "attempt", "no attempt of this job")])
    logs = logs_of(run_dir_of(context.settings, job.id), [attempt] if attempt else attempts)
    name = f"{attempt or job.id}-logs.zip"
    return download(context, as_zip(logs), job, name, "application/zip")


@router.get(
    "/jobs/{job}/events",
    summary="Timeline of a job: a page, or a stream with Accept: text/event-stream",
    response_model=Page[TimelineEvent],
    responses=_EVENT_STREAM,
)
def list_events(
    job: JobDep,
    context: ContextDep,
    is_stream: StreamDep,
    after: Annotated[
        int, Query(ge=0, le=MAX_INTEGER, description="Id of the last line already seen.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    kinds: Annotated[
        list[str] | None,
        Query(alias="kind", max_length=MAX_KINDS, description="Only these, on pages."),
    ] = None,
    last_event_id: Annotated[
        int | None,
        Header(alias="Last-Event-ID", ge=0, le=MAX_INTEGER, description=_RESUME),
    ] = None,
) -> Page[TimelineEvent] | StreamingResponse:
    """Lines in order. A stream ends with an `end` event once the job has ended."""
    if is_stream:
        start = after if last_event_id is None else last_event_id
        follower = TimelineFollower(context.store, job.id, start)
        return stream(follower.poll, context)
    lines = context.store.list_timeline(job.id, after=after, limit=limit + 1, kinds=kinds or ())
    return Page.of(lines, limit, lambda line: line)


@router.get("/jobs/{job}/metrics", summary="Metric series of a job, downsampled")
def get_metrics(
    job: JobDep,
    context: ContextDep,
    names: Annotated[
        list[str] | None, Query(alias="name", max_length=MAX_SERIES, examples=[["train/loss"]])
    ] = None,
    from_step: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    to_step: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    max_points: Annotated[int, Query(ge=1, le=5000)] = 500,
) -> MetricsOut:
    """Series of the names asked for, or of the first 100: mean, min and max per bucket of steps."""
    known = context.store.metric_names(job.id)
    series = []
    for name in names or known[:MAX_SERIES]:
        points = context.store.metric_points(
            job.id, name, from_step=from_step, to_step=to_step, max_points=max_points
        )
        series.append(MetricSeries(name=name, points=points))
    return MetricsOut(names=known, series=series)


@router.get("/jobs/{job}/checkpoints", summary="Committed checkpoints of a job")
def list_checkpoints(job: JobDep, context: ContextDep) -> Page[Checkpoint]:
    """The best and the newest that still exist (up to 2000) in step order, all on one page."""
    return Page(items=context.store.list_checkpoints(job.id))
