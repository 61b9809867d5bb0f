"""Webhooks and their outbox: what is to be sent is stored with the timeline line that it tells of.

A delivery is written in the transaction of its line, so none is lost; a sender claims it for a
while before it sends, so two replicas do not send it both, and one that dies in between leaves
it to the others. A receiver may still hear a delivery twice and tells it by its id.

webhooks 1 ── n webhook_deliveries
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.db import rows
from service.db.tables import jobs, timeline, webhook_deliveries, webhooks
from service.domain.models import TimelineEvent
from service.domain.webhooks import (
    ALL_PROJECTS,
    Claimed,
    Delivery,
    DeliveryState,
    Outcome,
    Webhook,
    body_of,
    wants,
)
from service.errors import DeliveryNotFound, StoreUnavailable, WebhookNotFound

# A slow receiver must not take every sender: of one webhook this many are claimed at a time.
MAX_CLAIMED_EACH = 4


def insert_lines(connection: Connection, lines: Sequence[TimelineEvent]) -> None:
    """Append timeline lines, and what webhooks are to hear of them, in one transaction."""
    listening = _listeners(connection, {line.job_id for line in lines})
    if not listening:
        connection.execute(insert(timeline), [rows.timeline_values(line) for line in lines])
        return
    numbered = insert(timeline).returning(timeline.c.id, sort_by_parameter_order=True)
    ids = connection.execute(numbered, [rows.timeline_values(line) for line in lines]).scalars()
    stored = [replace(line, id=number) for line, number in zip(lines, ids, strict=True)]
    deliveries = [
        _delivery_values(hook["id"], line, hook["job_project"])
        for line in stored
        for hook in listening
        if hook["job_id"] == line.job_id and wants(hook["kinds"], line.kind)
    ]
    if deliveries:
        connection.execute(insert(webhook_deliveries), deliveries)


def _listeners(connection: Connection, job_ids: set[str]) -> Sequence[RowMapping]:
    fits = or_(webhooks.c.project == jobs.c.project, webhooks.c.project == ALL_PROJECTS)
    query = (
        select(
            webhooks.c.id,
            webhooks.c.kinds,
            jobs.c.id.label("job_id"),
            jobs.c.project.label("job_project"),
        )
        .join(jobs, fits)
        .where(jobs.c.id.in_(job_ids), webhooks.c.is_active)
    )
    return connection.execute(query).mappings().all()


def _delivery_values(webhook_id: str, line: TimelineEvent, project: str) -> dict[str, Any]:
    return {
        "webhook_id": webhook_id,
        "job_id": line.job_id,
        "event_id": line.id,
        "kind": line.kind,
        "body": body_of(line, project),
        "created_at": line.time,
        "state": DeliveryState.PENDING.value,
        "num_tries": 0,
        "next_try_at": 0.0,
        "claimed_until": 0.0,
        "message": "",
    }


class WebhookStore:
    """Webhooks and deliveries over the engine of the job store. Raises `StoreUnavailable`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # ---- webhooks

    def create(self, webhook: Webhook) -> None:
        """Store a new webhook."""
        with self._transaction(is_write=True) as connection:
            connection.execute(insert(webhooks), vars(webhook))

    def get(self, webhook_id: str) -> Webhook:
        """Read a webhook; raises `WebhookNotFound`."""
        with self._transaction() as connection:
            return _read(connection, webhook_id)

    def list_webhooks(self, project: str | None = None) -> list[Webhook]:
        """Webhooks of a project, or of all, oldest first."""
        query = select(webhooks).order_by(webhooks.c.created_at, webhooks.c.id)
        if project is not None:
            query = query.where(webhooks.c.project == project)
        with self._transaction() as connection:
            return [_webhook_of(row) for row in connection.execute(query).mappings()]

    def change(self, webhook_id: str, changes: Mapping[str, Any]) -> Webhook:
        """Change fields of a webhook; raises `WebhookNotFound`."""
        with self._transaction(is_write=True) as connection:
            _read(connection, webhook_id)
            if changes:
                _change(connection, webhook_id, **changes)
            return _read(connection, webhook_id)

    def delete(self, webhook_id: str) -> None:
        """Forget a webhook and its deliveries; raises `WebhookNotFound`."""
        with self._transaction(is_write=True) as connection:
            _read(connection, webhook_id)
            own = webhook_deliveries.c.webhook_id == webhook_id
            connection.execute(delete(webhook_deliveries).where(own))
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))

    # ---- deliveries

    def list_deliveries(
        self,
        webhook_id: str,
        *,
        after: int | None = None,
        limit: int = 50,
        state: DeliveryState | None = None,
    ) -> list[Delivery]:
        """Deliveries of a webhook, newest first, with an id below `after`."""
        own = webhook_deliveries.c
        query = select(webhook_deliveries).where(own.webhook_id == webhook_id)
        if after is not None:
            query = query.where(own.id < after)
        if state is not None:
            query = query.where(own.state == state.value)
        with self._transaction() as connection:
            _read(connection, webhook_id)
            found = connection.execute(query.order_by(own.id.desc()).limit(limit)).mappings()
            return [_delivery_of(row) for row in found]

    def redeliver(self, webhook_id: str, delivery_id: int) -> Delivery:
        """Send a delivery again, from its first try on; raises `DeliveryNotFound`."""
        own = webhook_deliveries.c
        fresh = {
            "state": DeliveryState.PENDING.value,
            "num_tries": 0,
            "next_try_at": 0.0,
            "ended_at": None,
        }
        mine = (own.id == delivery_id, own.webhook_id == webhook_id)
        with self._transaction(is_write=True) as connection:
            connection.execute(update(webhook_deliveries).where(*mine).values(**fresh))
            row = connection.execute(select(webhook_deliveries).where(*mine)).mappings().first()
        if row is None:
            raise DeliveryNotFound(webhook_id, delivery_id)
        return _delivery_of(row)

    def add_test(self, webhook_id: str, body: str, now: float) -> Delivery:
        """Queue a delivery that tells of no job; raises `WebhookNotFound`."""
        values = {
            "webhook_id": webhook_id,
            "kind": "test",
            "body": body,
            "created_at": now,
            "state": DeliveryState.PENDING.value,
            "num_tries": 0,
            "next_try_at": 0.0,
            "claimed_until": 0.0,
            "message": "",
        }
        with self._transaction(is_write=True) as connection:
            _read(connection, webhook_id)
            added = insert(webhook_deliveries).returning(webhook_deliveries)
            return _delivery_of(connection.execute(added, values).mappings().one())

    # ---- the sender's side

    def claim(self, now: float, *, claim_s: float, skip: Collection[str] = ()) -> list[Claimed]:
        """Take due deliveries of active webhooks for `claim_s` seconds; nobody else gets them.

        Of each webhook at most a few, so that one with many does not hold up the others; of those
        in `skip` none.
        """
        own = webhook_deliveries.c
        due = (
            own.state == DeliveryState.PENDING.value,
            own.next_try_at <= now,
            own.claimed_until <= now,
        )
        waiting = (
            select(webhooks)
            .where(webhooks.c.is_active, webhooks.c.id.not_in(list(skip)))
            .where(exists().where(own.webhook_id == webhooks.c.id, *due))
        )
        with self._transaction() as connection:
            # Mostly nothing is due, and then nobody else should wait for a lock.
            hooks = connection.execute(waiting).mappings().all()
        if not hooks:
            return []
        with self._transaction(is_write=True) as connection:
            found = []
            for hook in hooks:
                for row in _lock_due(connection, hook["id"], due):
                    found.append(Claimed(_delivery_of(row), hook["url"], hook["secret"]))
            mark = update(webhook_deliveries).values(claimed_until=now + claim_s)
            ids = [claimed.delivery.id for claimed in found]
            if ids:
                connection.execute(mark.where(own.id.in_(ids)))
        return found

    def settle(self, delivery_id: int, outcome: Outcome, now: float) -> None:
        """Store what came of a try, and what follows for its webhook."""
        own = webhook_deliveries.c
        has_ended = outcome.state is not DeliveryState.PENDING
        values = {
            "state": outcome.state.value,
            "num_tries": own.num_tries + 1,
            "next_try_at": outcome.next_try_at,
            "claimed_until": 0.0,
            "ended_at": now if has_ended else None,
            "status_code": outcome.status_code,
            "message": outcome.message,
        }
        with self._transaction(is_write=True) as connection:
            one = own.id == delivery_id
            connection.execute(update(webhook_deliveries).where(one).values(**values))
            found = connection.execute(select(own.webhook_id).where(one)).scalar_one_or_none()
            if found is not None and has_ended:
                _note_end(connection, found, outcome)

    def prune(self, before: float) -> int:
        """Forget what was created before `before` (Unix seconds); returns how many."""
        old = webhook_deliveries.c.created_at < before
        with self._transaction(is_write=True) as connection:
            return connection.execute(delete(webhook_deliveries).where(old)).rowcount

    @contextmanager
    def _transaction(self, *, is_write: bool = False) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                connection.execution_options(is_write=is_write)
                with connection.begin():
                    yield connection
        except (DBAPIError, PoolTimeout) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise StoreUnavailable(f"the database did not do its part ({cause})") from error


