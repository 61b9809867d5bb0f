"""Webhooks and the outbox of their deliveries.

A delivery is written in the transaction of its timeline event, so none is lost. A sender claims it
for a while before sending, so that replicas do not send it twice and one that dies leaves it to
the others. A receiver may still get a message twice; its id tells. Every method of the store
raises `StoreUnavailable`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from service.db.engine import Transactions
from service.db.tables import jobs, timeline, webhook_deliveries, webhooks
from service.domain.auth import ALL_PROJECTS
from service.domain.models import TimelineEvent
from service.domain.webhooks import (
    Claimed,
    Delivery,
    DeliveryState,
    Outcome,
    Webhook,
    body_of,
)
from service.errors import DeliveryNotFound, WebhookNotFound
from trainer.spec.base import MAX_INTEGER

# Deliveries of one webhook that are in flight at a time, so that a slow receiver delays no other.
MAX_CLAIMED_EACH = 4
# A delivery that is due now, from its first try on.
_DUE = {"state": DeliveryState.PENDING.value, "num_tries": 0, "next_try_at": 0.0}
_NEW = {**_DUE, "claimed_until": 0.0, "message": ""}


def add_timeline(connection: Connection, events: Sequence[TimelineEvent]) -> None:
    """Append timeline events and queue their deliveries, in the caller's transaction."""
    if not events:
        return
    # Without the id, which the database gives.
    values = [{k: v for k, v in vars(event).items() if k != "id"} for event in events]
    subscribed = _subscribed(connection, {event.job_id for event in events})
    if not subscribed:
        connection.execute(insert(timeline), values)
        return
    numbered = insert(timeline).returning(timeline.c.id, sort_by_parameter_order=True)
    ids = connection.execute(numbered, values).scalars()
    stored = [replace(event, id=number) for event, number in zip(events, ids, strict=True)]
    deliveries = [
        {
            **_NEW,
            "webhook_id": hook.id,
            "job_id": event.job_id,
            "event_id": event.id,
            "kind": event.kind,
            "body": body_of(event, hook.project),
            "created_at": event.time,
        }
        for event in stored
        for hook in subscribed
        if hook.job_id == event.job_id and (not hook.kinds or event.kind in hook.kinds)
    ]
    if deliveries:
        connection.execute(insert(webhook_deliveries), deliveries)


_SUBSCRIBED = (
    select(webhooks.c.id, webhooks.c.kinds, jobs.c.id.label("job_id"), jobs.c.project)
    .join(jobs, or_(webhooks.c.project == jobs.c.project, webhooks.c.project == ALL_PROJECTS))
    .where(jobs.c.id.in_(bindparam("job_ids", expanding=True)), webhooks.c.is_active)
)


def _subscribed(connection: Connection, job_ids: set[str]) -> Sequence[Any]:
    """Active webhooks that hear of these jobs: a row for each webhook and job."""
    return connection.execute(_SUBSCRIBED, {"job_ids": list(job_ids)}).all()


