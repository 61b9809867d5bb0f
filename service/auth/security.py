"""The security services of one app, the audit log writer, the first API key."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from service.auth.authenticator import Authenticator
from service.auth.crypto import MasterKeys, master_keys_of
from service.auth.oidc import TokenVerifier
from service.db.auth import KeyStore
from service.db.engine import migrate, open_engine
from service.domain.auth import (
    ApiKey,
    AuditRecord,
    hash_of,
    key_id_of,
    new_key_text,
    parse_roles,
)
from service.domain.models import Attempt, Job, JobStatus
from service.errors import ServiceError
from service.files import make_private
from service.settings import Settings


def may_read_secrets(job: Job, attempt: Attempt) -> bool:
    """Whether an attempt's token lets it read the job's secrets: its driver does so as it starts.

    Once there are workers nobody needs to, so that a token which leaked later opens nothing.
    """
    return job.is_run_by(attempt) and job.status is JobStatus.STARTING


logger = logging.getLogger(__name__)
# Some megabytes: what a database that stands still may cost us.
_MAX_PENDING = 10_000
_LINGER_S = 0.2
_FLUSH_TIMEOUT_S = 10.0


class AuditWriter:
    """Writes the audit log in order, in a thread of its own.

    Requests wait for no write: records of 0.2 s share a transaction, and are lost if the service
    is killed meanwhile.
    """

    def __init__(self, keys: KeyStore) -> None:
        self._keys = keys
        self._pending: list[AuditRecord] = []
        self._num_dropped = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "audit")
        self._newest_write: Future[None] | None = None
        self._is_wanted_now = threading.Event()

    def append(self, record: AuditRecord) -> None:
        """Write a record soon; if too many wait, drop it, which is logged."""
        with self._lock:
            if len(self._pending) >= _MAX_PENDING:
                self._num_dropped += 1
                return
            self._pending.append(record)
            if len(self._pending) == 1:
                self._newest_write = self._thread.submit(self._write)

    def flush(self) -> None:
        """Wait until all that was appended before is written, at most some seconds."""
        with self._lock:
            newest = self._newest_write
        if newest is not None:
            self._is_wanted_now.set()
            wait([newest], _FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        # More records may come that can share the transaction, unless somebody wants to read.
        self._is_wanted_now.wait(_LINGER_S)
        with self._lock:
            records, self._pending = self._pending, []
            num_dropped, self._num_dropped = self._num_dropped, 0
            self._is_wanted_now.clear()
        try:
            self._keys.append_audit(records)
        except Exception as error:
            # The log of the service is the second-best place.
            logger.error("%d lines of the audit log are not kept: %s", len(records), error)
            for record in records:
                logger.error("audit: %s", record)
        if num_dropped:
            logger.warning("%d lines of the audit log are lost: too many waited", num_dropped)


def create_first_key(
    name: str, roles: Mapping[str, str], expires_in_s: float | None
) -> tuple[ApiKey, str] | None:
    """Write a key to the configured database, which is migrated: the key and its text.

    None where an administrator has a usable key. Nobody else could ask the service for one, so this
    goes around it. Raises `StoreUnavailable`.
    """
    now = time.time()
    key_id, text = new_key_text()
    expires_at = None if expires_in_s is None else now + expires_in_s
    user = os.environ.get("USER", "unknown")
    key = ApiKey(key_id, name, parse_roles(roles), now, f"bootstrap by {user}", expires_at)
    settings = Settings()
    make_private(settings.home)
    engine = open_engine(settings.database_url)
    try:
        migrate(engine)
        keys = KeyStore(engine)
        if keys.has_usable_key(now, is_admin=True):
            return None
        keys.add_key(key, hash_of(text))
        return key, text
    finally:
        engine.dispose()


def write_given_keys(keys: KeyStore, settings: Settings, now: float) -> None:
    """Write the keys that the settings give, each unless it is there; raises `ServiceError`."""
    for name, secret, role in (
        ("first", settings.first_key, "admin"),
        ("metrics", settings.metrics_key, "viewer"),
    ):
        if secret is not None:
            _write_given_key(keys, secret.get_secret_value(), name, role, now)


def _write_given_key(keys: KeyStore, text: str, name: str, role: str, now: float) -> None:
    variable, key_id = f"SHARDLOOM_{name.upper()}_KEY", key_id_of(text)
    if key_id is None:
        raise ServiceError(
            f"{variable} does not read as an API key: it is shl_, 12 characters of a-z and "
            "0-9, _, and 43 of A-Z, a-z, 0-9, - and _ (the chart makes one with secrets.generate)"
        )
    if keys.find_key(key_id) is None:
        key = ApiKey(key_id, name, parse_roles({"*": role}), now, variable, None)
        with suppress(IntegrityError):  # another replica was faster
            keys.add_key(key, hash_of(text))


@dataclass(frozen=True)
class Security:
    """Keys, sessions, secrets and the audit log of one service."""

    keys: KeyStore
    master: MasterKeys
    authenticator: Authenticator
    audit: AuditWriter

    @classmethod
    def open(cls, settings: Settings, engine: Engine) -> Security:
        """Build it; raises `SecretKeyUnusable`."""
        keys, master = KeyStore(engine), master_keys_of(settings)
        has_provider = settings.oidc_issuer and settings.oidc_audience and settings.oidc_jwks_url
        authenticator = Authenticator(
            keys,
            master,
            TokenVerifier(settings) if has_provider else None,
            is_open=settings.auth == "none",
            local_token=secrets.token_urlsafe(32) if settings.auth == "local" else None,
            session_ttl_s=settings.session_ttl_s,
        )
        return cls(keys, master, authenticator, AuditWriter(keys))

    def encrypt_secrets(self, values: Mapping[str, str]) -> dict[str, str]:
        return {name: self.master.encrypt(value) for name, value in values.items()}

    def read_secrets(self, job_id: str) -> dict[str, str]:
        """Secrets of a job, readable; raises `SecretKeyUnusable`."""
        encrypted = self.keys.secrets_of(job_id)
        return {name: self.master.decrypt(text) for name, text in encrypted.items()}
