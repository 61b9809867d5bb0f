"""`KeyStore`: API keys, browser sessions, secrets of jobs, the audit log.

Of keys, sessions and claims only hashes are stored, of secrets only ciphertext (`MasterKeys`). The
audit log is append-only; the database refuses changes. Every method raises `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from sqlalchemy import BigInteger, RowMapping, delete, insert, literal, select, update

from service.db.engine import Transactions
from service.db.tables import (
    api_keys,
    attempts,
    audit_log,
    job_secrets,
    jobs,
    sessions,
    sweeps,
)
from service.domain.auth import (
    ALL_PROJECTS,
    ApiKey,
    AuditFilter,
    AuditRecord,
    Role,
    Session,
    parse_roles,
    role_names,
)
from service.errors import KeyNotFound


class KeyStore(Transactions):
    # ---- keys

    def add_key(self, key: ApiKey, secret_hash: str) -> None:
        values = {**vars(key), "roles": role_names(key.roles), "secret_hash": secret_hash}
        self.execute(insert(api_keys), values)

    def find_key(self, key_id: str) -> tuple[ApiKey, str] | None:
        """A key and the hash of its secret; None if there is no such key."""
        rows = self.rows(select(api_keys).where(api_keys.c.id == key_id))
        return (_key_of(rows[0]), rows[0]["secret_hash"]) if rows else None

    def list_keys(self, *, after: str | None = None, limit: int = 50) -> list[ApiKey]:
        """Keys in the order of their ids, behind `after`."""
        query = select(api_keys).order_by(api_keys.c.id).limit(limit)
        if after is not None:
            query = query.where(api_keys.c.id > after)
        return [_key_of(row) for row in self.rows(query)]

    def has_usable_key(self, now: float, *, is_admin: bool = False) -> bool:
        """Whether a key is valid at this time (Unix seconds), one with all rights if `is_admin`."""
        is_fresh = api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > now)
        query = select(api_keys.c.roles).where(api_keys.c.revoked_at.is_(None), is_fresh)
        held = [row["roles"].get(ALL_PROJECTS) for row in self.rows(query)]
        return Role.ADMIN.label in held if is_admin else bool(held)

    def revoke_key(self, key_id: str, now: float) -> ApiKey:
        """End a key and its sessions; raises `KeyNotFound`. Doing it again changes nothing."""
        is_key = api_keys.c.id == key_id
        with self.write() as connection:
            unrevoked = is_key & api_keys.c.revoked_at.is_(None)
            connection.execute(update(api_keys).where(unrevoked).values(revoked_at=now))
            connection.execute(delete(sessions).where(sessions.c.key_id == key_id))
            row = connection.execute(select(api_keys).where(is_key)).mappings().first()
        if row is None:
            raise KeyNotFound(key_id)
        return _key_of(row)

    def note_use(self, key_id: str, now: float) -> None:
        statement = update(api_keys).where(api_keys.c.id == key_id)
        self.execute(statement.values(last_used_at=now))

    # ---- sessions

    def add_session(self, session: Session, token_hash: str) -> None:
        """Store a session, and delete those that have expired by then."""
        with self.write() as connection:
            is_over = sessions.c.expires_at <= session.created_at
            connection.execute(delete(sessions).where(is_over))
            connection.execute(insert(sessions), {**vars(session), "token_hash": token_hash})

    def find_session(self, token_hash: str) -> Session | None:
        """A session by the hash of its token, expired or not."""
        found = select(sessions.c.key_id, sessions.c.created_at, sessions.c.expires_at)
        rows = self.rows(found.where(sessions.c.token_hash == token_hash))
        return Session(**rows[0]) if rows else None

    def end_session(self, token_hash: str) -> None:
        self.execute(delete(sessions).where(sessions.c.token_hash == token_hash))

    # ---- secrets of jobs, and of sweeps for their trials, by the id of either

    def keep_secrets(self, job_id: str, sealed: Mapping[str, str], now: float) -> None:
        """Store encrypted secrets of a job or sweep, by name."""
        rows = [
            {"job_id": job_id, "name": name, "sealed": text, "created_at": now}
            for name, text in sealed.items()
        ]
        if rows:
            self.execute(insert(job_secrets), rows)

    def secrets_of(self, job_id: str) -> dict[str, str]:
        """Encrypted secrets of a job, by name."""
        query = select(job_secrets).where(job_secrets.c.job_id == job_id)
        rows = self.rows(query.order_by(job_secrets.c.name))
        return {row["name"]: row["sealed"] for row in rows}

    def claim_secrets(self, attempt_id: str, claim_hash: str) -> bool:
        """Give the secrets of an attempt to its first claim; whether this is that one."""
        claim = attempts.c.secrets_claim
        is_first = claim.is_(None) | (claim == claim_hash)
        statement = update(attempts).where(attempts.c.id == attempt_id, is_first)
        return self.execute(statement.values(secrets_claim=claim_hash)) == 1

    def forget_orphans(self, before: float) -> int:
        """Delete secrets stored before a time of no job, and of no sweep that lives; how many."""
        live = select(sweeps.c.id).where(sweeps.c.ended_at.is_(None))
        is_orphan = job_secrets.c.job_id.not_in(select(jobs.c.id).union_all(live))
        is_old = job_secrets.c.created_at < before
        return self.execute(delete(job_secrets).where(is_orphan, is_old))

    # ---- audit

    def append_audit(self, records: Sequence[AuditRecord]) -> None:
        """Add lines to the audit log; their ids are the database's to give."""
        values = [{k: v for k, v in vars(record).items() if k != "id"} for record in records]
        self.execute(insert(audit_log), values)

    def list_audit(
        self, wanted: AuditFilter, *, before: int | None = None, limit: int = 50
    ) -> list[AuditRecord]:
        """Lines that fit, newest first, with an id below `before`."""
        query = select(audit_log).order_by(audit_log.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(audit_log.c.id < literal(before, BigInteger))
        for name in ("actor", "action", "object"):
            if (value := getattr(wanted, name)) is not None:
                query = query.where(audit_log.c[name] == value)
        if wanted.since is not None:
            query = query.where(audit_log.c.time >= wanted.since)
        if wanted.only_refused:
            query = query.where(audit_log.c.status >= 400)
        return [AuditRecord(**row) for row in self.rows(query)]


def _key_of(row: RowMapping) -> ApiKey:
    same = {each.name: row[each.name] for each in fields(ApiKey) if each.name != "roles"}
    return ApiKey(**same, roles=parse_roles(row["roles"]))
