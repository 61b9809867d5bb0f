"""Routes for drivers, called with the token of their attempt: events in, secrets out."""

from __future__ import annotations

import logging
import math
import time

from fastapi import APIRouter, Response

from service.api.deps import ContextDep, PrincipalDep, ThreadRoute
from service.auth.security import may_read_secrets
from service.domain.auth import hash_of
from service.errors import Forbidden
from service.schemas.admin import AttemptLease, AttemptSecrets, ClaimSecrets
from trainer.protocol.events import EventAck, EventBatch

logger = logging.getLogger(__name__)
LATE_REPORTS_S = 3600.0
"""Seconds for which records of an ended attempt are taken: they may have waited in its outbox."""
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
    newest = context.store.get_job(attempt.job_id).current_attempt_id
    return AttemptLease(is_current=newest == attempt_id and attempt.end_reason is None)


@router.post("/secrets", summary="Secrets for the driver of an attempt")
def claim_secrets(
    attempt_id: str, body: ClaimSecrets, context: ContextDep, response: Response
) -> AttemptSecrets:
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
    response.headers["Cache-Control"] = "no-store"
    return AttemptSecrets(secrets=context.security.read_secrets(attempt.job_id))
