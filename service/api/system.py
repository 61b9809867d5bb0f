"""The service itself: health, readiness, cluster, Prometheus metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.context import ContextDep
from service.api.schemas import ClusterOut, HostOut
from service.backends.base import HostFacts
from service.errors import BackendUnreachable, NotAHead, ReconcilerDied, StorageUnavailable
from service.machines import HeadFacts, storage_id, versions_here

router = APIRouter(tags=["service"])


@router.get("/v1/cluster", summary="The cluster behind the service")
def get_cluster(context: ContextDep) -> ClusterOut:
    """Ask the backend whether it is there; always 200."""
    backend = context.backend
    hosts: tuple[HostFacts, ...] = ()
    try:
        reachable, message = True, backend.check()
        hosts = backend.hosts() or ()
    except BackendUnreachable as error:
        reachable, message = False, str(error)
    return ClusterOut(
        reachable=reachable,
        backend=backend.name,
        address=backend.address,
        message=message,
        max_workers=context.settings.cluster_max_workers,
        hosts=[HostOut.model_validate(host) for host in hosts],
    )


@router.get("/v1/cluster/head", summary="What a machine must know to join the cluster")
def get_head(context: ContextDep) -> HeadFacts:
    """For `shardloom join`: answers to Ray's token, and on a head that others can join only."""
    settings = context.settings
    if settings.gcs_address is None:
        raise NotAHead
    try:
        storage = storage_id(settings.runs_dir)
    except OSError as error:
        raise StorageUnavailable(str(error)) from error
    return HeadFacts(
        gcs_address=settings.gcs_address,
        ray_address=settings.ray_address,
        runs_dir=str(settings.runs_dir),
        storage_id=storage,
        versions=versions_here(),
    )


@router.get("/healthz", summary="Whether the process answers")
def get_health() -> dict[str, str]:
    """200 as long as requests are answered at all."""
    return {"status": "ok"}


@router.get("/readyz", summary="Whether the service can do its work")
def get_readiness(context: ContextDep) -> dict[str, Any]:
    """200 when the store answers and is migrated and the reconciler is at work, else 503.

    A cluster that is away does not make the service unready: it still takes jobs and shows
    them, and starts them when the cluster is back. `/v1/cluster` tells about the cluster.
    """
    if context.has_died():
        raise ReconcilerDied
    return {"status": "ready", "store": context.store.ping()}


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
def get_prometheus(context: ContextDep) -> Response:
    """Counters of the service in Prometheus' text format."""
    return Response(context.telemetry.render(), media_type=CONTENT_TYPE_LATEST)
