"""Secrets of jobs: in with the submission, out to the attempt's own driver, never elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fastapi import APIRouter, Response

from service.api.context import Context, ContextDep
from service.api.security_schemas import AttemptSecrets
from service.errors import StorageUnavailable
from service.run_files import run_dir_of, write_text
from service.security.attempts import may_read_secrets
from service.security.errors import Forbidden

router = APIRouter(prefix="/v1/attempts/{attempt_id}", tags=["drivers"])


@router.get("/secrets", summary="Secrets for the driver of an attempt")
def get_secrets(attempt_id: str, context: ContextDep, response: Response) -> AttemptSecrets:
    """Environment variables of the job, for an attempt that starts, with its own token."""
    attempt = context.store.get_attempt(attempt_id)
    if not may_read_secrets(context.store.get_job(attempt.job_id), attempt):
        raise Forbidden(f"attempt {attempt_id} does not start now: only its start needs secrets")
    response.headers["Cache-Control"] = "no-store"
    return AttemptSecrets(secrets=context.security.open_secrets(attempt.job_id))


def keep_secrets(context: Context, job_id: str, secrets: Mapping[str, str]) -> None:
    """Keep the secrets of a job that is about to be stored, and tell its driver of them.

    Raises `StorageUnavailable` or `StoreUnavailable`.
    """
    if not secrets:
        return
    context.security.seal_secrets(job_id, secrets)
    path = run_dir_of(context.settings, job_id).secret_names_path
    try:
        write_text(path, json.dumps(sorted(secrets)))
    except OSError as error:
        raise StorageUnavailable(str(error)) from error
