"""What jobs leave behind: timeline, metrics, checkpoints; and the door drivers post to."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from service.api.auth import PrincipalDep
from service.api.context import ContextDep, JobDep, StreamDep
from service.api.followers import TimelineFollower
from service.api.schemas import (
    CheckpointOut,
    FieldFault,
    MetricPointOut,
    MetricSeries,
    MetricsOut,
    Page,
    TimelineEventOut,
)
from service.api.sse import stream
from service.errors import InvalidRequest
from trainer.events import EventAck, EventBatch

router = APIRouter(prefix="/v1", tags=["records"])

MAX_SERIES = 100
MAX_KINDS = 50
# What the database can compare with.
MAX_INTEGER = 2**63 - 1
_EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
LastEventId = Annotated[
    str | None, Header(alias="Last-Event-ID", description="Resume a stream behind this event.")
]


@router.get(
    "/jobs/{job}/events",
    summary="Timeline of a job: a page, or a stream with Accept: text/event-stream",
    response_model=Page[TimelineEventOut],
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
    progress: Annotated[
        bool, Query(description="Let a stream tell progress as well, in `progress` events.")
    ] = False,
    last_event_id: LastEventId = None,
) -> Page[TimelineEventOut] | StreamingResponse:
    """Lines in order. A stream ends with an `end` event once the job has ended."""
    if is_stream:
        start = after if last_event_id is None else _line_id(last_event_id)
        follower = TimelineFollower(context.store, job.id, start, with_progress=progress)
        return stream(follower.look, context)
    lines = context.store.list_timeline(job.id, after=after, limit=limit, kinds=kinds or ())
    following = str(lines[-1].id) if len(lines) == limit else None
    return Page(items=[TimelineEventOut.model_validate(line) for line in lines], next=following)


def _line_id(last_event_id: str) -> int:
    # The length first: Python refuses to read a number of thousands of digits.
    is_number = last_event_id.isdecimal() and len(last_event_id) <= len(str(MAX_INTEGER))
    if not is_number or int(last_event_id) > MAX_INTEGER:
        fault = FieldFault(path="Last-Event-ID", code="cursor", message="not an id of this stream")
        raise InvalidRequest([fault])
    return int(last_event_id)


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
    """Series of the names asked for, or of all: mean, min and max per bucket of steps."""
    known = context.store.metric_names(job.id)
    series = []
    for name in names or known[:MAX_SERIES]:
        points = context.store.metric_points(
            job.id, name, from_step=from_step, to_step=to_step, max_points=max_points
        )
        shown = [MetricPointOut.model_validate(point) for point in points]
        series.append(MetricSeries(name=name, points=shown))
    return MetricsOut(names=known, series=series)


@router.get("/jobs/{job}/checkpoints", summary="Committed checkpoints of a job")
def list_checkpoints(job: JobDep, context: ContextDep) -> Page[CheckpointOut]:
    """Checkpoints that still exist, in step order, all on one page."""
    found = context.store.list_checkpoints(job.id)
    return Page(items=[CheckpointOut.model_validate(checkpoint) for checkpoint in found])


@router.post("/attempts/{attempt_id}/events", summary="Take records of a driver", tags=["drivers"])
def append_events(
    attempt_id: str, batch: EventBatch, principal: PrincipalDep, context: ContextDep
) -> EventAck:
    """Take what is new in a batch; sending it again is harmless.

    409 `sequence_gap` means that records before it are missing; `next_seq` is the one wanted.
    """
    if principal.kind == "attempt":
        context.security.attempts.check_may_report(attempt_id)
    with context.tracing.ingesting(attempt_id, len(batch.events)):
        ack = context.store.append_events(attempt_id, batch, time.time())
    context.telemetry.received_events(batch.events)
    return ack
