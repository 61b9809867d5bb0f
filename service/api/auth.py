"""Rights in the handlers' hands: who asks, and whether a project or a job is theirs.

`authorize` runs before every handler and judges by `service.security.policy`; `get_job` of
`service.api.context` judges again once the job, and with it the project, is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from service.domain import Job
from service.errors import ProjectNotFound
from service.job_errors import JobNotFound
from service.security.errors import Forbidden, NotSignedIn
from service.security.paths import (
    job_of_checkpoints,
    job_of_path,
    outside_roots,
    paths_of,
    paths_written,
    roots_of,
)
from service.security.policy import Rule, Scope, Verdict, judge, rule_of
from service.security.principal import Principal, Role
from service.settings import Settings
from service.store.base import JobStore
from trainer.spec import FieldProblem, JobSpec, SpecError


def known_principal(connection: HTTPConnection) -> Principal | None:
    """Whoever asks; None on public routes, where nobody was asked."""
    principal: Principal | None = connection.scope.get("state", {}).get("principal")
    return principal


async def get_principal(request: Request) -> Principal:
    """Whoever asks; raises `NotSignedIn`."""
    principal = known_principal(request)
    if principal is None:
        raise NotSignedIn
    return principal


PrincipalDep = Annotated[Principal, Depends(get_principal)]


def current_rule(request: Request) -> Rule:
    """What the route of a request asks for."""
    return rule_of(request.method, request.scope["route"].path)


async def authorize(request: Request) -> None:
    """Judge a request by its route; raises `NotSignedIn`, `Forbidden` or `ProjectNotFound`."""
    rule, principal = current_rule(request), known_principal(request)
    match judge(rule, principal, request.path_params):
        case Verdict.NOT_SIGNED_IN:
            raise NotSignedIn
        case Verdict.FORBIDDEN:
            assert principal is not None
            name = request.path_params.get("name", "")
            if rule.scope is Scope.PROJECT and principal.role_in(name) is None:
                raise ProjectNotFound(name)
            raise Forbidden(_why(rule, principal))


def _why(rule: Rule, principal: Principal) -> str:
    if rule.scope is Scope.ATTEMPT:
        return "only the driver of this attempt may do this, with the attempt's own token"
    where = "all projects" if rule.scope is Scope.EVERYTHING else "the project"
    return f"this wants the role {rule.role.label} in {where}; {_held(principal)}"


def _held(principal: Principal) -> str:
    roles = ", ".join(f"{role.label} in {name}" for name, role in sorted(principal.roles.items()))
    return f"{principal.name} has {roles or 'no role'}"


def check_project(principal: Principal, project: str, role: Role) -> None:
    """Raise `Forbidden` unless a role is held in a project."""
    if not principal.may(role, project):
        raise Forbidden(f"this wants the role {role.label} in '{project}'; {_held(principal)}")


def check_job(principal: Principal, job: Job, role: Role) -> None:
    """Raise `Forbidden` for lack of a role, `JobNotFound` where the job may not even be seen."""
    if principal.role_in(job.project) is None:
        raise JobNotFound(job.id)
    check_project(principal, job.project, role)


def check_paths(spec: JobSpec, principal: Principal, settings: Settings, store: JobStore) -> None:
    """Raise `SpecError` for paths outside of the storage roots, or in runs of foreign projects.

    What a job writes beside its own run folder may only lie in runs of its own project.
    """
    problems = outside_roots(spec, roots_of(settings))
    written = paths_written(spec)
    for field, path in paths_of(spec).items():
        job_id = _job_of(field, path, settings)
        if job_id is None or principal.kind == "local":
            continue
        project = _project_of(job_id, store)
        if field in written and not _may_write_run(project, spec, principal):
            message = f"{path[:200]} is not in the run folder of a job of '{spec.project}'"
            problems.append(FieldProblem(field, "foreign_run", message))
        elif not _may_read_run(project, principal):
            message = f"{path[:200]} is in the run folder of a job that is not in your projects"
            problems.append(FieldProblem(field, "foreign_run", message))
    if problems:
        raise SpecError(problems)


def _job_of(field: str, path: str, settings: Settings) -> str | None:
    """Id of the job whose files a path leads into, as `job_of_path` gives it."""
    found = job_of_path(Path(path), settings.runs_dir)
    if found is not None:
        return found
    found = job_of_checkpoints(path, settings.checkpoint_root)
    # A job that keeps its checkpoints there has a folder of its own in it.
    return None if field == "checkpoint.path" and found == "" else found


def _project_of(job_id: str, store: JobStore) -> str | None:
    try:
        return store.get_job(job_id).project
    except JobNotFound:
        return None


def _may_read_run(project: str | None, principal: Principal) -> bool:
    if principal.projects is None:
        return True
    return project is not None and principal.role_in(project) is not None


def _may_write_run(project: str | None, spec: JobSpec, principal: Principal) -> bool:
    return project == spec.project and principal.may(Role.SUBMITTER, spec.project)
