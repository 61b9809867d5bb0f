"""OpenID Connect: the JWKS cache of an identity provider, and verification of its tokens.

One thread fetches the keys at a time, without holding the lock. Old keys stay in use meanwhile; a
caller without any waits up to a second, or gets `IdentityProviderAway`. Fetches, successful or
not, are `RELOAD_PAUSE_S` apart. Only asymmetric signatures are accepted, so that neither `none` nor
a public key used as a shared secret verifies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from service.domain.auth import Principal, Role, parse_roles
from service.errors import IdentityProviderAway, NotSignedIn
from service.settings import Settings

RELOAD_PAUSE_S = 10.0
_TTL_S = 3600.0
_TIMEOUT_S = 5.0
_WAIT_S = 1.0
# Each holds a thread of the service, which requests with an API key need, too.
_MAX_WAITING = 8


class ProviderKeys:
    """The keys at `url`, kept for an hour; `clock` gives seconds. Safe in several threads."""

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._http = httpx.Client(transport=transport, timeout=_TIMEOUT_S)
        self._clock = clock
        self._fetching = threading.Lock()
        self._waiting = threading.Semaphore(_MAX_WAITING)
        self._keys = KeySet([])
        self._loaded_at = self._tried_at = -1e18
        self._failure = "not read yet"

    def current(self) -> KeySet:
        """The keys as far as they are known; raises `IdentityProviderAway` if none are."""
        if abs(self._clock() - self._loaded_at) >= _TTL_S:
            self._refresh(must_wait=not self._keys.keys)
        if not self._keys.keys:
            raise IdentityProviderAway(self._url, self._failure)
        return self._keys

    def newer_than(self, known: KeySet) -> KeySet:
        """Keys that were read after `known`; `known` itself where it is too early to look."""
        if self._keys is known:
            self._refresh(must_wait=True)
        return self._keys

    def _refresh(self, *, must_wait: bool) -> None:
        """Fetch the keys, unless that was tried lately; wait for the thread that does it."""
        if not self._fetching.acquire(blocking=False):
            if must_wait and self._waiting.acquire(blocking=False):
                if self._fetching.acquire(timeout=_WAIT_S):
                    self._fetching.release()
                self._waiting.release()
            return
        try:
            # Of a clock that was set back nothing is waited for.
            if abs(self._clock() - self._tried_at) >= RELOAD_PAUSE_S:
                self._tried_at = self._clock()
                self._fetch()
                self._tried_at = self._clock()
        finally:
            self._fetching.release()

    def _fetch(self) -> None:
        """Read the keys that are published; where they cannot be had the old ones stay."""
        try:
            response = self._http.get(self._url)
            response.raise_for_status()
            self._failure = "it publishes none"
            # A shared secret, which no provider should publish, must not verify anything.
            keys = [key for key in response.json()["keys"] if key.get("kty") != "oct"]
            self._keys = KeySet.import_key_set({"keys": keys})
            self._loaded_at = self._clock()
        except (httpx.HTTPError, JoseError, ValueError, KeyError, TypeError) as error:
            # Keys that were good an hour ago are better than nobody let in.
            self._failure = type(error).__name__


ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
LEEWAY_S = 30
_MAX_TOKEN_CHARS = 8192


class TokenVerifier:
    """Checks the tokens of the provider that the settings name. Safe in several threads.

    Values of the claim `oidc_roles_claim` (dots lead into objects) give roles by project. `clock`
    gives Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        issuer, audience, url = settings.oidc_issuer, settings.oidc_audience, settings.oidc_jwks_url
        assert issuer and audience and url, "the caller has checked that there is a provider"
        self._issuer, self._audience = issuer, audience
        self._claim = settings.oidc_roles_claim
        self._roles = {value: parse_roles(roles) for value, roles in settings.oidc_roles.items()}
        self._clock = clock
        self._keys = ProviderKeys(url, transport, clock)

    def principal_of(self, token: str) -> Principal:
        """The principal of a token; raises `NotSignedIn`, or `IdentityProviderAway`."""
        if len(token) > _MAX_TOKEN_CHARS:
            raise NotSignedIn("the bearer token is too long")
        try:
            claims = self._verified(token)
            jwt.JWTClaimsRegistry(
                now=int(self._clock()),
                leeway=LEEWAY_S,
                iss={"essential": True, "value": self._issuer},
                aud={"essential": True, "value": self._audience},
                exp={"essential": True},
                sub={"essential": True},
            ).validate(claims)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            # The class says what was wrong; a text of the library could quote the token.
            cause = getattr(error, "error", type(error).__name__)
            raise NotSignedIn(f"the bearer token is refused ({cause})") from None
        granted: dict[str, Role] = {}
        for value in _values(claims, self._claim):
            for project, role in self._roles.get(value, {}).items():
                granted[project] = max(role, granted.get(project, role))
        return Principal(f"oidc:{claims['sub']}"[:255], "oidc", granted)

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


def _values(claims: Mapping[str, Any], path: str) -> list[str]:
    """Values of a claim, which may be a list, or one text with spaces between."""
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, str):
        return found.split()
    return [value for value in found if isinstance(value, str)] if isinstance(found, list) else []
