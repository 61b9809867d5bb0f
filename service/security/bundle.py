"""Everything that guards one service, built once over its settings and database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Engine

from service.security.attempts import AttemptRights
from service.security.audit import AuditWriter
from service.security.authenticator import Authenticator
from service.security.master_keys import MasterKeys, master_keys_of
from service.security.oidc import TokenVerifier, provider_of
from service.settings import Settings
from service.store.base import JobStore
from service.store.keys import KeyStore

_ORPHAN_AGE_S = 3600.0


@dataclass(frozen=True)
class Security:
    """Keys, sessions, secrets and the audit log of one service."""

    keys: KeyStore
    master: MasterKeys
    authenticator: Authenticator
    audit: AuditWriter
    attempts: AttemptRights

    @classmethod
    def open(cls, settings: Settings, store: JobStore, engine: Engine) -> Security:
        """Build it; raises `SecretKeyUnusable`."""
        keys, master, provider = KeyStore(engine), master_keys_of(settings), provider_of(settings)
        authenticator = Authenticator(
            keys,
            master,
            TokenVerifier(provider) if provider else None,
            is_local=settings.auth == "local",
            session_ttl_s=settings.session_ttl_s,
            machine_token=token.get_secret_value() if (token := settings.ray_auth_token) else None,
        )
        return cls(keys, master, authenticator, AuditWriter(keys), AttemptRights(store))

    def seal_secrets(self, job_id: str, secrets: Mapping[str, str]) -> None:
        """Keep secrets of a job that is about to be stored; raises `StoreUnavailable`."""
        sealed = {name: self.master.seal(value) for name, value in secrets.items()}
        self.keys.keep_secrets(job_id, sealed, time.time())

    def open_secrets(self, job_id: str) -> dict[str, str]:
        """Secrets of a job, readable; raises `SecretKeyUnusable`."""
        sealed = self.keys.secrets_of(job_id)
        return {name: self.master.open(text) for name, text in sealed.items()}

    def forget_orphans(self) -> None:
        """Delete secrets that were kept for jobs which then were not stored, or are deleted."""
        self.keys.forget_orphans(time.time() - _ORPHAN_AGE_S)

    def close(self) -> None:
        """Write what is left of the audit log."""
        self.audit.flush()
