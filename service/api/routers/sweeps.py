"""Routes of sweeps: create, list, read, cancel, delete."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response, status
from starlette.requests import Request

from service.api.deps import (
    Context,
    ContextDep,
    ForceQuery,
    PrincipalDep,
    ThreadRoute,
    check_fits,
    check_project,
    check_spec,
    current_rule,
)
from service.api.views import sweep_detail, sweep_summary
from service.domain.sweeps import Sweep, direction_of
from service.errors import SweepNotFound
from service.jobs.actions import document_of
from service.jobs.submit import check_data, with_table_sizes
from service.schemas.common import Page
from service.schemas.sweeps import CreateSweep, SweepDetail, SweepSummary
from service.sweeps.search import check_sweep
from trainer.spec import validate_spec

router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"], route_class=ThreadRoute)


def find_sweep(
    sweep_id: Annotated[str, Path(max_length=64)],
    context: ContextDep,
    request: Request,
    principal: PrincipalDep,
) -> Sweep:
    """The sweep that the path names; raises `SweepNotFound`, also for those of others' projects."""
    sweep = context.sweeps.get(sweep_id)
    if principal.role_in(sweep.project) is None:
        raise SweepNotFound(sweep_id)
    check_project(principal, sweep.project, current_rule(request).role)
    return sweep


SweepDep = Annotated[Sweep, Depends(find_sweep)]


@router.post("", status_code=status.HTTP_201_CREATED, summary="Search for settings of a spec")
def create_sweep(
    body: CreateSweep,
    context: ContextDep,
    principal: PrincipalDep,
    response: Response,
    force: ForceQuery = False,
) -> SweepDetail:
    """Check the spec with each bound and value, and start the search; `Location` names it.

    Trials are jobs named NAME-0, NAME-1, ... with the labels `sweep` and `trial`.
    """
    spec = validate_spec(body.spec)
    check_spec(spec, principal, context)
    check_data(spec)
    sweep = Sweep(
        id=f"sweep-{secrets.token_hex(6)}",
        name=spec.name,
        project=spec.project,
        spec=document_of(spec),
        parameters=tuple(each.parameter for each in body.parameters),
        metric=body.metric,
        direction=body.direction or direction_of(body.metric),
        search=body.search,
        num_trials=body.num_trials,
        num_parallel=body.num_parallel,
        seed=body.seed,
        early_stopping=body.early_stopping,
        created_at=time.time(),
        created_by=principal.name,
    )
    tried = check_sweep(sweep)
    if not force:
        check_fits(map(with_table_sizes, tried), context)
    # Before the sweep, so that no trial is made without them.
    encrypted = context.security.encrypt_secrets(body.secrets)
    context.security.keys.keep_secrets(sweep.id, encrypted, sweep.created_at)
    context.sweeps.create(sweep)
    context.wake_sweeps()
    response.headers["Location"] = f"/v1/sweeps/{sweep.id}"
    return _detail(context, sweep)


@router.get("", summary="List sweeps, newest first")
def list_sweeps(
    context: ContextDep,
    principal: PrincipalDep,
    after: Annotated[
        str | None, Query(max_length=64, description="`next` of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[SweepSummary]:
    """Sweeps of the projects that one may see."""
    found, following = context.sweeps.list_sweeps(principal.projects, after=after, limit=limit)
    return Page(items=[sweep_summary(each) for each in found], next=following)


@router.get("/{sweep_id}", summary="Read a sweep with its trials")
def get_sweep(sweep: SweepDep, context: ContextDep) -> SweepDetail:
    """Trials in order, with their jobs as they are now."""
    return _detail(context, sweep)


@router.post("/{sweep_id}:cancel", status_code=status.HTTP_202_ACCEPTED, summary="Cancel a sweep")
def cancel_sweep(sweep: SweepDep, context: ContextDep) -> SweepDetail:
    """Start no more trials, and cancel the jobs of those under way. 409 if it has ended."""
    cancelled = context.sweeps.cancel(sweep.id)
    context.wake_sweeps()
    return _detail(context, cancelled)


@router.delete(
    "/{sweep_id}", status_code=status.HTTP_204_NO_CONTENT, summary="Forget a sweep that has ended"
)
def delete_sweep(sweep: SweepDep, context: ContextDep) -> None:
    """Forget it with its trials; their jobs stay. 409 while it lives."""
    context.sweeps.delete(sweep.id)


def _detail(context: Context, sweep: Sweep) -> SweepDetail:
    return sweep_detail(sweep, context.sweeps.observe(sweep))
