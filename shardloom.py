"""The SDK: a client of the service and typed job specs.

    import shardloom

    job = shardloom.submit(spec)      # a mapping, a JobSpec, or the path of a YAML file
    with shardloom.Client("http://127.0.0.1:8700") as client:
        job = client.wait(job.id)

Needs neither torch nor Ray. Everything here is also importable from where it is defined:
`service.client.client` and `trainer.spec`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from service.client.client import Code, ShardloomClient, Spec
from service.client.errors import (
    Conflict,
    CredentialsUnusable,
    ExportFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotSignedIn,
    ProblemError,
    ServerFault,
    ServiceUnreachable,
    ShardloomError,
    TraceLost,
    UnexpectedAnswer,
)
from service.client.transport import DEFAULT_URL, RetryPolicy
from service.schemas.jobs import JobDetail, JobPlan, JobSummary
from trainer.protocol.code_archive import CodeError
from trainer.spec import load_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

__all__ = [
    "DEFAULT_URL",
    "Client",
    "CodeError",
    "Conflict",
    "CredentialsUnusable",
    "ExportFailed",
    "Forbidden",
    "InvalidRequest",
    "JobDetail",
    "JobPlan",
    "JobSpec",
    "JobSummary",
    "NotFound",
    "NotSignedIn",
    "ProblemError",
    "RetryPolicy",
    "ServerFault",
    "ServiceUnreachable",
    "ShardloomError",
    "SpecError",
    "TraceLost",
    "UnexpectedAnswer",
    "load_spec",
    "submit",
]

Client = ShardloomClient


def submit(
    spec: Spec,
    *,
    url: str | None = None,
    api_key: str | None = None,
    code: Code | None = None,
    secrets: Mapping[str, str] | None = None,
    idempotency_key: str | None = None,
    force: bool = False,
) -> JobDetail:
    """Create one job and return it; it is not waited for.

    `code` is the folder with the code of `model.module`. `url` defaults to SHARDLOOM_URL, else to
    the local service; the others are as in `Client.submit`. Raises `SpecError` for a file that
    holds no valid spec, `InvalidRequest` with the faulty fields, `ServiceUnreachable`.
    """
    with Client(url or usual_url(), api_key=api_key) as client:
        return client.submit(
            spec, code=code, secrets=secrets, idempotency_key=idempotency_key, force=force
        )


def usual_url() -> str:
    """That of SHARDLOOM_URL, else of the local stack, else the default."""
    if url := os.environ.get("SHARDLOOM_URL"):
        return url
    # Imported here because a local stack needs Linux, and a client of a service elsewhere does not.
    from service.local.state import StackHome

    stack = StackHome().read_state()
    return DEFAULT_URL if stack is None else stack.url
