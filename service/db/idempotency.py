"""Answers to requests that carried an Idempotency-Key, kept for a day so that a repeat gets them.

A row is made before the request is carried out, so that two of the same never run at the same
time; it has no answer until then. Bodies may hold secrets that are shown once: they come sealed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, delete, select
from sqlalchemy import update as sql_update

from service.db.engine import Transactions, insert_for
from service.db.tables import answers

KEPT_S = 86_400.0
# A service that was killed in the middle leaves a row without an answer.
ABANDONED_S = 120.0


@dataclass(frozen=True)
class StoredResponse:
    """What was answered; `status` is None while the request is still being carried out."""

    request_hash: str
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    sealed_body: str = ""


class IdempotencyStore:
    """Answers by principal and key; every method raises `StoreUnavailable` without a database."""

    def __init__(self, engine: Engine) -> None:
        self._transactions = Transactions(engine)

    def begin(
        self, principal: str, key: str, request_hash: str, now: float
    ) -> StoredResponse | None:
        """Note that a request is carried out; the earlier one with its key instead, if any is."""
        with self._transactions.write() as connection:
            is_over = answers.c.created_at < now - KEPT_S
            is_abandoned = answers.c.status.is_(None) & (answers.c.created_at < now - ABANDONED_S)
            connection.execute(delete(answers).where(is_over | is_abandoned))
            row = {
                "principal": principal,
                "key": key,
                "request_hash": request_hash,
                "created_at": now,
            }
            insert = insert_for(connection, answers).values(row).on_conflict_do_nothing()
            if connection.execute(insert.returning(answers.c.key)).first():
                return None
            known = connection.execute(select(answers).where(_is(principal, key))).one()
            headers = tuple((name, value) for name, value in known.headers or ())
            return StoredResponse(
                known.request_hash, known.status, headers, known.sealed_body or ""
            )

    def finish(self, principal: str, key: str, answer: StoredResponse) -> None:
        """Keep what was answered."""
        values = {
            "status": answer.status,
            "headers": [list(header) for header in answer.headers],
            "sealed_body": answer.sealed_body,
        }
        with self._transactions.write() as connection:
            connection.execute(sql_update(answers).where(_is(principal, key)).values(values))

    def forget(self, principal: str, key: str) -> None:
        """The request came to nothing, and may be tried again with its key."""
        with self._transactions.write() as connection:
            connection.execute(delete(answers).where(_is(principal, key)))


def _is(principal: str, key: str):
    return (answers.c.principal == principal) & (answers.c.key == key)
