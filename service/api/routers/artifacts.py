"""Routes of user code archives, exports and profiler traces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import IO, Annotated

from fastapi import APIRouter, Query, Request, Response, status
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from service.api.deps import (
    ContextDep,
    JobDep,
    PrincipalDep,
    ThreadRoute,
    download,
    on_storage,
)
from service.api.views import describe, exports_of
from service.domain.timeline import Trace
from service.errors import ExportPending
from service.jobs.code_archives import keep_code
from service.jobs.exports import (
    archive,
    delete_export,
    get_export,
    get_finished_export,
    request_export,
)
from service.jobs.profiling import find_trace, list_traces, request_trace
from service.jobs.run_storage import reach, run_dir_of
from service.schemas.common import Page
from service.schemas.jobs import (
    ExportOut,
    RequestExport,
    RequestTrace,
    TraceRequested,
)
from trainer.protocol.code_archive import CodeSummary
from trainer.protocol.run_dir import trace_name

code_router = APIRouter(prefix="/v1/code", tags=["code"], route_class=ThreadRoute)
MEDIA_TYPE = "application/zip"


@code_router.post(
    "",
    summary="Upload the code of a module",
    status_code=status.HTTP_201_CREATED,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_code(request: Request, context: ContextDep) -> CodeSummary:
    """Keep a zip archive whose files all lie under `code/`; its id is the SHA-256 of its bytes.

    `model.code` of a spec names that id, which the same archive sent again has too. 422 for what
    could not be unpacked safely, 507 where as much is kept as the settings allow.
    """
    data = await request.body()
    keep = partial(keep_code, context.settings, data)
    return await run_in_threadpool(reach, context.settings, keep)


exports_router = APIRouter(
    prefix="/v1/jobs/{job}/exports", tags=["exports"], route_class=ThreadRoute
)


@exports_router.post(
    "", summary="Export the model of a checkpoint", status_code=status.HTTP_202_ACCEPTED
)
@on_storage()
def post_export(
    body: RequestExport, job: JobDep, context: ContextDep, response: Response
) -> ExportOut:
    """Request an export, which a subprocess makes; poll it until it is done.

    404 if the job has no such checkpoint, 409 while another export of the job is not done.
    """
    try:
        folder = request_export(
            context.store, context.settings, job, body.checkpoint, body.quantize
        )
    except ExportPending as error:
        # Storage may have failed for so long that nobody here tries it any more.
        context.exports.submit(get_export(context.settings, job.id, error.export_id))
        raise
    context.exports.submit(folder)
    response.headers["Location"] = f"/v1/jobs/{job.id}/exports/{folder.id}"
    return describe(folder)


@exports_router.get("", summary="Exports of a job")
@on_storage()
def read_exports(job: JobDep, context: ContextDep) -> Page[ExportOut]:
    """The newest 200 exports in the order of asking, all on one page."""
    return Page(items=exports_of(run_dir_of(context.settings, job.id)))


@exports_router.get("/{export_id}", summary="An export of a job")
@on_storage()
def read_export(export_id: str, job: JobDep, context: ContextDep) -> ExportOut:
    """Where it stands, and its report once it is done."""
    return describe(get_export(context.settings, job.id, export_id))


@exports_router.delete(
    "/{export_id}", summary="Delete an export", status_code=status.HTTP_204_NO_CONTENT
)
@on_storage()
def remove_export(export_id: str, job: JobDep, context: ContextDep) -> None:
    """It is gone at once, done or not; one that is being made is given up.

    Downloads that have begun go on to their end, later ones are 404.
    """
    delete_export(get_export(context.settings, job.id, export_id))


@exports_router.get(
    "/{export_id}/archive",
    summary="Download an export",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {}}}},
)
@on_storage()
def download_export(export_id: str, job: JobDep, context: ContextDep) -> StreamingResponse:
    """The folder as a ZIP archive; 409 until the export is done."""
    folder = get_finished_export(context.settings, job.id, export_id)
    name = f"{job.name}-{folder.id}.zip"
    return download(context, archive(folder), job, name, MEDIA_TYPE)


traces_router = APIRouter(prefix="/v1/jobs/{job}/traces", tags=["traces"], route_class=ThreadRoute)
TRACE_MEDIA_TYPE = "application/gzip"
_CHUNK_BYTES = 1 << 18


@traces_router.post(
    "", summary="Record the next steps of a running job", status_code=status.HTTP_202_ACCEPTED
)
@on_storage()
def post_trace(
    body: RequestTrace, job: JobDep, context: ContextDep, principal: PrincipalDep
) -> TraceRequested:
    """Ask the workers for a trace; it is listed once it is written.

    409 if the job does not run, or an earlier request is still being answered.
    """
    store, settings, actor = context.store, context.settings, principal.name
    attempt_id, asked = request_trace(
        store, settings, job.id, body.num_steps, body.ranks, actor=actor
    )
    names = [trace_name(asked["id"], rank) for rank in asked["ranks"]]
    return TraceRequested(**asked, attempt_id=attempt_id, names=names)


@traces_router.get("", summary="Traces of a job")
def read_traces(job: JobDep, context: ContextDep) -> Page[Trace]:
    """The newest traces (up to 5000) in the order of writing, all on one page."""
    return Page(items=list_traces(context.store, job.id))


@traces_router.get(
    "/{name}",
    summary="Download a trace",
    response_class=StreamingResponse,
    responses={200: {"content": {TRACE_MEDIA_TYPE: {}}}},
)
@on_storage()
def download_trace(
    name: str,
    job: JobDep,
    context: ContextDep,
    attempt: Annotated[
        str | None, Query(description="Attempt id; the newest that has the trace if left away.")
    ] = None,
) -> StreamingResponse:
    """The gzipped JSON, as chrome://tracing and Perfetto read it."""
    run_dir = run_dir_of(context.settings, job.id)
    file = find_trace(context.store, run_dir, job.id, name, attempt)
    return download(context, _chunks(file), job, f"{job.name}-{name}", TRACE_MEDIA_TYPE)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


routers = (code_router, exports_router, traces_router)
