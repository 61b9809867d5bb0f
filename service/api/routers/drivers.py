"""Routes for drivers, called with the token of their attempt: events in, secrets out."""

from __future__ import annotations

import math
import time

from fastapi import APIRouter, Response

from service.api.deps import ContextDep, PrincipalDep
from service.auth.security import may_read_secrets
from service.errors import Forbidden
from service.schemas.admin import AttemptSecrets
from trainer.protocol.events import EventAck, EventBatch

LATE_REPORTS_S = 3600.0
"""Seconds for which records of an ended attempt are taken: they may have waited in its outbox."""
router = APIRouter(prefix="/v1/attempts/{attempt_id}", tags=["drivers"])


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


@router.get("/secrets", summary="Secrets for the driver of an attempt")
def get_secrets(attempt_id: str, context: ContextDep, response: Response) -> AttemptSecrets:
    """Environment variables of the job, for an attempt that starts, with its own token."""
    attempt = context.store.get_attempt(attempt_id)
    if not may_read_secrets(context.store.get_job(attempt.job_id), attempt):
        raise Forbidden(f"attempt {attempt_id} does not start now: only its start needs secrets")
    response.headers["Cache-Control"] = "no-store"
    return AttemptSecrets(secrets=context.security.read_secrets(attempt.job_id))
