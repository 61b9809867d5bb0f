"""What the handlers share: one `Context` per app, and small dependencies over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Path, Request

from service.api.auth import PrincipalDep, check_job, current_rule
from service.backends.base import Backend
from service.domain import Job
from service.exports import ExportRunner
from service.jobs import find_job
from service.security.bundle import Security
from service.settings import Settings
from service.store.base import JobStore
from service.store.projects import ProjectStore
from service.store.webhooks import WebhookStore
from service.telemetry import Telemetry
from service.tracing import Tracing


@dataclass(frozen=True)
class Context:
    """Everything that a handler may use. `wake` makes the reconciler look at once.

    `has_died` says whether the reconciler gave up; `closing` is set when the server is about to
    stop, so that followed streams end.
    """

    settings: Settings
    store: JobStore
    backend: Backend
    telemetry: Telemetry
    wake: Callable[[], None]
    has_died: Callable[[], bool]
    security: Security
    webhooks: WebhookStore
    tracing: Tracing
    projects: ProjectStore
    exports: ExportRunner
    closing: threading.Event = field(default_factory=threading.Event)


def get_context(request: Request) -> Context:
    """The context of the app that serves a request."""
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(get_context)]


def get_job(
    context: ContextDep,
    request: Request,
    principal: PrincipalDep,
    job: Annotated[str, Path(description="Id, unique prefix of one, or name (the newest job).")],
) -> Job:
    """The job that the path names; raises `JobNotFound`, also for jobs of others' projects.

    Raises `Forbidden` where it may be seen but not what the route does be done with it.
    """
    found = find_job(context.store, job, principal.projects)
    check_job(principal, found, current_rule(request).role)
    return found


JobDep = Annotated[Job, Depends(get_job)]


def wants_stream(request: Request) -> bool:
    """Whether the client asked for server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


StreamDep = Annotated[bool, Depends(wants_stream)]
