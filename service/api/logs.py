"""Logs of jobs: read in pieces, followed, searched, downloaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse

from service.api.context import ContextDep, JobDep, StreamDep
from service.api.followers import LogFollower
from service.api.schemas import FieldFault, LogLine, LogsOut
from service.api.sse import stream
from service.errors import InvalidRequest
from service.log_download import as_gzip, as_zip, logs_of
from service.log_lines import Level, LogFilter
from service.logs import LogPiece, LogPosition
from service.submission import run_dir_of

router = APIRouter(prefix="/v1", tags=["records"])

_EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/zip": {}, "application/gzip": {}}}
}
_MAX_RANK = 10**6 - 1
# A search that finds nothing answers all the same, with how far it came.
_SEARCH_S = 0.5
LevelName = Literal["debug", "info", "warning", "error", "critical"]
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
    level: Annotated[LevelName | None, Query(description="Only lines of this level on.")] = None,
    q: Annotated[
        str,
        Query(max_length=200, description="Only lines with this text; `*` stands for anything."),
    ] = "",
    since: Moment = None,
    until: Moment = None,
) -> LogFilter:
    """Which lines a request wants."""
    min_level = Level[level.upper()] if level else None
    return LogFilter(tuple(ranks or ()), min_level, q, since, until)


FilterDep = Annotated[LogFilter, Depends(get_filter)]


@router.get(
    "/jobs/{job}/logs",
    summary="Log lines of a job: a piece, or a stream with `follow`",
    response_model=LogsOut,
    responses=_EVENT_STREAM,
)
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
    last_event_id: Annotated[
        str | None,
        Header(alias="Last-Event-ID", description="Resume a stream behind this event."),
    ] = None,
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
        return stream(follower.look, context)
    pieces, sources = _read_some(follower), follower.sources()
    return LogsOut(
        attempt_id=follower.position.attempt_id,
        sources=sources,
        lines=[LogLine.model_validate(piece) for piece in pieces],
        cursor=follower.position.encode(),
        more=follower.has_moved,
    )


def _read_some(follower: LogFollower) -> list[LogPiece]:
    deadline = time.monotonic() + _SEARCH_S
    while True:
        pieces = follower.read()
        if pieces or not follower.has_moved or time.monotonic() > deadline:
            return pieces


@router.get(
    "/jobs/{job}/logs:download",
    summary="All logs of a job, or of one attempt, in a file",
    response_class=StreamingResponse,
    responses=_ARCHIVE,
)
def download_logs(
    job: JobDep,
    context: ContextDep,
    attempt: Annotated[
        str | None, Query(max_length=64, description="Attempt id; all of them if left away.")
    ] = None,
    form: Annotated[
        Literal["zip", "gzip"],
        Query(alias="format", description="One file per log, or one text of all, gzipped."),
    ] = "zip",
) -> StreamingResponse:
    """Made while it is sent, so that its size does not matter."""
    attempts = [found.id for found in context.store.list_attempts(job.id)]
    if attempt is not None and attempt not in attempts:
        fault = FieldFault(path="attempt", code="attempt", message="no attempt of this job")
        raise InvalidRequest([fault])
    logs = logs_of(run_dir_of(context.settings, job.id), [attempt] if attempt else attempts)
    chunks: Iterator[bytes] = as_zip(logs) if form == "zip" else as_gzip(logs)
    name = f"{attempt or job.id}-logs.{'zip' if form == 'zip' else 'txt.gz'}"
    return StreamingResponse(
        chunks,
        media_type=f"application/{form}",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )
