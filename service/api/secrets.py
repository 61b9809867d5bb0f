"""Secrets of jobs: in with the submission, out to the attempt's own driver, never elsewhere."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service.api.context import ContextDep
from service.api.security_schemas import AttemptSecrets
from service.errors import Forbidden

router = APIRouter(prefix="/v1/attempts/{attempt_id}", tags=["drivers"])


@router.get("/secrets", summary="Secrets for the driver of an attempt")
def get_secrets(attempt_id: str, context: ContextDep, response: Response) -> AttemptSecrets:
    """Environment variables of the job, for a live attempt with its own token."""
    attempt = context.store.get_attempt(attempt_id)
    if attempt.end_reason is not None:
        raise Forbidden(f"attempt {attempt_id} has ended, and with it its right to secrets")
    response.headers["Cache-Control"] = "no-store"
    return AttemptSecrets(secrets=context.security.open_secrets(attempt.job_id))
