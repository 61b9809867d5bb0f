"""Code of users: upload an archive that `model.code` of a spec may name."""

from __future__ import annotations

from fastapi import APIRouter, Request, status
from fastapi.concurrency import run_in_threadpool

from service.api.context import ContextDep
from service.api.schemas import CodeOut
from service.code_store import keep_code
from service.errors import StorageUnavailable

router = APIRouter(prefix="/v1/code", tags=["code"])

MEDIA_TYPE = "application/zip"


@router.post(
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
async def upload(request: Request, context: ContextDep) -> CodeOut:
    """Keep a zip archive whose files all lie under `code/`; its id is the SHA-256 of its bytes.

    The same archive sent again has the same id. 422 for what could not be unpacked safely,
    507 where as much is kept as the settings allow.
    """
    data = await request.body()
    try:
        kept = await run_in_threadpool(keep_code, context.settings, data)
    except OSError as error:
        raise StorageUnavailable(str(error)) from error
    return CodeOut(id=kept.id, num_files=kept.num_files, size_bytes=kept.size_bytes)
