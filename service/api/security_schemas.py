"""Bodies of keys, the audit log and who one is, shared by the server and the client."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from service.api.schemas import ApiModel

RoleName = Literal["viewer", "submitter", "admin"]
KEY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]*$"
ProjectName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class WhoAmI(ApiModel):
    """Who asks, and the roles held by project (`*` stands for all)."""

    name: str = Field(examples=["key:ci"])
    kind: Literal["local", "key", "oidc", "session", "attempt", "machine"]
    roles: dict[str, RoleName] = Field(examples=[{"default": "submitter"}])
    auth: Literal["local", "required"] = Field(description="What the service asks for.")


class CreateKey(ApiModel):
    """Body of POST /v1/keys."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=KEY_NAME_PATTERN, examples=["ci"])
    roles: dict[ProjectName, RoleName] = Field(
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


class AuditOut(ApiModel):
    """One line of the audit log. `action` is method and route, `status` the HTTP status."""

    id: int
    time: float
    actor: str
    actor_kind: str
    action: str
    object: str
    remote: str
    status: int
    request_id: str


class AttemptSecrets(ApiModel):
    """Environment variables for the driver and the workers of an attempt."""

    secrets: dict[str, str]
