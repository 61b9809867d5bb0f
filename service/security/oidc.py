"""Bearer tokens of an identity provider: checked by its published keys, never by what they say.

Only asymmetric signatures count, so that neither `none` nor a public key used as a shared secret
gets anybody in. The provider's keys are kept; a token signed with an unknown one makes us look
again, but not too often (`service.security.provider_keys`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import JoseError

from service.security.errors import NotSignedIn
from service.security.principal import Principal, Role
from service.security.provider_keys import ProviderKeys
from service.settings import Settings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
LEEWAY_S = 30
_MAX_TOKEN_CHARS = 8192


@dataclass(frozen=True)
class Provider:
    """An identity provider, and what its tokens are worth here.

    `roles` maps a value of the claim `roles_claim` (dots lead into objects) to roles by project.
    """

    issuer: str
    audience: str
    jwks_url: str
    roles_claim: str
    roles: Mapping[str, Mapping[str, Role]]
    jwks_ttl_s: float = 3600.0


def provider_of(settings: Settings) -> Provider | None:
    """The provider that the settings name; None if they name none."""
    issuer, audience, url = settings.oidc_issuer, settings.oidc_audience, settings.oidc_jwks_url
    if not (issuer and audience and url):
        return None
    roles = {
        value: {project: Role.named(name) for project, name in granted.items()}
        for value, granted in settings.oidc_roles.items()
    }
    return Provider(
        issuer, audience, url, settings.oidc_roles_claim, roles, settings.oidc_jwks_ttl_s
    )


class TokenVerifier:
    """Checks the tokens of one provider; `clock` gives Unix seconds. Safe in several threads."""

    def __init__(
        self,
        provider: Provider,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._provider = provider
        self._clock = clock
        self._keys = ProviderKeys(provider.jwks_url, provider.jwks_ttl_s, transport, clock)

    def principal_of(self, token: str) -> Principal:
        """Whoever a token is for; raises `NotSignedIn`, or `IdentityProviderAway`."""
        if len(token) > _MAX_TOKEN_CHARS:
            raise NotSignedIn("the bearer token is too long")
        try:
            claims = self._verified(token)
            self._check_claims(claims)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            # The class says what was wrong; a text of the library could quote the token.
            cause = getattr(error, "error", type(error).__name__)
            raise NotSignedIn(f"the bearer token is refused ({cause})") from None
        return _principal(claims, self._provider)

    def _verified(self, token: str) -> dict[str, Any]:
        """Claims of a token that one of the provider's keys has signed."""
        keys = self._keys.current()
        try:
            return jwt.decode(token, keys, algorithms=ALGORITHMS).claims
        except (JoseError, ValueError):
            # The provider may have changed its keys.
            fresh = self._keys.newer_than(keys)
            if fresh is keys:
                raise
            return jwt.decode(token, fresh, algorithms=ALGORITHMS).claims

    def _check_claims(self, claims: dict[str, Any]) -> None:
        registry = jwt.JWTClaimsRegistry(
            now=int(self._clock()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": self._provider.issuer},
            aud={"essential": True, "value": self._provider.audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        registry.validate(claims)


def _principal(claims: Mapping[str, Any], provider: Provider) -> Principal:
    granted: dict[str, Role] = {}
    for value in _values(claims, provider.roles_claim):
        for project, role in provider.roles.get(value, {}).items():
            granted[project] = max(role, granted.get(project, role))
    return Principal(f"oidc:{claims['sub']}"[:255], "oidc", granted)


def _values(claims: Mapping[str, Any], path: str) -> list[str]:
    """Values of a claim, which may be a list, or one text with spaces between."""
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return found.split()
    return [value for value in found if isinstance(value, str)] if isinstance(found, list) else []
