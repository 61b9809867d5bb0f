"""Another size of a running job, and hosts that it should leave."""

from __future__ import annotations

from fastapi import APIRouter, status

from service.api.auth import PrincipalDep
from service.api.context import ContextDep, JobDep
from service.api.schemas import DrainHost, ResizeJob, WishOut
from service.resizing import Wish, request_drain, request_resize
from service.submission import run_dir_of

router = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"])


@router.post(
    "/resize", summary="Ask for another number of workers", status_code=status.HTTP_202_ACCEPTED
)
def resize(body: ResizeJob, job: JobDep, context: ContextDep, principal: PrincipalDep) -> WishOut:
    """Grow or shrink a running job; the timeline tells when it has (`resized`).

    409 if the job does not run. Asking again for the same size changes nothing.
    """
    run_dir = run_dir_of(context.settings, job.id)
    wish = request_resize(context.store, run_dir, job.id, body.workers, principal.name)
    return _answer(wish)


@router.post(
    "/drain", summary="Ask the workers to leave a host", status_code=status.HTTP_202_ACCEPTED
)
def drain(body: DrainHost, job: JobDep, context: ContextDep, principal: PrincipalDep) -> WishOut:
    """Let groups leave a host in good order, or with `undo` use it again.

    409 if the job does not run. Asking again for the same changes nothing.
    """
    run_dir = run_dir_of(context.settings, job.id)
    wish = request_drain(
        context.store, run_dir, job.id, body.host, undo=body.undo, actor=principal.name
    )
    return _answer(wish)


def _answer(wish: Wish) -> WishOut:
    return WishOut(id=wish.id, workers=wish.num_workers, drain_hosts=list(wish.drain_hosts))
