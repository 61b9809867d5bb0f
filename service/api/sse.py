"""Server-sent events: looks for news again and again until there will be no more.

A stream sends one event per item with its cursor as the event's id, so that a client which
reconnects with `Last-Event-ID` goes on where it was; comments while nothing happens; and an
`end` event once the job has ended and everything was sent. A stream that stops without `end`
was cut off (the server stops, the store is away): the client should reconnect.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import BaseModel

from service.api.context import Context
from service.domain import JobStatus
from service.errors import ServiceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """One event of a stream: `cursor` names what comes after it."""

    name: str
    cursor: str
    body: BaseModel


@dataclass(frozen=True)
class News:
    """What one look found; `ended` is the status of a job that will bring nothing more."""

    items: list[Item]
    ended: JobStatus | None = None


def stream(look: Callable[[], News], context: Context) -> StreamingResponse:
    """Follow `look`, which blocks on storage and is therefore called in a thread."""
    return StreamingResponse(
        _frames(look, context),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _frames(look: Callable[[], News], context: Context) -> AsyncIterator[bytes]:
    with context.telemetry.following():
        async for frame in _follow(look, context):
            yield frame


async def _follow(look: Callable[[], News], context: Context) -> AsyncIterator[bytes]:
    poll_s, heartbeat_s = context.settings.stream_poll_s, context.settings.stream_heartbeat_s
    # A first comment shows the client that it is connected before anything happens.
    silent_s = heartbeat_s
    while not context.closing.is_set():
        try:
            news = await run_in_threadpool(look)
        except ServiceError as error:
            logger.warning("a followed stream was cut off: %s", error)
            return
        for item in news.items:
            yield _frame(item)
        if news.ended is not None:
            yield format_sse_event(event="end", data_str=json.dumps({"status": news.ended}))
            return
        if news.items:
            silent_s = 0.0
            continue
        if silent_s >= heartbeat_s:
            yield KEEPALIVE_COMMENT
            silent_s = 0.0
        await asyncio.sleep(poll_s)
        silent_s += poll_s


def _frame(item: Item) -> bytes:
    return format_sse_event(event=item.name, id=item.cursor, data_str=item.body.model_dump_json())
