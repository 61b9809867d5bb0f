"""REST bodies of administration: projects, the cluster, API keys, the audit log, webhooks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from service.domain.auth import PrincipalKind
from service.domain.timeline import EVENT_KINDS
from service.schemas.common import ApiModel, RequestModel
from trainer.layout.hosts import HostFacts
from trainer.spec.base import FORMS, NAME_PATTERN


class Quotas(RequestModel):
    """What the jobs of a project may hold at the same time; null is no limit."""

    max_workers: int | None = Field(default=None, ge=0, le=2**31 - 1, examples=[64])
    max_running_jobs: int | None = Field(default=None, ge=0, le=2**31 - 1, examples=[8])


class ProjectOut(ApiModel):
    """A project: its quotas and what its jobs hold now."""

    name: str
    max_workers: int | None
    max_running_jobs: int | None
    updated_at: float | None = Field(description="When the quotas were set; null without any.")
    num_workers: int
    num_running_jobs: int
    num_queued_jobs: int


class ClusterOut(ApiModel):
    """The cluster behind the service; `hosts` is empty where the backend does not tell them.

    One that grows by itself has room for `max_workers` in the end.
    """

    reachable: bool
    backend: str
    address: str
    message: str
    max_workers: int | None = None
    hosts: list[HostFacts] = []  # noqa: RUF012


# A role of the domain is named by its label.
RoleName = Annotated[
    Literal["viewer", "submitter", "admin"],
    BeforeValidator(lambda role: getattr(role, "label", role)),
]
_KEY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
_PROJECT_PATTERN = r"^(\*|[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)$"
FORMS[_KEY_NAME_PATTERN] = (
    "must be 1 to 64 of A-Z, a-z, 0-9 and '._@-', and begin with a letter or digit"
)
FORMS[_PROJECT_PATTERN] = f"{FORMS[NAME_PATTERN]}, or be '*' for all"
Project = Annotated[str, Field(pattern=_PROJECT_PATTERN)]


class WhoAmI(ApiModel):
    """Who asks, and the roles held by project (`*` stands for all)."""

    name: str = Field(examples=["key:ci"])
    kind: PrincipalKind
    roles: dict[str, RoleName] = Field(examples=[{"default": "submitter"}])
    auth: Literal["none", "local", "required"] = Field(description="What the service asks for.")


class CreateKey(RequestModel):
    """Body of POST /v1/keys."""

    name: str = Field(pattern=_KEY_NAME_PATTERN, examples=["ci"])
    roles: dict[Project, RoleName] = Field(
        min_length=1, max_length=100, examples=[{"default": "submitter"}]
    )
    expires_in_s: float | None = Field(
        default=None, gt=0, le=10 * 366 * 86_400, description="Null: never.", examples=[7_776_000]
    )


class KeyOut(ApiModel):
    """An API key without its secret. `last_used_at` is right to five minutes."""

    id: str
    name: str
    roles: dict[str, RoleName]
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class NewKey(KeyOut):
    """A new API key. `key` is shown this once: only a hash of it is kept."""

    key: str


class ClaimSecrets(RequestModel):
    """Body of POST /v1/attempts/ID/secrets."""

    claim: str = Field(
        min_length=32, max_length=128, description="Random text that the driver makes once."
    )


class ClaimToken(RequestModel):
    """Body of POST /v1/attempts:claim."""

    attempt_id: str = Field(max_length=64)
    code: str = Field(min_length=64, max_length=64, description="SHARDLOOM_ATTEMPT_CODE.")
    claim: str = Field(
        min_length=32, max_length=128, description="Random text that the driver makes once."
    )


class AttemptToken(ApiModel):
    """The bearer token of an attempt."""

    token: str


class RunFiles(ApiModel):
    """Files of a run folder that hosts take from the service."""

    current: str | None = Field(description="Id of the job's newest attempt.")
    files: dict[str, str] = Field(description="Path in the run folder -> version.")


class RunFileKept(ApiModel):
    """Whether a file is in place: its version then, null while pieces are missing."""

    version: str | None
    size: int = Field(description="Bytes that are there: where the next piece begins.")


class LogKept(ApiModel):
    """The end of a log or stream in bytes, and whether what was sent is its last part now."""

    end: int
    taken: bool


class AttemptLease(ApiModel):
    """Whether an attempt is the newest of its job and has not ended."""

    is_current: bool


class AttemptSecrets(ApiModel):
    """Environment variables for the driver and the workers of an attempt."""

    secrets: dict[str, str]


def _known_kind(kind: str) -> str:
    if kind not in EVENT_KINDS:
        raise ValueError(f"no event is of the kind '{kind}'; known: {', '.join(_KINDS)}")
    return kind


_KINDS = sorted(EVENT_KINDS)
Kind = Annotated[
    str, AfterValidator(_known_kind), WithJsonSchema({"type": "string", "enum": _KINDS})
]
Url = Annotated[str, Field(min_length=1, max_length=2048, examples=["https://example.com/hook"])]
# PostgreSQL cannot hold NUL characters.
Description = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]


class CreateWebhook(RequestModel):
    """Body of POST /v1/webhooks."""

    url: Url
    project: Project = Field(default="default", description="Or * for every project.")
    kinds: list[Kind] = Field(
        default=[], max_length=50, description="Kinds of timeline lines; empty for all."
    )
    description: Description = ""


class ChangeWebhook(RequestModel):
    """Body of PATCH /v1/webhooks/{webhook_id}: what is left away stays as it is."""

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
