"""Routes of projects and their quotas, the queue, the cluster, health and Prometheus metrics."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response, status
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.deps import (
    CLUSTER_S,
    Context,
    ContextDep,
    PrincipalDep,
    ThreadRoute,
    known_principal,
)
from service.api.views import projects_view, queue_view
from service.domain.models import Project
from service.errors import ProjectNotFound, ReconcilerDied, StoreUnavailable
from service.files import make_writable
from service.schemas.admin import ClusterOut, ProjectOut, Quotas
from service.schemas.common import Page
from service.schemas.jobs import QueueOut
from service.storage import hanging, in_time
from trainer.spec.base import NAME_PATTERN

logger = logging.getLogger(__name__)
projects_router = APIRouter(prefix="/v1/projects", tags=["projects"], route_class=ThreadRoute)
# Kubernetes waits for 5 s.
_PROBE_S = 1.0
NamePath = Annotated[str, Path(pattern=NAME_PATTERN, examples=["ads"])]


@projects_router.get("", summary="List projects")
def list_projects(context: ContextDep, principal: PrincipalDep) -> Page[ProjectOut]:
    """Every project that has quotas or jobs that have not ended, by name, all on one page."""
    found, visible = _projects(context), principal.projects
    return Page(items=[each for each in found if visible is None or each.name in visible])


def _projects(context: Context) -> list[ProjectOut]:
    return projects_view(context.store.list_live_jobs(), context.projects.list())


@projects_router.get("/{name}", summary="Read a project")
def get_project(name: NamePath, context: ContextDep) -> ProjectOut:
    """Quotas and use of a project; 404 for one without quotas whose jobs have all ended."""
    for project in _projects(context):
        if project.name == name:
            return project
    raise ProjectNotFound(name)


@projects_router.put("/{name}", summary="Set the quotas of a project")
def set_quotas(name: NamePath, body: Quotas, context: ContextDep) -> ProjectOut:
    """Set both quotas; null is no limit. What runs already is left to run."""
    wanted = Project(name, body.max_workers, body.max_running_jobs)
    context.projects.put(wanted, time.time())
    context.reconciler.wake()
    return get_project(name, context)


@projects_router.delete(
    "/{name}", summary="Remove the quotas of a project", status_code=status.HTTP_204_NO_CONTENT
)
def delete_project(name: NamePath, context: ContextDep) -> None:
    """Take the quotas away; the project's jobs stay. 404 if it has none."""
    context.projects.remove(name)
    context.reconciler.wake()


queue_router = APIRouter(prefix="/v1/queue", tags=["queue"], route_class=ThreadRoute)


@queue_router.get("", summary="Read the queue")
def get_queue(context: ContextDep, principal: PrincipalDep) -> QueueOut:
    """Waiting jobs in the order of their turn, with the reason why each waits; running jobs."""
    live = [context.reconciler.placed(job) for job in context.store.list_live_jobs()]
    return queue_view(live, principal.projects)


system_router = APIRouter(tags=["service"], route_class=ThreadRoute)


@system_router.get("/v1/cluster", summary="The cluster behind the service")
def get_cluster(context: ContextDep) -> ClusterOut:
    """Whether it answers, and its hosts, as of the last ten seconds; always 200."""
    is_reachable, message = context.cluster.latest(CLUSTER_S)
    return ClusterOut(
        reachable=bool(is_reachable),
        backend=context.backend.name,
        address=context.backend.address,
        message=message,
        max_workers=context.settings.cluster_max_workers,
        hosts=list(context.cluster.hosts() if is_reachable else ()),
    )


@system_router.get("/healthz", summary="Whether the process answers")
async def get_health() -> dict[str, str]:
    """200 as long as requests are answered at all, with or without threads, storage and store."""
    return {"status": "ok"}


@system_router.get("/readyz", summary="Whether the service can do its work")
def get_readiness(request: Request, context: ContextDep) -> dict[str, Any]:
    """200 when the store answers and is migrated and the reconciler is at work, else 503.

    With credentials it says more: a cluster or run storage that is away is told, with the reason,
    but does not make the service unready. It still shows jobs and takes them, and starts them when
    both are back.
    """
    if context.reconciler.has_died:
        raise ReconcilerDied
    if known_principal(request) is None:
        try:
            context.store.ping()
        except StoreUnavailable as error:
            logger.warning("not ready: %s", error)
            why = "the database does not answer, or is at another migration; the log says more"
            raise StoreUnavailable(why) from None
        return {"status": "ready"}
    reachable, message = context.cluster.latest()
    last_pass_s = max(0.0, time.time() - context.reconciler.dispatched_at)
    return {
        "status": "ready",
        "store": context.store.ping(),
        "reconciler": {"last_pass_s": round(last_pass_s, 1)},
        "storage": {"runs": _state_of(context.settings.runs_dir), "hanging": hanging()},
        "cluster": {"reachable": reachable, "message": message},
    }


def _state_of(folder: FilePath) -> str:
    """`writable`, or why run storage is not."""
    try:
        in_time(folder, partial(make_writable, folder), _PROBE_S)
    except OSError as error:
        return str(error)
    return "writable"


@system_router.get("/metrics", summary="Prometheus metrics", response_class=Response)
def get_prometheus(context: ContextDep) -> Response:
    """Counters of the service in Prometheus' text format."""
    return Response(context.telemetry.render(), media_type=CONTENT_TYPE_LATEST)


routers = (system_router, projects_router, queue_router)
