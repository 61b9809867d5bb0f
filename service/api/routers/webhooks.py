"""Routes of webhooks and their deliveries. A secret is shown only when it is made."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, status

from service.api.deps import ContextDep, PrincipalDep, ThreadRoute, check_project
from service.domain.auth import Role
from service.domain.webhooks import DeliveryState, Webhook, new_secret, test_body
from service.errors import InvalidRequest, WebhookNotFound
from service.schemas.admin import (
    ChangeWebhook,
    CreateWebhook,
    DeliveryOut,
    WebhookCreated,
    WebhookOut,
)
from service.schemas.common import Page
from service.settings import Settings
from service.webhooks.safe_http import AddressRefused, check_url
from trainer.spec.base import MAX_INTEGER, FieldProblem

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=ThreadRoute)


def administered(
    webhook_id: Annotated[str, Path(max_length=64)], context: ContextDep, principal: PrincipalDep
) -> str:
    """The id that the path names; raises `WebhookNotFound`, also for those of others' projects."""
    if not principal.may(Role.ADMIN, context.webhooks.get(webhook_id).project):
        raise WebhookNotFound(webhook_id)
    return webhook_id


WebhookId = Annotated[str, Depends(administered)]


@router.post("", status_code=status.HTTP_201_CREATED, summary="Create a webhook")
def create_webhook(
    body: CreateWebhook, context: ContextDep, principal: PrincipalDep
) -> WebhookCreated:
    """Let a URL hear of timeline lines; the answer shows the secret, once."""
    check_project(principal, body.project, Role.ADMIN)
    _check_url(body.url, context.settings)
    secret = new_secret()
    webhook = Webhook(
        **body.model_dump(),
        id=f"wh-{secrets.token_hex(8)}",
        secret=context.security.master.encrypt(secret),
        is_active=True,
        created_at=time.time(),
    )
    context.webhooks.create(webhook)
    return _with_secret(webhook, secret)


@router.get("", summary="Webhooks, oldest first")
def list_webhooks(
    context: ContextDep,
    principal: PrincipalDep,
    project: Annotated[str | None, Query(max_length=64)] = None,
) -> Page[WebhookOut]:
    """Webhooks of a project, or of all that one administers, on one page."""
    found = context.webhooks.list_webhooks(project)
    mine = [webhook for webhook in found if principal.may(Role.ADMIN, webhook.project)]
    return Page(items=[WebhookOut.model_validate(webhook) for webhook in mine])


@router.get("/{webhook_id}", summary="A webhook")
def get_webhook(webhook_id: WebhookId, context: ContextDep) -> WebhookOut:
    """Read a webhook; its secret is never shown again."""
    return WebhookOut.model_validate(context.webhooks.get(webhook_id))


@router.patch("/{webhook_id}", summary="Change a webhook, or switch it on or off")
def change_webhook(webhook_id: WebhookId, body: ChangeWebhook, context: ContextDep) -> WebhookOut:
    """Switching it on sends what waited meanwhile, and forgets the failures in a row."""
    if body.url is not None:
        _check_url(body.url, context.settings)
    changes = body.model_dump(exclude_none=True)
    if body.is_active:
        changes |= {"num_dead_in_a_row": 0, "note": ""}
    return WebhookOut.model_validate(context.webhooks.change(webhook_id, changes))


@router.delete("/{webhook_id}", status_code=status.HTTP_204_NO_CONTENT, summary="Forget a webhook")
def delete_webhook(webhook_id: WebhookId, context: ContextDep) -> None:
    """Forget it, with what was not delivered yet."""
    context.webhooks.delete(webhook_id)


@router.post("/{webhook_id}:rotate", summary="Give a webhook a new secret")
def rotate_secret(webhook_id: WebhookId, context: ContextDep) -> WebhookCreated:
    """The answer shows the new secret, once; from now on messages are signed with it."""
    secret = new_secret()
    changed = context.webhooks.change(
        webhook_id, {"secret": context.security.master.encrypt(secret)}
    )
    return _with_secret(changed, secret)


@router.post(
    "/{webhook_id}:test", status_code=status.HTTP_202_ACCEPTED, summary="Send a test message"
)
def send_test(webhook_id: WebhookId, context: ContextDep) -> DeliveryOut:
    """Queue a message of the kind `test`, whatever kinds the webhook wants."""
    now = time.time()
    body = test_body(context.webhooks.get(webhook_id), now)
    return DeliveryOut.model_validate(context.webhooks.add_test(webhook_id, body, now))


@router.get("/{webhook_id}/deliveries", summary="Messages to a webhook, newest first")
def list_deliveries(
    webhook_id: WebhookId,
    context: ContextDep,
    after: Annotated[
        int | None, Query(ge=0, le=MAX_INTEGER, description="`next` of a page.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    state: DeliveryState | None = None,
) -> Page[DeliveryOut]:
    """What was sent, what waits and what failed, with the receiver's answer."""
    found = context.webhooks.list_deliveries(webhook_id, after=after, limit=limit + 1, state=state)
    return Page.of(found, limit, DeliveryOut.model_validate)


@router.post(
    "/{webhook_id}/deliveries/{delivery_id}:redeliver",
    status_code=status.HTTP_202_ACCEPTED,
    summary="Send a message again",
)
def redeliver(
    webhook_id: WebhookId,
    delivery_id: Annotated[int, Path(ge=0, le=MAX_INTEGER)],
    context: ContextDep,
) -> DeliveryOut:
    """Send it again with the same id, whatever came of it before."""
    return DeliveryOut.model_validate(context.webhooks.redeliver(webhook_id, delivery_id))


def _with_secret(webhook: Webhook, secret: str) -> WebhookCreated:
    return WebhookCreated.model_validate(replace(webhook, secret=secret))


def _check_url(url: str, settings: Settings) -> None:
    try:
        check_url(url, settings.webhook_allowed_networks)
    except AddressRefused as error:
        raise InvalidRequest([FieldProblem("url", "address_refused", str(error))]) from None
