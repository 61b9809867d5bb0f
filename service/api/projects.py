"""Projects: quotas of workers and running jobs, and what is in use."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, status

from service.api.auth import PrincipalDep
from service.api.context import Context, ContextDep
from service.api.queue_schemas import ProjectOut, Quotas
from service.api.schemas import Page
from service.errors import ProjectNotFound
from service.projects import Project, Usage, with_unlisted
from service.queue_view import project_view, usage_by_project
from trainer.spec import NAME_PATTERN

router = APIRouter(prefix="/v1/projects", tags=["projects"])

NamePath = Annotated[str, Path(pattern=NAME_PATTERN, examples=["ads"])]


@router.get("", summary="List projects")
def list_projects(context: ContextDep, principal: PrincipalDep) -> Page[ProjectOut]:
    """Every project that has quotas or jobs that have not ended, by name, all on one page."""
    usage = usage_by_project(context.store.list_live_jobs())
    known = with_unlisted(context.projects.list(), usage)
    visible = principal.projects
    return Page(
        items=[
            project_view(project, usage.get(project.name, Usage()))
            for project in known
            if visible is None or project.name in visible
        ]
    )


@router.get("/{name}", summary="Read a project")
def get(name: NamePath, context: ContextDep) -> ProjectOut:
    """Quotas and use of a project; 404 for one without quotas whose jobs have all ended."""
    usage = usage_by_project(context.store.list_live_jobs())
    try:
        project = context.projects.get(name)
    except ProjectNotFound:
        if name not in usage:
            raise
        project = Project(name)
    return project_view(project, usage.get(name, Usage()))


@router.put("/{name}", summary="Set the quotas of a project")
def put(name: NamePath, body: Quotas, context: ContextDep) -> ProjectOut:
    """Set both quotas; null is no limit. What runs already is left to run."""
    wanted = Project(name, body.max_workers, body.max_running_jobs)
    return _changed(context, context.projects.put(wanted, time.time()))


@router.delete(
    "/{name}", summary="Remove the quotas of a project", status_code=status.HTTP_204_NO_CONTENT
)
def delete(name: NamePath, context: ContextDep) -> None:
    """Take the quotas away; the project's jobs stay. 404 if it has none."""
    context.projects.remove(name)
    context.wake()


def _changed(context: Context, project: Project) -> ProjectOut:
    context.wake()
    usage = usage_by_project(context.store.list_live_jobs())
    return project_view(project, usage.get(project.name, Usage()))
