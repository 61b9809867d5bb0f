"""Profiler traces: ask for one, list them, download one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, status
from fastapi.responses import FileResponse

from service.api.context import ContextDep, JobDep
from service.api.schemas import Page, RequestTrace, TraceOut, TraceRequested
from service.submission import run_dir_of
from service.traces import find_trace, list_traces, request_trace
from trainer.run_dir import trace_name

router = APIRouter(prefix="/v1/jobs/{job}/traces", tags=["traces"])

TRACE_MEDIA_TYPE = "application/gzip"


@router.post(
    "", summary="Record the next steps of a running job", status_code=status.HTTP_202_ACCEPTED
)
def request(body: RequestTrace, job: JobDep, context: ContextDep) -> TraceRequested:
    """Ask the workers for a trace; it is listed once it is written.

    409 if the job does not run, or an earlier request is still being answered.
    """
    run_dir = run_dir_of(context.settings, job.id)
    asked = request_trace(context.store, run_dir, job.id, body.num_steps, body.ranks)
    return TraceRequested(
        id=asked.id,
        attempt_id=asked.attempt_id,
        num_steps=asked.num_steps,
        ranks=list(asked.ranks),
        names=[trace_name(asked.id, rank) for rank in asked.ranks],
    )


@router.get("", summary="Traces of a job")
def list_all(job: JobDep, context: ContextDep) -> Page[TraceOut]:
    """Traces in the order of writing, all on one page."""
    found = list_traces(context.store, job.id)
    return Page(items=[TraceOut.model_validate(trace) for trace in found])


@router.get(
    "/{name}",
    summary="Download a trace",
    response_class=FileResponse,
    responses={200: {"content": {TRACE_MEDIA_TYPE: {}}}},
)
def download(
    name: str,
    job: JobDep,
    context: ContextDep,
    attempt: Annotated[
        str | None, Query(description="Attempt id; the newest that has the trace if left away.")
    ] = None,
) -> FileResponse:
    """The gzipped JSON, as chrome://tracing and Perfetto read it."""
    run_dir = run_dir_of(context.settings, job.id)
    path = find_trace(context.store, run_dir, job.id, name, attempt)
    return FileResponse(path, media_type=TRACE_MEDIA_TYPE, filename=f"{job.name}-{name}")
