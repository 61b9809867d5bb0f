"""Routes for drivers, called with the token of their attempt: events in, secrets out.

Where hosts share no run storage the files of the run, too (`trainer.protocol.mirror`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response, status
from fastapi.concurrency import run_in_threadpool

from service.api.deps import Context, ContextDep, PrincipalDep, ThreadRoute, on_storage
from service.auth.security import may_read_secrets
from service.domain.auth import hash_of
from service.domain.models import Attempt
from service.errors import Forbidden, RunsAreShared
from service.jobs.run_storage import (
    append_log,
    append_stream,
    keep_piece,
    list_exchanged,
    reach,
    read_exchanged,
    remove_exchanged,
)
from service.schemas.admin import (
    AttemptLease,
    AttemptSecrets,
    AttemptToken,
    ClaimSecrets,
    ClaimToken,
    LogKept,
    RunFileKept,
    RunFiles,
)
from service.settings import Settings
from trainer.protocol.events import EventAck, EventBatch

logger = logging.getLogger(__name__)
LATE_REPORTS_S = 3600.0
"""Seconds for which records of an ended attempt are taken: they may have waited in its outbox."""
COLLECT_AFTER_S = 10.0
# Of one file that a host sends.
MAX_FILE_BYTES = 2**50
_BYTES = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
claims_router = APIRouter(prefix="/v1", tags=["drivers"], route_class=ThreadRoute)
router = APIRouter(prefix="/v1/attempts/{attempt_id}", tags=["drivers"], route_class=ThreadRoute)


@router.post("/events", summary="Take records of a driver")
def append_events(
    attempt_id: str, batch: EventBatch, principal: PrincipalDep, context: ContextDep
) -> EventAck:
    """Take what is new in a batch; sending it again is harmless.

    409 `sequence_gap` means that records before it are missing; `next_seq` is the one wanted.
    """
    late_s = LATE_REPORTS_S if principal.kind == "attempt" else math.inf
    with context.tracing.ingesting(attempt_id, len(batch.events)):
        ack = context.store.append_events(attempt_id, batch, time.time(), late_s=late_s)
    context.telemetry.received_events(batch.events)
    return ack


@router.get("/lease", summary="Whether an attempt is to run")
def get_lease(attempt_id: str, context: ContextDep) -> AttemptLease:
    """For a driver that starts: a submission may come after its job has ended or gone on."""
    attempt = context.store.get_attempt(attempt_id)
    return AttemptLease(is_current=_is_current(attempt, context))


@router.post("/secrets", summary="Secrets for the driver of an attempt")
def claim_secrets(attempt_id: str, body: ClaimSecrets, context: ContextDep) -> AttemptSecrets:
    """Environment variables of the job, for an attempt that starts, with its own token.

    The first claim gets them, as often as it is sent; any other one is refused.
    """
    attempt = context.store.get_attempt(attempt_id)
    if not may_read_secrets(context.store.get_job(attempt.job_id), attempt):
        raise Forbidden(f"attempt {attempt_id} does not start now: only its start needs secrets")
    if not context.security.keys.claim_secrets(attempt_id, hash_of(body.claim)):
        logger.warning("attempt %s: a second process asks for its secrets", attempt_id)
        raise Forbidden(
            f"the secrets of attempt {attempt_id} were given to another process: if that was not "
            "its driver, somebody else has read its token, and the secrets want to be changed"
        )
    return AttemptSecrets(secrets=context.security.read_secrets(attempt.job_id))


# ---- hosts without run storage


@claims_router.post("/attempts:claim", summary="Token for the driver of an attempt")
def claim_token(body: ClaimToken, context: ContextDep) -> AttemptToken:
    """The attempt's token, for the code in its driver's environment.

    Whoever may use the cluster can read that: the first claim gets the token, any other is refused.
    """
    keys = context.security.master
    if context.settings.runs_shared or not keys.is_mac("attempt-codes", body.attempt_id, body.code):
        raise Forbidden("no attempt has this code, or its driver finds its token on run storage")
    attempt = context.store.get_attempt(body.attempt_id)
    if not _is_current(attempt, context):
        raise Forbidden(f"attempt {body.attempt_id} has ended, or another one has followed")
    if not context.security.keys.claim_secrets(body.attempt_id, hash_of(body.claim)):
        logger.warning("attempt %s: a second process asks for its token", body.attempt_id)
        raise Forbidden(
            f"the token of attempt {body.attempt_id} was given to another process: if that was not "
            "its driver, somebody else on the cluster has read its code"
        )
    return AttemptToken(token=keys.attempt_token(body.attempt_id))


def get_exchanging(attempt_id: str, context: ContextDep) -> Attempt:
    """The attempt whose hosts exchange files; raises `RunsAreShared`, or `Forbidden` once over."""
    if context.settings.runs_shared:
        raise RunsAreShared
    attempt = context.store.get_attempt(attempt_id)
    if attempt.ended_at is not None and time.time() - attempt.ended_at > LATE_REPORTS_S:
        raise Forbidden(f"attempt {attempt_id} has long ended")
    return attempt


AttemptDep = Annotated[Attempt, Depends(get_exchanging)]
AtDep = Annotated[
    int | None, Query(ge=0, le=MAX_FILE_BYTES, description="Where it has to end, in bytes.")
]


@router.get("/files", summary="Files of the run that hosts take")
@on_storage()
def list_files(attempt: AttemptDep, context: ContextDep, streams: bool = False) -> RunFiles:
    """With `streams` also those of records, of all attempts, whose version is their size."""
    current = context.store.get_job(attempt.job_id).current_attempt_id
    found = list_exchanged(context.settings, attempt, streams=streams)
    return RunFiles(current=current, files=found)


@router.get("/files/{path:path}", summary="A file of the run", response_class=Response)
@on_storage()
def read_file(
    path: str,
    attempt: AttemptDep,
    context: ContextDep,
    at: Annotated[int, Query(ge=0, le=MAX_FILE_BYTES, description="Of a stream of records.")] = 0,
) -> Response:
    content = read_exchanged(context.settings, attempt, path, at)
    return Response(content, media_type="application/octet-stream")


@router.put("/files/{path:path}", summary="Take a piece of a file of the run", openapi_extra=_BYTES)
async def put_file(
    request: Request,
    path: str,
    attempt: AttemptDep,
    context: ContextDep,
    at: Annotated[int, Query(ge=0, le=MAX_FILE_BYTES, description="Where the piece begins.")],
    total: Annotated[int, Query(ge=0, le=MAX_FILE_BYTES, description="Size of the file, bytes.")],
) -> RunFileKept:
    """The file is in place once its last piece is there. A piece that begins elsewhere than at
    the end of the one before is left out, as `size` says."""
    piece = await request.body()
    keep = partial(keep_piece, context.settings, attempt, path, piece, at=at, total=total)

    def check_and_keep() -> tuple[str | None, int]:
        _check_writes(attempt, path, context)
        return reach(context.settings, keep, owner=attempt.job_id)

    version, size = await run_in_threadpool(check_and_keep)
    return RunFileKept(version=version, size=size)


@router.delete("/files/{path:path}", summary="Remove a file of the run", status_code=204)
@on_storage()
def remove_file(path: str, attempt: AttemptDep, context: ContextDep) -> None:
    _check_writes(attempt, path, context)
    remove_exchanged(context.settings, attempt, path)


@router.post("/logs/{source}", summary="Append to a log", openapi_extra=_BYTES)
async def post_log(
    request: Request,
    source: str,
    attempt: AttemptDep,
    context: ContextDep,
    response: Response,
    at: AtDep = None,
) -> LogKept:
    """409 where the log ends elsewhere: another host wrote it too, or an answer was lost."""
    piece = await request.body()
    return await _append(append_log, context, attempt, source, piece, at, response)


@router.post("/outbox/{stream}", summary="Append to a stream of records", openapi_extra=_BYTES)
async def post_stream(
    request: Request,
    stream: str,
    attempt: AttemptDep,
    context: ContextDep,
    response: Response,
    at: AtDep = None,
) -> LogKept:
    """409 where the stream ends elsewhere. Its records count once they come by `/events`, or with
    the end of the attempt."""
    piece = await request.body()
    kept = await _append(append_stream, context, attempt, stream, piece, at, response)
    if attempt.ended_at is not None and kept.taken:
        # Its records were collected: once more, when the others of these may be here, too.
        due = time.time() + COLLECT_AFTER_S
        await run_in_threadpool(context.store.set_collection, attempt.id, due)
    return kept


async def _append(
    append: Callable[[Settings, Attempt, str, bytes, int | None], tuple[int, bool]],
    context: Context,
    attempt: Attempt,
    name: str,
    piece: bytes,
    at: int | None,
    response: Response,
) -> LogKept:
    keep = partial(append, context.settings, attempt, name, piece, at)
    owner = attempt.job_id
    end, is_taken = await run_in_threadpool(reach, context.settings, keep, owner=owner)
    if piece and not is_taken:
        response.status_code = status.HTTP_409_CONFLICT
    return LogKept(end=end, taken=is_taken)


def _check_writes(attempt: Attempt, path: str, context: Context) -> None:
    """Raise `Forbidden` for what is the run's where another attempt has it."""
    if not path.startswith(f"attempts/{attempt.id}/") and not _is_current(attempt, context):
        raise Forbidden(f"attempt {attempt.id} does not have the run folder any more")


def _is_current(attempt: Attempt, context: Context) -> bool:
    return context.store.get_job(attempt.job_id).is_run_by(attempt)
