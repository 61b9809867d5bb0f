"""Principals and their roles by project (`*` for all), API keys, sessions, audit records. Pure.

The text of a key is `shl_ID_SECRET`. The secret has 256 random bits, so a plain SHA-256 of it is
stored: it cannot be guessed, and a slow hash would only slow the service down.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from pydantic import BaseModel

ALL_PROJECTS = "*"
PrincipalKind = Literal["local", "key", "oidc", "session", "attempt"]


class Role(IntEnum):
    """What one may do in a project; a higher role may do all that a lower one may."""

    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> Role:
        """The role of a lower-case name."""
        return cls[name.upper()]

    @property
    def label(self) -> str:
        """Name as users write it."""
        return self.name.lower()


@dataclass(frozen=True)
class Principal:
    """An authenticated caller. An attempt is named by its id; `credential_id` is an API key's."""

    name: str
    kind: PrincipalKind
    roles: Mapping[str, Role] = field(default_factory=dict)
    credential_id: str | None = None

    def role_in(self, project: str) -> Role | None:
        """The role in a project; None where the project may not even be seen."""
        held = [self.roles[name] for name in (project, ALL_PROJECTS) if name in self.roles]
        return max(held, default=None)

    def may(self, role: Role, project: str) -> bool:
        held = self.role_in(project)
        return held is not None and held >= role

    def may_somewhere(self, role: Role) -> bool:
        return any(held >= role for held in self.roles.values())

    @property
    def projects(self) -> frozenset[str] | None:
        """Projects that may be seen; None for all."""
        return None if ALL_PROJECTS in self.roles else frozenset(self.roles)


LOCAL = Principal("local", "local", {ALL_PROJECTS: Role.ADMIN})
"""The user whose service it is: who may read its home folder or, with `auth=none`, anybody."""


def parse_roles(roles: Mapping[str, str]) -> dict[str, Role]:
    """Roles by project from their names; raises ValueError."""
    return {project: Role.named(name) for project, name in roles.items()}


def role_names(roles: Mapping[str, Role]) -> dict[str, str]:
    return {project: role.label for project, role in sorted(roles.items())}


KEY_PREFIX = "shl_"
_KEY = re.compile(r"shl_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True)
class ApiKey:
    """An API key without its secret. Times are Unix seconds."""

    id: str
    name: str
    roles: Mapping[str, Role]
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None

    def is_usable(self, now: float) -> bool:
        """Whether the key counts at a time (Unix seconds)."""
        is_fresh = self.expires_at is None or now < self.expires_at
        return is_fresh and self.revoked_at is None


@dataclass(frozen=True)
class Session:
    """A browser that signed in, with a key or as `LOCAL`. Times are Unix seconds."""

    key_id: str
    created_at: float
    expires_at: float


class AuditRecord(BaseModel, frozen=True):
    """A record of the audit log: who did what to which object, from where, with what result.

    `action` is method and route; `status` the HTTP status of the answer.
    """

    id: int
    time: float
    actor: str
    actor_kind: str
    action: str
    object: str
    remote: str
    status: int
    request_id: str


@dataclass(frozen=True)
class AuditFilter:
    """Which records of the audit log are wanted; None matches all."""

    actor: str | None = None
    action: str | None = None
    object: str | None = None
    since: float | None = None
    only_refused: bool = False


def new_key_text() -> tuple[str, str]:
    """Id and whole text of a new key."""
    key_id = secrets.token_hex(6)
    return key_id, f"{KEY_PREFIX}{key_id}_{secrets.token_urlsafe(32)}"


def key_id_of(text: str) -> str | None:
    """The id in a key's text; None if it does not read as a key."""
    match = _KEY.fullmatch(text)
    return match.group(1) if match else None


def hash_of(text: str) -> str:
    """The hash that is stored of a key or a session token."""
    return hashlib.sha256(text.encode()).hexdigest()


def fits(text: str, stored_hash: str) -> bool:
    """Whether a stored hash is that of a text, in constant time."""
    return hmac.compare_digest(hash_of(text), stored_hash)


CODE_TTL_S = 3600.0


def login_code(local_token: str, now: float) -> str:
    """A code of a link that signs one browser in as `LOCAL`, for an hour from `now` on."""
    text = f"{now + CODE_TTL_S:.0f}-{secrets.token_hex(8)}"
    return f"{text}-{_code_mac(local_token, text)}"


def code_expiry(local_token: str, code: str) -> float:
    """When a `login_code` of this token expires (Unix seconds); 0 for any other text."""
    text, _, mac = code.rpartition("-")
    is_ours = hmac.compare_digest(mac.encode(), _code_mac(local_token, text).encode())
    return float(text.partition("-")[0]) if is_ours else 0.0


def _code_mac(local_token: str, text: str) -> str:
    # Half of it is enough for what lives an hour, and the link stays short.
    return hmac.new(local_token.encode(), text.encode(), hashlib.sha256).hexdigest()[:32]


def principal_of(key: ApiKey, *, is_session: bool = False) -> Principal:
    kind = "session" if is_session else "key"
    return Principal(f"key:{key.name}", kind, key.roles, credential_id=key.id)  # type: ignore[arg-type]
