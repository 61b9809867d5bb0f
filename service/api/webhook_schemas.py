"""Bodies of the webhook routes, shared by the server and the client (pydantic only)."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from service.api.schemas import ApiModel

Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", examples=["job_ended"])]
Url = Annotated[str, Field(min_length=1, max_length=2048, examples=["https://example.com/hook"])]
# PostgreSQL cannot hold NUL characters.
Description = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]
Project = Annotated[str, Field(pattern=r"^(\*|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)$")]


class CreateWebhook(ApiModel):
    """Body of POST /v1/webhooks."""

    model_config = ConfigDict(extra="forbid")

    url: Url
    project: Project = Field(default="default", description="Or * for every project.")
    kinds: list[Kind] = Field(
        default=[], max_length=50, description="Kinds of timeline lines; empty for all."
    )
    description: Description = ""


class ChangeWebhook(ApiModel):
    """Body of PATCH /v1/webhooks/{webhook_id}: what is left away stays as it is."""

    model_config = ConfigDict(extra="forbid")

    url: Url | None = None
    kinds: list[Kind] | None = Field(default=None, max_length=50)
    description: Description | None = None
    is_active: bool | None = None


class WebhookOut(ApiModel):
    """A webhook; `note` says why the service switched it off, if it did."""

    id: str
    project: str
    url: str
    description: str
    kinds: list[str]
    is_active: bool
    note: str
    num_dead_in_a_row: int
    created_at: float


class WebhookCreated(WebhookOut):
    """A new webhook, or one with a new secret, which is shown this once."""

    secret: str = Field(description="Checks `webhook-signature`; not shown again.")


class DeliveryOut(ApiModel):
    """A message to a webhook. `next_try_at` counts while it is pending."""

    id: int
    message_id: str = Field(description="The header `webhook-id`, the same at every try.")
    job_id: str | None
    event_id: int | None
    kind: str
    body: str
    created_at: float
    state: str = Field(examples=["pending", "delivered", "dead"])
    num_tries: int
    next_try_at: float
    ended_at: float | None
    status_code: int | None
    message: str
