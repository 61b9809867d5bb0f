"""Routes of API keys, the caller's identity and the audit log."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, status

from service.api.deps import ContextDep, PrincipalDep, ThreadRoute
from service.domain.auth import ApiKey, AuditFilter, AuditRecord, hash_of, new_key_text, parse_roles
from service.schemas.admin import CreateKey, KeyOut, NewKey, WhoAmI
from service.schemas.common import Page

router = APIRouter(prefix="/v1", tags=["access"], route_class=ThreadRoute)


@router.get("/audit", summary="Read the audit log, newest first")
def list_audit(
    context: ContextDep,
    after: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="`next` of the page before.")
    ] = None,
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
) -> Page[AuditRecord]:
    """Every request that changes something, the refused ones included."""
    context.security.audit.flush()
    wanted = AuditFilter(actor, action, object, since, refused)
    found = context.security.keys.list_audit(wanted, before=after, limit=limit + 1)
    return Page.of(found, limit, lambda record: record)


@router.get("/whoami", summary="Who asks, and what they may do")
def who_am_i(principal: PrincipalDep, context: ContextDep) -> WhoAmI:
    """The principal behind the request's credentials."""
    return WhoAmI.model_validate({**vars(principal), "auth": context.settings.auth})


@router.post("/keys", summary="Make an API key", status_code=status.HTTP_201_CREATED)
def create_key(body: CreateKey, principal: PrincipalDep, context: ContextDep) -> NewKey:
    """A new key; its text is in this answer and nowhere else."""
    now = time.time()
    key_id, text = new_key_text()
    key = ApiKey(
        id=key_id,
        name=body.name,
        roles=parse_roles(body.roles),
        created_at=now,
        created_by=principal.name,
        expires_at=None if body.expires_in_s is None else now + body.expires_in_s,
    )
    context.security.keys.add_key(key, hash_of(text))
    return NewKey.model_validate({**vars(key), "key": text})


@router.get("/keys", summary="List API keys")
def list_keys(
    context: ContextDep,
    after: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[KeyOut]:
    """One page of keys, the revoked ones included; never their secrets."""
    found = context.security.keys.list_keys(after=after, limit=limit + 1)
    return Page.of(found, limit, KeyOut.model_validate)


@router.delete("/keys/{key_id}", summary="Revoke an API key")
def revoke_key(key_id: Annotated[str, Path(max_length=64)], context: ContextDep) -> KeyOut:
    """End a key and the sessions that were opened with it. Doing it again changes nothing."""
    return KeyOut.model_validate(context.security.keys.revoke_key(key_id, time.time()))
