"""FastAPI dependencies: the app's context, principal, authorization, job, If-Match.

`authorize` runs before every handler and applies the rule of the route
(`service.auth.permissions`); `get_job` applies it again once the job, and with it the project, is
known. A job's ETag is its version, which changes with its status, requests and attempts but not
with its progress.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast

from fastapi import Depends, Header, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from service import errors
from service.api.views import detail_of
from service.auth.permissions import (
    Rule,
    Scope,
    allows,
    job_below,
    outside_roots,
    paths_of,
    roots_of,
    rule_of,
)
from service.auth.security import Security
from service.backends.base import Backend, ClusterWatch, check_cluster, hosts_for
from service.db.jobs import JobStore
from service.db.projects import ProjectStore
from service.db.sweeps import SweepStore
from service.db.webhooks import WebhookStore
from service.domain.auth import Principal, Role
from service.domain.models import Attempt, EndReason, Job
from service.domain.retries import advice_of
from service.jobs.code_archives import check_code
from service.jobs.export_runner import ExportRunner
from service.jobs.planning import GroupPlanner, check_fit
from service.jobs.run_storage import reach
from service.jobs.submit import check_places, find_job
from service.observability.metrics import ServiceMetrics
from service.observability.tracing import Tracing
from service.reconciler.loop import Reconciler
from service.schemas.jobs import JobDetail
from service.settings import Settings
from service.storage import DEADLINE_S, in_time
from trainer.layout.hosts import HostFacts, Site, site_of
from trainer.protocol.run_dir import RunDir
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec

# How long a reader waits for a cluster to tell of itself, where it did not lately: a busy one may
# take seconds.
CLUSTER_S = 5.0
Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def known_principal(connection: HTTPConnection) -> Principal | None:
    """The principal of a connection; None on public routes."""
    principal: Principal | None = connection.scope.get("state", {}).get("principal")
    return principal


async def get_principal(request: Request) -> Principal:
    """The principal of a request; raises `NotSignedIn`."""
    principal = known_principal(request)
    if principal is None:
        raise errors.NotSignedIn
    return principal


PrincipalDep = Annotated[Principal, Depends(get_principal)]


def current_rule(request: Request) -> Rule:
    return rule_of(request.method, request.scope["route"].path)


async def authorize(request: Request) -> None:
    """Judge a request by its route; raises `NotSignedIn`, `Forbidden` or `ProjectNotFound`."""
    rule, principal = current_rule(request), known_principal(request)
    if allows(rule, principal, request.path_params):
        return
    if principal is None:
        raise errors.NotSignedIn
    name = request.path_params.get("name", "")
    if rule.scope is Scope.PROJECT and principal.role_in(name) is None:
        raise errors.ProjectNotFound(name)
    raise errors.Forbidden(_why(rule, principal))


def _why(rule: Rule, principal: Principal) -> str:
    if rule.scope is Scope.ATTEMPT:
        return "only the driver of this attempt may do this, with the attempt's own token"
    where = "all projects" if rule.scope is Scope.EVERYTHING else "the project"
    return f"this needs the role {rule.role.label} in {where}; {_held(principal)}"


def _held(principal: Principal) -> str:
    roles = ", ".join(f"{role.label} in {name}" for name, role in sorted(principal.roles.items()))
    return f"{principal.name} has {roles or 'no role'}"


def check_project(principal: Principal, project: str, role: Role) -> None:
    """Raise `Forbidden` unless a role is held in a project."""
    if not principal.may(role, project):
        raise errors.Forbidden(
            f"this needs the role {role.label} in '{project}'; {_held(principal)}"
        )


def check_paths(spec: JobSpec, principal: Principal, settings: Settings, store: JobStore) -> None:
    """Raise `SpecError` for paths outside of the storage roots, or in runs of foreign projects.

    What a job writes beside its own run folder may only lie in runs of its own project.
    """
    paths = {} if principal.kind == "local" else paths_of(spec)
    with errors.reaching_storage("the paths of the spec: "):
        problems = outside_roots(spec, roots_of(settings))
        jobs = {
            name: in_time(Path(path), partial(_job_of, name, path, settings))
            for name, path in paths.items()
        }
    written = paths_of(spec, written=True)
    for name, path in paths.items():
        if (job_id := jobs[name]) is None:
            continue
        try:
            project = store.get_job(job_id).project
        except errors.JobNotFound:
            project = None
        may_read = principal.projects is None or (project and principal.role_in(project))
        why = "" if may_read else "is in the run folder of a job that is not in your projects"
        if name in written and project != spec.project:
            why = f"is not in the run folder of a job of '{spec.project}'"
        if why:
            problems.append(FieldProblem(name, "foreign_run", f"{path[:200]} {why}"))
    if problems:
        raise SpecError(problems)


def check_spec(
    spec: JobSpec, principal: Principal, context: Context, source: RunDir | None = None
) -> None:
    """Check project, paths, cluster, code and places of a spec before anything is made of it.

    `source` is as of `check_code`. Raises `SpecError`, `Forbidden` and `StorageUnavailable`.
    """
    check_project(principal, spec.project, Role.SUBMITTER)
    check_paths(spec, principal, context.settings, context.store)
    check_cluster(context.backend, spec)
    check_code(context.settings, spec, source)
    if not context.settings.runs_shared:
        check_places(spec)


def _job_of(field: str, path: str, settings: Settings) -> str | None:
    """Id of the job whose files a path leads into, as `job_below` gives it."""
    found = job_below(path, settings.runs_dir)
    if found is not None:
        return found
    found = job_below(path, settings.checkpoint_root)
    # A job that keeps its checkpoints there has a folder of its own in it.
    return None if field == "checkpoint.path" and found == "" else found


ForceQuery = Annotated[
    bool, Query(description="Also where the tables do not fit the memory of the workers.")
]


def most_workers(spec: JobSpec, context: Context) -> int | None:
    """The most workers of a cluster that grows by itself."""
    is_shared = spec.resources.cluster == "shared"
    return context.settings.cluster_max_workers if is_shared else None


def known_hosts(spec: JobSpec, context: Context) -> tuple[HostFacts, ...]:
    """Hosts that a job will find, as far as they are known: of a shared cluster as it told last,
    so that nobody waits long for one that hangs."""
    if spec.resources.cluster == "shared":
        is_reachable, _ = context.cluster.latest(CLUSTER_S)
        return context.cluster.hosts() if is_reachable else ()
    return hosts_for(context.backend, spec)


def check_fits(specs: Iterable[JobSpec], context: Context) -> None:
    """Raise `DoesNotFit` where for none of the specs the cluster's workers could hold the tables.

    The specs have the table sizes that their data tells. Of a shared cluster by what it told
    last, so that a submit never waits for it.
    """

    def site(spec: JobSpec) -> Site:
        is_shared = spec.resources.cluster == "shared"
        hosts = context.cluster.hosts() if is_shared else hosts_for(context.backend, spec)
        return site_of(spec, hosts, most_workers(spec, context))

    check_fit((spec, site(spec)) for spec in specs)


class ThreadRoute(APIRoute):
    """A route whose blocking handler costs one thread.

    Of one that is no coroutine FastAPI validates the answer in a second thread, which takes longer
    than that.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        handler = endpoint
        if not inspect.iscoroutinefunction(endpoint):

            @functools.wraps(endpoint)
            async def handler(*args: Any, **kwargs: Any) -> Any:
                return await run_in_threadpool(endpoint, *args, **kwargs)

        super().__init__(path, handler, **options)


