"""The course of a job: pause, resume, clone, restart from a checkpoint, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status

from service.api.auth import PrincipalDep, check_paths, check_project
from service.api.context import ContextDep, JobDep
from service.api.jobs import KeyHeader
from service.api.lifecycle_schemas import CloneJob, DeletedJob, LeftBehind, RestartJob
from service.api.schemas import JobDetail
from service.api.secrets import keep_secrets
from service.api.versions import VersionDep, tagged
from service.clusters import check_cluster
from service.code_store import check_code
from service.errors import StorageUnavailable
from service.job_changes import cloned_spec, delete_job, pause_job, restart_job, resume_job
from service.jobs import submit_job
from service.run_files import run_dir_of
from service.security.paths import roots_of, without_lost_place
from service.security.principal import Role

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("/{job}:pause", summary="Pause a job", status_code=status.HTTP_202_ACCEPTED)
def pause(
    job: JobDep,
    context: ContextDep,
    principal: PrincipalDep,
    version: VersionDep,
    response: Response,
) -> JobDetail:
    """Let the workers save a checkpoint and leave; the job keeps its place in the queue.

    It has paused when its status says so. 409 if it has ended.
    """
    paused = pause_job(context.store, context.settings, job.id, principal.name, version)
    context.wake()
    return tagged(paused, context.settings, response)


@router.post("/{job}:resume", summary="Resume a paused job", status_code=status.HTTP_202_ACCEPTED)
def resume(
    job: JobDep,
    context: ContextDep,
    principal: PrincipalDep,
    version: VersionDep,
    response: Response,
) -> JobDetail:
    """Let a paused job wait for its workers again, with its old place. 409 if it is not paused."""
    resumed = resume_job(context.store, context.settings, job.id, principal.name, version)
    context.wake()
    return tagged(resumed, context.settings, response)


@router.post("/{job}:clone", summary="Clone a job", status_code=status.HTTP_201_CREATED)
def clone(
    job: JobDep,
    body: CloneJob,
    context: ContextDep,
    principal: PrincipalDep,
    response: Response,
    idempotency_key: KeyHeader = None,
) -> JobDetail:
    """Submit the spec of a job again, with changes; `Location` names the new job.

    Secrets do not come along: give those that the clone needs.
    """
    spec = cloned_spec(job, body.set, body.patch, body.name)
    spec = without_lost_place(spec, job.spec, roots_of(context.settings))
    check_project(principal, spec.project, Role.SUBMITTER)
    check_paths(spec, principal, context.settings, context.store)
    check_cluster(context.backend, spec)
    try:
        check_code(context.settings, spec, run_dir_of(context.settings, job.id))
    except OSError as error:
        raise StorageUnavailable(str(error)) from error
    made = submit_job(
        context.store,
        spec,
        idempotency_key=idempotency_key,
        actor=principal.name,
        prepare=lambda job_id: keep_secrets(context, job_id, body.secrets),
        checkpoint_root=context.settings.checkpoint_root,
    )
    context.wake()
    response.headers["Location"] = f"/v1/jobs/{made.id}"
    return tagged(made, context.settings, response)


@router.post(
    "/{job}:restart", summary="Go on from a checkpoint", status_code=status.HTTP_202_ACCEPTED
)
def restart(
    job: JobDep,
    context: ContextDep,
    principal: PrincipalDep,
    version: VersionDep,
    response: Response,
    body: RestartJob | None = None,
) -> JobDetail:
    """Let a job that has ended, waits or is paused go on from one of its checkpoints.

    Its later checkpoints count no more, and are removed once a new one is committed. 409 while it
    has workers, 404 for a checkpoint that it does not have.
    """
    wanted = body or RestartJob()
    restarted = restart_job(
        context.store,
        context.settings,
        job.id,
        step=wanted.step,
        path=wanted.path,
        actor=principal.name,
        version=version,
    )
    context.wake()
    return tagged(restarted, context.settings, response)


@router.delete("/{job}", summary="Delete a job")
def delete(
    job: JobDep,
    context: ContextDep,
    version: VersionDep,
    artifacts: Annotated[
        bool, Query(description="With its files: checkpoints, logs and traces.")
    ] = True,
) -> DeletedJob:
    """Delete a job that has ended. 409 while it lives; may be repeated if it was cut off.

    Checkpoints on object storage stay: the answer says where.
    """
    found = delete_job(
        context.store, context.settings, job.id, artifacts=artifacts, version=version
    )
    left = [LeftBehind(path=each.path, why=each.why) for each in found]
    return DeletedJob(id=job.id, left=left)