def _note_end(connection: Connection, webhook_id: str, outcome: Outcome) -> None:
    """Count what could not be delivered, and switch a webhook off that nothing reaches."""
    if outcome.state is DeliveryState.DELIVERED:
        _change(connection, webhook_id, num_dead_in_a_row=0)
        return
    num_dead = _read(connection, webhook_id).num_dead_in_a_row + 1
    _change(connection, webhook_id, num_dead_in_a_row=num_dead)
    if outcome.disables(num_dead):
        note = f"switched off after {num_dead} deliveries in a row failed: {outcome.message}"
        _change(connection, webhook_id, is_active=False, note=note)


def _change(connection: Connection, webhook_id: str, **values: Any) -> None:
    connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**values))


def _read(connection: Connection, webhook_id: str) -> Webhook:
    query = select(webhooks).where(webhooks.c.id == webhook_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise WebhookNotFound(webhook_id)
    return _webhook_of(row)


def _lock_due(
    connection: Connection, webhook_id: str, due: Sequence[ColumnElement[bool]]
) -> Sequence[RowMapping]:
    query = (
        select(webhook_deliveries)
        .where(webhook_deliveries.c.webhook_id == webhook_id, *due)
        .order_by(webhook_deliveries.c.id)
        .limit(MAX_CLAIMED_EACH)
        .with_for_update(skip_locked=True)
    )
    return connection.execute(query).mappings().all()


def _webhook_of(row: RowMapping) -> Webhook:
    return Webhook(**{**row, "kinds": tuple(row["kinds"])})


def _delivery_of(row: RowMapping) -> Delivery:
    fields = {name: row[name] for name in Delivery.__dataclass_fields__}
    return Delivery(**{**fields, "state": DeliveryState(row["state"])})