@dataclass(frozen=True)
class Context:
    """Everything that a handler may use.

    `closing` is set when the server is about to stop, so that followed streams end.
    """

    settings: Settings
    store: JobStore
    backend: Backend
    telemetry: ServiceMetrics
    reconciler: Reconciler
    security: Security
    webhooks: WebhookStore
    tracing: Tracing
    projects: ProjectStore
    exports: ExportRunner
    planner: GroupPlanner
    cluster: ClusterWatch
    sweeps: SweepStore
    wake_sweeps: Callable[[], None]
    closing: threading.Event = field(default_factory=threading.Event)


async def get_context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(get_context)]


def get_job(
    context: ContextDep,
    request: Request,
    principal: PrincipalDep,
    job: Annotated[
        str, PathParameter(description="Id, unique prefix of one, or name (the newest job).")
    ],
) -> Job:
    """The job that the path names; raises `JobNotFound`, also for jobs of others' projects.

    Raises `Forbidden` where it may be seen but not what the route does be done with it.
    """
    found = find_job(context.store, job, principal.projects)
    check_project(principal, found.project, current_rule(request).role)
    return found


JobDep = Annotated[Job, Depends(get_job)]


async def wants_stream(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


StreamDep = Annotated[bool, Depends(wants_stream)]


def on_storage(
    deadline_s: float = DEADLINE_S,
) -> Callable[[Callable[Given, Answer]], Callable[Given, Answer]]:
    """For handlers that use run storage: they raise `StorageUnavailable` where that hangs."""

    def decorate(handler: Callable[Given, Answer]) -> Callable[Given, Answer]:
        @functools.wraps(handler)
        def handle(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
            context = cast(Context, kwargs["context"])
            call = partial(handler, *args, **kwargs)
            return reach(context.settings, call, deadline_s, _owner_in(kwargs))

        return handle

    return decorate


def _owner_in(arguments: Mapping[str, object]) -> str:
    """The id of the job that a handler is called for, or whose attempt it is called for."""
    match arguments:
        case {"job": Job(id=job_id)} | {"attempt": Attempt(job_id=job_id)}:
            return job_id
    return ""


def download(
    context: Context, chunks: Iterator[bytes], job: Job, name: str, media_type: str
) -> StreamingResponse:
    """A file that is read of a job while it is sent, each chunk within the deadline."""
    take = partial(next, chunks, None)
    read = partial(in_time, context.settings.runs_dir, take, DEADLINE_S, job.id)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(iter(read, None), media_type=media_type, headers=headers)


# A strong tag in a list; what others there are in it were never given out.
_TAG = re.compile(r'(?:^|,)\s*"(\d{1,18})"\s*(?=,|$)')


async def if_match_versions(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            description=(
                "`ETag` of the job as it was read, or a list of them: 412 if it has changed since. "
                'The comparison is strong (RFC 9110): a weak tag (`W/"7"`) never matches.'
            ),
            examples=['"7"', '"7", "8"'],
        ),
    ] = None,
) -> frozenset[int] | None:
    """The versions that a change is for; None where any will do.

    Raises `VersionUnknown` where no tag was ever given out.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    found = _TAG.findall(if_match)
    if not found:
        raise errors.VersionUnknown(if_match[:40])
    return frozenset(map(int, found))


VersionsDep = Annotated[frozenset[int] | None, Depends(if_match_versions)]


def with_etag(job: Job, context: Context, response: Response) -> JobDetail:
    """A job as the body of a response, whose ETag is its version."""
    response.headers["ETag"] = f'"{job.version}"'
    names = list(context.security.keys.secrets_of(job.id))
    known: dict[str, object] = {"secret_names": names}
    if job.reason is EndReason.RETRIES_EXHAUSTED:
        for last in context.store.list_attempts(job.id)[-1:]:
            known["advice"] = advice_of(job.reason, last.end_reason)
    detail = detail_of(context.reconciler.placed(job), context.settings)
    return detail.model_copy(update=known)
