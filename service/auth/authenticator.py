"""From the credentials of a request to its principal. Blocking: reads the database."""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from service.auth.crypto import ATTEMPT_TOKEN_PREFIX, MasterKeys
from service.auth.oidc import TokenVerifier
from service.db.auth import KeyStore
from service.domain.auth import (
    KEY_PREFIX,
    LOCAL,
    ApiKey,
    Principal,
    Session,
    code_expiry,
    fits,
    hash_of,
    key_id_of,
    principal_of,
)
from service.errors import NotSignedIn, StoreUnavailable

# `last_used_at` only says whether a key is still in use.
_USE_NOTED_EVERY_S = 300.0


@dataclass(frozen=True)
class Credentials:
    """What a request carries: the bearer token, or the session cookie of a browser."""

    bearer: str | None = None
    cookie: str | None = None


@dataclass
class Authenticator:
    """Maps credentials to principals; with `is_open`, all but attempt tokens map to `LOCAL`.

    `local_token` is what the service's own user has, who is `LOCAL` by it, and by the sessions of
    links made with it, which end with the process. `clock` gives Unix
    seconds.
    """

    keys: KeyStore
    master: MasterKeys
    verifier: TokenVerifier | None
    is_open: bool
    session_ttl_s: float
    local_token: str | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._noted_at: dict[str, float] = {}
        # By the hash of their token; and when each code that was used would have expired.
        self._local_sessions: dict[str, Session] = {}
        self._used_codes: dict[str, float] = {}

    def is_quick(self, credentials: Credentials) -> bool:
        """Whether `principal_of` answers without asking database or provider."""
        is_attempt = (credentials.bearer or "").startswith(ATTEMPT_TOKEN_PREFIX)
        return is_attempt or credentials == Credentials() or self._is_local(credentials)

    def principal_of(self, credentials: Credentials) -> Principal:
        """The principal of these credentials; raises `NotSignedIn` where they are not valid."""
        bearer = credentials.bearer
        if bearer is not None and bearer.startswith(ATTEMPT_TOKEN_PREFIX):
            attempt_id = self.master.attempt_of(bearer)
            if attempt_id is None:
                raise NotSignedIn("the attempt's token does not count: was the secret key changed?")
            return Principal(attempt_id, "attempt")
        if self._is_local(credentials):
            return LOCAL
        if bearer is not None:
            return self._bearer(bearer)
        if credentials.cookie is not None:
            return self._session(credentials.cookie)
        raise NotSignedIn

    def sign_in(self, key_text: str) -> tuple[str, Session]:
        """A session for whoever has this API key; raises `NotSignedIn`."""
        key = self._key(key_text)
        now = self.clock()
        ends_at = now + self.session_ttl_s
        expires_at = ends_at if key.expires_at is None else min(ends_at, key.expires_at)
        token, session = secrets.token_urlsafe(32), Session(key.id, now, expires_at)
        self.keys.add_session(session, hash_of(token))
        return token, session

    def sign_in_by_link(self, code: str) -> tuple[str, Session]:
        """A session of `LOCAL` for a `login_code`; raises `NotSignedIn`, also the second time."""
        now = self.clock()
        expires_at = code_expiry(self.local_token or "", code) if self.local_token else 0.0
        with self._lock:
            is_used = code in self._used_codes
            self._used_codes = {c: at for c, at in self._used_codes.items() if now < at}
            if now >= expires_at or is_used:
                raise NotSignedIn("the link was used before, or is too old")
            self._used_codes[code] = expires_at
            token = secrets.token_urlsafe(32)
            known = {c: each for c, each in self._local_sessions.items() if now < each.expires_at}
            session = Session(LOCAL.name, now, now + self.session_ttl_s)
            self._local_sessions = {**known, hash_of(token): session}
        return token, session

    def sign_out(self, cookie: str) -> None:
        with self._lock:
            self._local_sessions.pop(hash_of(cookie), None)
        self.keys.end_session(hash_of(cookie))

    def _is_local(self, credentials: Credentials) -> bool:
        """Whether these are the credentials of the service's own user, or none are asked for."""
        bearer, cookie = credentials.bearer, credentials.cookie
        if self.is_open or self.local_token is None:
            return self.is_open
        if bearer is not None:
            return hmac.compare_digest(bearer.encode(), self.local_token.encode())
        session = None if cookie is None else self._local_sessions.get(hash_of(cookie))
        return session is not None and self.clock() < session.expires_at

    def _bearer(self, bearer: str) -> Principal:
        if bearer.startswith(KEY_PREFIX):
            return principal_of(self._key(bearer))
        if self.verifier is None:
            raise NotSignedIn("the bearer token is not an API key of this service")
        return self.verifier.principal_of(bearer)

    def _key(self, text: str) -> ApiKey:
        """The usable key with this text; `NotSignedIn` does not tell what is wrong with it."""
        key_id = key_id_of(text)
        found = self.keys.find_key(key_id) if key_id is not None else None
        if found is None or not fits(text, found[1]) or not found[0].is_usable(self.clock()):
            raise NotSignedIn("the API key is unknown, expired or revoked")
        self._note_use(found[0])
        return found[0]

    def _session(self, cookie: str) -> Principal:
        session = self.keys.find_session(hash_of(cookie))
        now = self.clock()
        if session is None or session.expires_at <= now:
            raise NotSignedIn("the session has ended")
        found = self.keys.find_key(session.key_id)
        if found is None or not found[0].is_usable(now):
            raise NotSignedIn("the session's API key is expired or revoked")
        return principal_of(found[0], is_session=True)

    def _note_use(self, key: ApiKey) -> None:
        now = self.clock()
        with self._lock:
            noted_at = self._noted_at.get(key.id, key.last_used_at or 0.0)
            is_due = now - noted_at >= _USE_NOTED_EVERY_S
            if is_due:
                self._noted_at[key.id] = now
        if is_due:
            # A database that takes no writes, as on a full disk, can be read all the same.
            with suppress(StoreUnavailable):
                self.keys.note_use(key.id, now)
