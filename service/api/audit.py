"""The audit log: who changed what, when, from where, and with what result."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from service.api.context import ContextDep
from service.api.schemas import FieldFault, Page
from service.api.security_schemas import AuditOut
from service.errors import InvalidRequest
from service.security.keys import AuditFilter

router = APIRouter(prefix="/v1/audit", tags=["access"])

_MAX_DIGITS = 18


@router.get("", summary="Read the audit log, newest first")
def list_audit(
    context: ContextDep,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    actor: Annotated[str | None, Query(max_length=255, examples=["key:ci"])] = None,
    action: Annotated[
        str | None, Query(max_length=128, examples=["POST /v1/jobs/{job}:cancel"])
    ] = None,
    object: Annotated[
        str | None, Query(max_length=512, description="Path of what was changed.")
    ] = None,
    since: Annotated[float | None, Query(ge=0, description="Unix seconds.")] = None,
    refused: Annotated[bool, Query(description="Only what was refused or failed.")] = False,
) -> Page[AuditOut]:
    """Every request that changes something, the refused ones included."""
    context.security.audit.flush()
    wanted = AuditFilter(actor, action, object, since, refused)
    before = None if after is None else _line_id(after)
    found = context.security.keys.list_audit(wanted, before=before, limit=limit + 1)
    shown = [AuditOut.model_validate(record) for record in found[:limit]]
    return Page(items=shown, next=str(shown[-1].id) if len(found) > limit else None)


def _line_id(after: str) -> int:
    if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
        fault = FieldFault(path="after", code="cursor", message="not the `next` of a page")
        raise InvalidRequest([fault])
    return int(after)