class WebhookStore(Transactions):
    # ---- webhooks

    def create(self, webhook: Webhook) -> None:
        self.execute(insert(webhooks), vars(webhook))

    def get(self, webhook_id: str) -> Webhook:
        """Read a webhook; raises `WebhookNotFound`."""
        with self.read() as connection:
            return _read(connection, webhook_id)

    def list_webhooks(self, project: str | None = None) -> list[Webhook]:
        """Webhooks of a project, or of all, oldest first."""
        query = select(webhooks).order_by(webhooks.c.created_at, webhooks.c.id)
        if project is not None:
            query = query.where(webhooks.c.project == project)
        return [_webhook_of(row) for row in self.rows(query)]

    def change(self, webhook_id: str, changes: Mapping[str, Any]) -> Webhook:
        """Change fields of a webhook; raises `WebhookNotFound`."""
        with self.write() as connection:
            _read(connection, webhook_id)
            if changes:
                _change(connection, webhook_id, **changes)
            return _read(connection, webhook_id)

    def delete(self, webhook_id: str) -> None:
        """Forget a webhook and its deliveries; raises `WebhookNotFound`."""
        with self.write() as connection:
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
        with self.read() as connection:
            _read(connection, webhook_id)
            found = connection.execute(query.order_by(own.id.desc()).limit(limit)).mappings()
            return [_delivery_of(row) for row in found]

    def redeliver(self, webhook_id: str, delivery_id: int) -> Delivery:
        """Send a delivery again, from its first try on; raises `DeliveryNotFound`.

        At once, even where a sender that died still has its claim.
        """
        own = webhook_deliveries.c
        mine = (own.id == delivery_id, own.webhook_id == webhook_id)
        with self.write() as connection:
            again = update(webhook_deliveries).where(*mine)
            connection.execute(again.values(**_DUE, claimed_until=0.0, ended_at=None))
            row = connection.execute(select(webhook_deliveries).where(*mine)).mappings().first()
        if row is None:
            raise DeliveryNotFound(webhook_id, delivery_id)
        return _delivery_of(row)

    def add_test(self, webhook_id: str, body: str, now: float) -> Delivery:
        """Queue a delivery about no job; raises `WebhookNotFound`."""
        values = {**_NEW, "webhook_id": webhook_id, "kind": "test", "body": body, "created_at": now}
        with self.write() as connection:
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
        # Mostly nothing is due, and then nobody else should wait for a lock.
        hooks = self.rows(waiting)
        if not hooks:
            return []
        with self.write() as connection:
            found = []
            for hook in hooks:
                mine = select(webhook_deliveries).where(own.webhook_id == hook["id"], *due)
                mine = mine.order_by(own.id).limit(MAX_CLAIMED_EACH)
                for row in connection.execute(mine.with_for_update(skip_locked=True)).mappings():
                    found.append(Claimed(_delivery_of(row), hook["url"], hook["secret"]))
            mark = update(webhook_deliveries).values(claimed_until=now + claim_s)
            ids = [claimed.delivery.id for claimed in found]
            if ids:
                connection.execute(mark.where(own.id.in_(ids)))
        return found

    def settle(self, delivery_id: int, outcome: Outcome, now: float) -> None:
        """Store the outcome of a try, and what follows for its webhook."""
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
        with self.write() as connection:
            one = own.id == delivery_id
            connection.execute(update(webhook_deliveries).where(one).values(**values))
            found = connection.execute(select(own.webhook_id).where(one)).scalar_one_or_none()
            if found is not None and has_ended:
                _note_end(connection, found, outcome)

    def prune(self, before: float) -> int:
        """Forget what was created before `before` (Unix seconds); returns how many.

        All before the first that is younger, so that no others are looked at.
        """
        own = webhook_deliveries.c
        younger = select(own.id).where(own.created_at >= before).order_by(own.id).limit(1)
        is_old = own.id < func.coalesce(younger.scalar_subquery(), MAX_INTEGER)
        return self.execute(delete(webhook_deliveries).where(is_old))


def _note_end(connection: Connection, webhook_id: str, outcome: Outcome) -> None:
    """Count failed deliveries in a row, and switch off a webhook that nothing reaches."""
    known = webhooks.c.num_dead_in_a_row
    is_dead = outcome.state is DeliveryState.DEAD
    counted = update(webhooks).where(webhooks.c.id == webhook_id)
    # By the database: other deliveries end at the same time.
    counted = counted.values(num_dead_in_a_row=known + 1 if is_dead else 0).returning(known)
    num_dead = connection.execute(counted).scalar_one_or_none() or 0
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


def _webhook_of(row: RowMapping) -> Webhook:
    return Webhook(**{**row, "kinds": tuple(row["kinds"])})


def _delivery_of(row: RowMapping) -> Delivery:
    fields = {name: row[name] for name in Delivery.__dataclass_fields__}
    return Delivery(**{**fields, "state": DeliveryState(row["state"])})
