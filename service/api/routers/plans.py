"""The route of plans: what a job would cost on a cluster, before there is one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request

from service.api.deps import (
    Context,
    ContextDep,
    PrincipalDep,
    ThreadRoute,
    check_paths,
    check_project,
    known_hosts,
    most_workers,
)
from service.api.planning import plans_view
from service.db.jobs import JobStore
from service.domain.auth import Principal, Role
from service.domain.job_filter import JobFilter
from service.domain.models import JobStatus
from service.errors import NoPlan
from service.jobs.planning import Limit, calibration_of, plan_job
from service.jobs.submit import with_table_sizes
from service.schemas.plans import PlanRequest, PlansOut
from trainer.layout.cost import ClusterError, cluster_of
from trainer.layout.hosts import site_of
from trainer.layout.layout import LayoutError
from trainer.layout.plans import Calibration, PlanSite
from trainer.spec import validate_spec
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec

router = APIRouter(tags=["jobs"], route_class=ThreadRoute)
_POLL_S = 0.25
_MAX_CALIBRATING = 20
# A plan may wait for minutes; those of the API are for all.
_threads = CapacityLimiter(32)


@router.post("/v1/plans", summary="Plan a job on a cluster")
async def make_plan(
    body: PlanRequest, request: Request, context: ContextDep, principal: PrincipalDep
) -> PlansOut:
    """Layouts side by side with their memory, step time, overhead and what they survive, and the
    recommended one sharded by TorchRec's planner. Ends when the caller hangs up. 422 for a cluster
    that cannot be or is not known, 504 beyond `time_limit_s`.
    """
    limit = Limit(body.time_limit_s)
    planned = to_thread.run_sync(_planned, body, context, principal, limit, limiter=_threads)
    work = asyncio.create_task(planned)
    try:
        while not (await asyncio.wait({work}, timeout=_POLL_S))[0]:
            if await request.is_disconnected():
                limit.cancelled.set()
        return await work
    finally:
        limit.cancelled.set()
        # Of a call that was cancelled nobody else takes it.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())


def _planned(body: PlanRequest, context: Context, principal: Principal, limit: Limit) -> PlansOut:
    spec = validate_spec(body.spec)
    check_project(principal, spec.project, Role.SUBMITTER)
    check_paths(spec, principal, context.settings, context.store)
    spec = with_table_sizes(spec)
    if spec.table_bytes is None:
        message = "a plan needs the sizes of all tables: give num_embeddings, or prepare the data"
        raise SpecError([FieldProblem("embedding_tables", "unknown_size", message)])
    try:
        site, calibration = _site_of(spec, body.cluster, context), None
        if body.cluster is None:
            calibration = _calibration(context.store, site)
        if calibration:
            site = replace(site, cluster=calibration.applied(site.cluster))
        plans = plan_job(spec, site, context.planner, limit)
        return plans_view(spec, replace(plans, calibration=calibration))
    except (ClusterError, LayoutError) as error:
        raise NoPlan(str(error)) from None


def _calibration(store: JobStore, site: PlanSite) -> Calibration | None:
    """By the newest jobs that trained on this cluster."""
    trained = JobFilter(statuses=(JobStatus.RUNNING, JobStatus.SUCCEEDED))
    jobs, _ = store.list_jobs(trained, limit=_MAX_CALIBRATING)
    return calibration_of(jobs, site.cluster.fingerprint)


def _site_of(spec: JobSpec, wanted: str | None, context: Context) -> PlanSite:
    """Raises `ClusterError`."""
    if wanted is not None:
        return PlanSite.of_profile(cluster_of(wanted), spec)
    site = site_of(spec, known_hosts(spec, context), most_workers(spec, context))
    return PlanSite.of_site(site)
