"""Routes of jobs: submit, list, read, lifecycle requests, clone, restart, delete, resize, drain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response, status
from pydantic import Field

from service.api.deps import (
    Context,
    ContextDep,
    ForceQuery,
    JobDep,
    PrincipalDep,
    ThreadRoute,
    VersionsDep,
    check_fits,
    check_project,
    check_spec,
    known_hosts,
    most_workers,
    on_storage,
    with_etag,
)
from service.api.planning import plan_of
from service.api.views import attempt_view, summary_of
from service.auth.permissions import roots_of, without_lost_place
from service.domain.auth import Principal, Role
from service.domain.job_filter import JobFilter
from service.domain.models import Job
from service.errors import IdempotencyConflict, reaching_storage
from service.jobs import actions
from service.jobs.run_storage import run_dir_of
from service.jobs.submit import check_data, submit_job
from service.schemas.common import Page
from service.schemas.jobs import (
    AttemptOut,
    CloneJob,
    DeletedJob,
    DrainHost,
    JobDetail,
    JobPlan,
    JobSummary,
    ResizeJob,
    ResizeRequestOut,
    RestartJob,
    SubmitJob,
)
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=ThreadRoute)
# Checkpoints may be many files; a deletion that takes longer goes on, and can be asked for again.
_DELETION_S = 300.0
KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description=(
            "The same key, spec and secrets make one job, however often the request is sent."
        ),
        examples=["5f0c9f6e-2f3c-4b36-9d6b-3f1b7f1e2a11"],
    ),
]


@router.post(
    "",
    summary="Submit a job, or check a spec with `dry_run`",
    status_code=status.HTTP_201_CREATED,
    response_model=JobDetail | JobPlan,
    responses={200: {"model": JobPlan, "description": "The plan of a dry run."}},
)
def submit(
    body: SubmitJob,
    context: ContextDep,
    principal: PrincipalDep,
    response: Response,
    idempotency_key: KeyHeader = None,
    dry_run: Annotated[bool, Query(description="Check and plan only.")] = False,
    force: ForceQuery = False,
) -> JobDetail | JobPlan:
    """Check the spec and create a job; `Location` names it."""
    spec = validate_spec(body.spec)
    if dry_run:
        check_spec(spec, principal, context)
        sized = check_data(spec)
        response.status_code = status.HTTP_200_OK
        return plan_of(sized, known_hosts(spec, context), most_workers(spec, context))
    job = _create(spec, body.secrets, idempotency_key, principal, context, force=force)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return with_etag(job, context, response)


def _create(
    spec: JobSpec,
    secrets: Mapping[str, str],
    idempotency_key: str | None,
    principal: Principal,
    context: Context,
    *,
    force: bool,
    parent: str | None = None,
) -> Job:
    check_project(principal, spec.project, Role.SUBMITTER)
    source = None if parent is None else run_dir_of(context.settings, parent)

    def check(sized: JobSpec) -> None:
        if not force:
            check_fits([sized], context)

    began_at = time.time()
    job = submit_job(
        context.store,
        context.security.keys,
        context.settings,
        spec,
        secrets=context.security.encrypt_secrets(secrets),
        idempotency_key=idempotency_key,
        admit=lambda: check_spec(spec, principal, context, source),
        check=check,
        actor=principal.name,
        parent=parent,
    )
    if idempotency_key is not None and context.security.read_secrets(job.id) != secrets:
        raise IdempotencyConflict(idempotency_key)
    context.tracing.submitted(job, began_at)
    context.reconciler.wake()
    return job


class JobQuery(JobFilter):
    limit: int = Field(default=50, ge=1, le=200)


@router.get("", summary="List jobs, newest first")
def list_jobs(
    context: ContextDep, principal: PrincipalDep, query: Annotated[JobQuery, Query()]
) -> Page[JobSummary]:
    """One page of the jobs for which everything holds that is given."""
    jobs, following = context.store.list_jobs(query, projects=principal.projects, limit=query.limit)
    return Page(items=[summary_of(context.reconciler.placed(job)) for job in jobs], next=following)


@router.get("/{job}", summary="Read a job")
def get(job: JobDep, context: ContextDep, response: Response) -> JobDetail:
    """A job by id, by a unique prefix of it, or by name (the newest of that name)."""
    return with_etag(job, context, response)


def get_request(
    job: JobDep, context: ContextDep, principal: PrincipalDep, versions: VersionsDep
) -> Callable[..., Any]:
    """What asks something of the job for the caller: `request(action, **options of the action)`."""
    by = actions.ChangedBy(actor=principal.name, versions=versions)
    return lambda action, **options: action(
        context.store, context.settings, job.id, **by, **options
    )


RequestDep = Annotated[Callable[..., Any], Depends(get_request)]


def get_change(
    request: RequestDep, context: ContextDep, response: Response
) -> Callable[..., JobDetail]:
    """The same for what changes the job at once, which is the answer then."""

    def change(action: Callable[..., Job], **options: object) -> JobDetail:
        changed = request(action, **options)
        if changed.status.is_terminal:
            context.telemetry.job_ended(changed)
        context.reconciler.wake()
        return with_etag(changed, context, response)

    return change


ChangeDep = Annotated[Callable[..., JobDetail], Depends(get_change)]


@router.post("/{job}:cancel", summary="Cancel a job", status_code=status.HTTP_202_ACCEPTED)
def cancel(change: ChangeDep) -> JobDetail:
    """Ask a job to stop; it has stopped when its status says so. 409 if it has ended."""
    return change(actions.cancel_job)


@router.get("/{job}/attempts", summary="List the attempts of a job")
def list_attempts(job: JobDep, context: ContextDep) -> Page[AttemptOut]:
    """Attempts in order, all on one page."""
    attempts = context.store.list_attempts(job.id)
    return Page(items=[attempt_view(attempt) for attempt in attempts])


@router.post("/{job}:pause", summary="Pause a job", status_code=status.HTTP_202_ACCEPTED)
def pause(change: ChangeDep) -> JobDetail:
    """Let the workers save a checkpoint and leave; the job keeps its place in the queue.

    It has paused when its status says so. 409 if it has ended.
    """
    return change(actions.pause_job)


@router.post("/{job}:resume", summary="Resume a paused job", status_code=status.HTTP_202_ACCEPTED)
def resume(change: ChangeDep) -> JobDetail:
    """Let a paused job wait for its workers again, with its old place. 409 if it is not paused."""
    return change(actions.resume_job)


@router.post("/{job}:clone", summary="Clone a job", status_code=status.HTTP_201_CREATED)
def clone(
    job: JobDep,
    body: CloneJob,
    context: ContextDep,
    principal: PrincipalDep,
    response: Response,
    idempotency_key: KeyHeader = None,
    force: ForceQuery = False,
) -> JobDetail:
    """Submit the spec of a job again, with changes; `Location` names the new job.

    Secrets do not come along: give those that the clone needs.
    """
    spec = actions.cloned_spec(job, body.set, body.name)
    with reaching_storage("the paths of the spec: "):
        spec = without_lost_place(spec, job.spec, roots_of(context.settings))
    made = _create(
        spec, body.secrets, idempotency_key, principal, context, parent=job.id, force=force
    )
    response.headers["Location"] = f"/v1/jobs/{made.id}"
    return with_etag(made, context, response)


@router.post(
    "/{job}:restart", summary="Go on from a checkpoint", status_code=status.HTTP_202_ACCEPTED
)
def restart(change: ChangeDep, body: RestartJob | None = None) -> JobDetail:
    """Let a job that has ended, waits or is paused go on from one of its checkpoints.

    Its later checkpoints count no more, and are removed once a new one is committed. 409 while it
    has workers and where all its steps are trained, 404 for a checkpoint that it does not have.
    """
    wanted = body or RestartJob()
    return change(actions.restart_job, step=wanted.step, path=wanted.path)


@router.delete("/{job}", summary="Delete a job")
@on_storage(_DELETION_S)
def delete(
    job: JobDep,
    context: ContextDep,
    versions: VersionsDep,
    artifacts: Annotated[
        bool, Query(description="With its files: checkpoints, logs and traces.")
    ] = True,
) -> DeletedJob:
    """Delete a job that has ended. 409 while it lives; may be repeated if it was cut off.

    Checkpoints on object storage stay: the answer says where.
    """
    left = actions.delete_job(
        context.store, context.settings, job.id, artifacts=artifacts, versions=versions
    )
    return DeletedJob(id=job.id, left=left)


@router.post(
    "/{job}/resize",
    summary="Ask for another number of workers",
    status_code=status.HTTP_202_ACCEPTED,
)
@on_storage()
def resize(
    body: ResizeJob, job: JobDep, context: ContextDep, request: RequestDep
) -> ResizeRequestOut:
    """Grow or shrink a running job; the timeline tells when it has (`resized`).

    409 if the job does not run. Asking again for the same size changes nothing.
    """
    asked = request(actions.request_resize, num_workers=body.workers)
    return ResizeRequestOut(**asked.model_dump())


@router.post(
    "/{job}/drain", summary="Ask the workers to leave a host", status_code=status.HTTP_202_ACCEPTED
)
@on_storage()
def drain(
    body: DrainHost, job: JobDep, context: ContextDep, request: RequestDep
) -> ResizeRequestOut:
    """Let groups leave a host in good order, or with `undo` use it again.

    409 if the job does not run. Asking again for the same changes nothing.
    """
    asked = request(actions.request_drain, host=body.host, undo=body.undo)
    return ResizeRequestOut(**asked.model_dump())
