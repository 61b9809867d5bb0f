"""Jobs: submit, list, read, cancel."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response, status
from pydantic import Field

from service.api.auth import PrincipalDep, check_paths, check_project
from service.api.context import ContextDep, JobDep
from service.api.schemas import AttemptOut, JobDetail, JobPlan, JobSummary, Page, SubmitJob
from service.api.secrets import keep_secrets
from service.api.versions import VersionDep, tagged
from service.api.views import attempt_view, summary_of
from service.clusters import check_cluster, hosts_for
from service.code_store import check_code
from service.domain import JobStatus
from service.job_changes import cancel_job
from service.jobs import check_data, submit_job, with_table_sizes
from service.planning import plan_of
from service.security.principal import Role
from trainer.spec import validate_spec

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

# Each label is a join of its own.
_MAX_LABELS = 20
_MAX_ALTERNATIVES = 20

LabelQuery = Annotated[str, Field(pattern=r"^[^=]+=", examples=["team=ads"])]

KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="The same key and spec make one job, however often the request is sent.",
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
) -> JobDetail | JobPlan:
    """Check the spec and create a job; `Location` names it."""
    spec = validate_spec(body.spec)
    check_project(principal, spec.project, Role.SUBMITTER)
    check_paths(spec, principal, context.settings, context.store)
    check_code(context.settings, spec)
    check_cluster(context.backend, spec)
    if dry_run:
        check_data(spec)
        response.status_code = status.HTTP_200_OK
        is_shared = spec.resources.cluster == "shared"
        most = context.settings.cluster_max_workers if is_shared else None
        return plan_of(with_table_sizes(spec), hosts_for(context.backend, spec), most)
    began_at = time.time()
    job = submit_job(
        context.store,
        spec,
        idempotency_key=idempotency_key,
        prepare=lambda job_id: keep_secrets(context, job_id, body.secrets),
        actor=principal.name,
        checkpoint_root=context.settings.checkpoint_root,
    )
    context.tracing.submitted(job, began_at)
    context.wake()
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return tagged(job, context.settings, response)


@router.get("", summary="List jobs, newest first")
def list_jobs(
    context: ContextDep,
    principal: PrincipalDep,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    statuses: Annotated[
        list[JobStatus] | None, Query(alias="status", max_length=_MAX_ALTERNATIVES)
    ] = None,
    name: Annotated[str | None, Query(examples=["movielens-demo"])] = None,
    project: Annotated[str | None, Query(examples=["ads"])] = None,
    labels: Annotated[
        list[LabelQuery] | None,
        Query(
            alias="label",
            max_length=_MAX_LABELS,
            description="`KEY=VALUE`; of several, all must hold.",
        ),
    ] = None,
    created_after: Annotated[
        datetime | None, Query(description="ISO 8601 (UTC if it names no zone) or Unix seconds.")
    ] = None,
    created_before: Annotated[datetime | None, Query(description="As `created_after`.")] = None,
) -> Page[JobSummary]:
    """One page of jobs; several `status` parameters are alternatives."""
    jobs, following = context.store.list_jobs(
        after=after,
        limit=limit,
        statuses=statuses or (),
        name=name,
        project=project,
        projects=principal.projects,
        labels=dict(_split_label(label) for label in labels or ()),
        created_after=_unix_s(created_after),
        created_before=_unix_s(created_before),
    )
    return Page(items=[summary_of(job) for job in jobs], next=following)


def _split_label(label: str) -> tuple[str, str]:
    key, _, value = label.partition("=")
    return key, value


def _unix_s(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@router.get("/{job}", summary="Read a job")
def get(job: JobDep, context: ContextDep, response: Response) -> JobDetail:
    """A job by id, by a unique prefix of it, or by name (the newest of that name)."""
    names = context.security.keys.secret_names(job.id)
    return tagged(job, context.settings, response).model_copy(update={"secret_names": names})


@router.post("/{job}:cancel", summary="Cancel a job", status_code=status.HTTP_202_ACCEPTED)
def cancel(
    job: JobDep,
    context: ContextDep,
    principal: PrincipalDep,
    version: VersionDep,
    response: Response,
) -> JobDetail:
    """Ask a job to stop; it has stopped when its status says so. 409 if it has ended."""
    cancelled = cancel_job(context.store, context.settings, job.id, principal.name, version)
    context.wake()
    return tagged(cancelled, context.settings, response)


@router.get("/{job}/attempts", summary="List the attempts of a job")
def list_attempts(job: JobDep, context: ContextDep) -> Page[AttemptOut]:
    """Attempts in order, all on one page."""
    attempts = context.store.list_attempts(job.id)
    return Page(items=[attempt_view(attempt) for attempt in attempts])
