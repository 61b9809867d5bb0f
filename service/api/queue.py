"""The queue: who waits for what, and who holds the workers."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.auth import PrincipalDep
from service.api.context import ContextDep
from service.api.queue_schemas import QueueOut
from service.queue_view import queue_view

router = APIRouter(prefix="/v1/queue", tags=["queue"])


@router.get("", summary="Read the queue")
def read(context: ContextDep, principal: PrincipalDep) -> QueueOut:
    """Waiting jobs in the order of their turn, with the reason why each waits; running jobs."""
    return queue_view(context.store.list_live_jobs(), principal.projects)
