"""Responses to requests with an Idempotency-Key, stored for a day and given to repeats.

A row is made before the request is carried out, so that two of the same never run at the same
time; it has no response until then. Bodies may hold secrets, so they come encrypted. Every method
raises `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, select, tuple_, update

from service.db.engine import Transactions, insert_for
from service.db.tables import answers

KEPT_S = 86_400.0
# A service that was killed in the middle leaves a row without a response.
ABANDONED_S = 120.0


class IdempotencyStore(Transactions):
    def begin(self, principal: str, key: str, request_hash: str, now: float) -> Row[Any] | None:
        """Store that a request is carried out; returns the row of the earlier one with its key, if
        any: its `status` is None while it is still being carried out."""
        is_over = answers.c.created_at < now - KEPT_S
        # Only of this key: all others without a response can wait for that.
        is_unanswered = _is(principal, key) & answers.c.status.is_(None)
        is_abandoned = is_unanswered & (answers.c.created_at < now - ABANDONED_S)
        row = (answers.c.principal, answers.c.key)
        # By itself, and without those that others delete: or two such requests wait for each other.
        old = select(*row).where(is_over | is_abandoned).with_for_update(skip_locked=True)
        self.execute(delete(answers).where(tuple_(*row).in_(old)))
        with self.write() as connection:
            insert = insert_for(connection.dialect, answers).values(
                principal=principal, key=key, request_hash=request_hash, created_at=now
            )
            new = insert.on_conflict_do_nothing().returning(answers.c.key)
            known = None
            while known is None:
                if connection.execute(new).first():
                    return None
                # None where the request before has failed since, which forgets its key.
                known = connection.execute(select(answers).where(_is(principal, key))).first()
            return known

    def finish(
        self,
        principal: str,
        key: str,
        status: int,
        headers: Sequence[tuple[str, str]],
        sealed_body: str,
    ) -> None:
        values = {"status": status, "headers": headers, "sealed_body": sealed_body}
        self.execute(update(answers).where(_is(principal, key)).values(values))

    def forget(self, principal: str, key: str) -> None:
        """Remove a request that failed: it may be repeated with its key."""
        self.execute(delete(answers).where(_is(principal, key)))


def _is(principal: str, key: str) -> ColumnElement[bool]:
    return (answers.c.principal == principal) & (answers.c.key == key)
