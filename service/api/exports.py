"""Exports of a job: ask for one, look at them, download or delete one."""

from __future__ import annotations

from fastapi import APIRouter, Response, status
from fastapi.responses import StreamingResponse

from service.api.context import ContextDep, JobDep
from service.api.export_schemas import ExportOut, RequestExport
from service.api.schemas import Page
from service.artifact_errors import ExportNotReady, ExportPending
from service.export_archive import archive
from service.export_removal import delete_export
from service.exports import get_export, get_finished_export, request_export
from service.run_files import run_dir_of
from trainer.export.artifact import read_manifest
from trainer.export.errors import ArtifactError
from trainer.export.folder import ExportFolder, ExportStatus, list_exports

router = APIRouter(prefix="/v1/jobs/{job}/exports", tags=["exports"])

ARCHIVE_MEDIA_TYPE = "application/x-tar"


@router.post("", summary="Export the model of a checkpoint", status_code=status.HTTP_202_ACCEPTED)
def request(body: RequestExport, job: JobDep, context: ContextDep, response: Response) -> ExportOut:
    """Ask for an export, which a process beside the service makes; poll it until it is done.

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


@router.get("", summary="Exports of a job")
def list_all(job: JobDep, context: ContextDep) -> Page[ExportOut]:
    """Exports in the order of asking, all on one page."""
    found = list_exports(run_dir_of(context.settings, job.id))
    return Page(items=[describe_or_fail(folder) for folder in found])


@router.get("/{export_id}", summary="An export of a job")
def get(export_id: str, job: JobDep, context: ContextDep) -> ExportOut:
    """Where it stands, and its report once it is done."""
    return describe(get_export(context.settings, job.id, export_id))


@router.delete("/{export_id}", summary="Delete an export", status_code=status.HTTP_204_NO_CONTENT)
def delete(export_id: str, job: JobDep, context: ContextDep) -> None:
    """It is gone at once, done or not; one that is being made is given up.

    Downloads that have begun go on to their end, later ones are 404.
    """
    delete_export(get_export(context.settings, job.id, export_id))


@router.get(
    "/{export_id}/archive",
    summary="Download an export",
    response_class=StreamingResponse,
    responses={200: {"content": {ARCHIVE_MEDIA_TYPE: {}}}},
)
def download(export_id: str, job: JobDep, context: ContextDep) -> StreamingResponse:
    """The folder as a tar file; 409 until the export is done."""
    folder = get_finished_export(context.settings, job.id, export_id)
    size, chunks = archive(folder.artifact)
    headers = {
        "Content-Length": str(size),
        # Or it would be compressed on the way, which quantised tables hardly are.
        "Content-Encoding": "identity",
        "Content-Disposition": f'attachment; filename="{job.name}-{folder.id}.tar"',
    }
    return StreamingResponse(chunks, media_type=ARCHIVE_MEDIA_TYPE, headers=headers)


def describe_or_fail(folder: ExportFolder) -> ExportOut:
    """The same as `describe`, where others are told of, too: one that was damaged has failed."""
    try:
        return describe(folder)
    except ExportNotReady as error:
        return _shown(folder, "failed", str(error))


def describe(folder: ExportFolder) -> ExportOut:
    """What a client is told of an export; raises `ExportNotReady` where it was damaged."""
    found_status = folder.status
    shown = _shown(folder, found_status, folder.message)
    if found_status != "succeeded":
        return shown
    try:
        manifest = read_manifest(folder.artifact)
    except ArtifactError as error:
        raise ExportNotReady(folder.id, "damaged", str(error)) from error
    facts = {"step": manifest.step, "size_bytes": manifest.size_bytes}
    return shown.model_copy(update={**facts, "report": folder.read_report()})


def _shown(folder: ExportFolder, found_status: ExportStatus, message: str) -> ExportOut:
    wanted = folder.wanted
    return ExportOut(
        id=folder.id,
        checkpoint=wanted.checkpoint,
        quantize=wanted.quantize,
        status=found_status,
        message=message,
        created=wanted.created,
    )
