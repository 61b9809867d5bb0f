"""Webhooks without a network: signatures, retries, addresses, and the outbox in the store."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain import JobStatus
from service.errors import DeliveryNotFound, WebhookNotFound
from service.settings import Settings
from service.store import webhooks as store_webhooks
from service.store.sql import SqlJobStore
from service.store.webhooks import MAX_CLAIMED_EACH, WebhookStore
from service.telemetry import Telemetry
from service.webhook_sender import WebhookSender
from service.webhooks import (
    FIRST_DELAY_S,
    MAX_DEAD_IN_A_ROW,
    MAX_DELAY_S,
    MAX_TRIES,
    Answer,
    Claimed,
    DeliveryState,
    Webhook,
    after_try,
    new_secret,
    new_webhook_id,
    retry_delay_s,
    signature,
)
from tests.unit.service.builders import NOW, attempt_of, batch, checkpoint, queued_job

# ---- what is sent


def test_a_signature_is_that_of_the_standard() -> None:
    # The example of the specification's own libraries.
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = '{"test": 2432232314}'
    found = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_secrets_have_32_random_bytes() -> None:
    secret = new_secret()
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert secret != new_secret()


# ---- what follows from a try


@pytest.mark.parametrize("status", [200, 204, 299])
def test_a_taken_message_is_delivered(status: int) -> None:
    assert after_try(1, Answer(status), NOW, 0.5).state is DeliveryState.DELIVERED


@pytest.mark.parametrize("answer", [Answer(500), Answer(302), Answer(404), Answer(None, "down")])
def test_a_message_that_was_not_taken_is_tried_again_and_dies_in_the_end(answer: Answer) -> None:
    for tries in range(1, MAX_TRIES):
        outcome = after_try(tries, answer, NOW, 0.5)
        assert outcome.state is DeliveryState.PENDING
        assert outcome.next_try_at > NOW
    last = after_try(MAX_TRIES, answer, NOW, 0.5)
    assert last.state is DeliveryState.DEAD
    assert last.disables(MAX_DEAD_IN_A_ROW)
    assert not last.disables(MAX_DEAD_IN_A_ROW - 1)


def test_a_receiver_that_says_it_is_gone_is_not_asked_again() -> None:
    outcome = after_try(1, Answer(410), NOW, 0.5)
    assert outcome.state is DeliveryState.DEAD
    assert outcome.disables(1)


@given(tries=st.integers(1, 1000), chance=st.floats(0, 1, exclude_max=True))
def test_delays_grow_within_bounds(tries: int, chance: float) -> None:
    delay_s = retry_delay_s(tries, chance)
    assert FIRST_DELAY_S / 2 <= delay_s <= MAX_DELAY_S
    assert retry_delay_s(tries + 1, chance) >= delay_s


# ---- the outbox


@pytest.fixture
def outbox(store: SqlJobStore) -> WebhookStore:
    return WebhookStore(store.engine)


def _webhook(outbox: WebhookStore, **changes: Any) -> Webhook:
    fields: dict[str, Any] = {
        "id": new_webhook_id(),
        "project": "default",
        "url": "https://hooks.example/",
        "description": "",
        "kinds": (),
        "secret": "sealed",
        "is_active": True,
        "created_at": NOW,
    }
    webhook = Webhook(**{**fields, **changes})
    outbox.create(webhook)
    return webhook


def _submit(store: SqlJobStore, **changes: Any) -> str:
    job = replace(queued_job(), **changes)
    return store.create_job(job, idempotency_key=None, request_hash="").id


def test_each_timeline_line_is_queued_for_each_webhook_that_wants_it(
    store: SqlJobStore, outbox: WebhookStore
) -> None:
    every = _webhook(outbox)
    ends = _webhook(outbox, kinds=("job_ended",))
    anywhere = _webhook(outbox, project="*")
    elsewhere = _webhook(outbox, project="other")
    off = _webhook(outbox, is_active=False)
    job_id = _submit(store)
    for webhook, wanted in ((every, 1), (ends, 0), (anywhere, 1), (elsewhere, 0), (off, 0)):
        assert len(outbox.list_deliveries(webhook.id)) == wanted
    [delivery] = outbox.list_deliveries(every.id)
    [line] = store.list_timeline(job_id)
    body = json.loads(delivery.body)
    assert (body["type"], body["data"]["job_id"]) == ("job_submitted", job_id)
    assert body["data"]["event_id"] == delivery.event_id == line.id
    assert body["timestamp"].endswith("+00:00")


def test_what_a_driver_reports_is_queued_with_the_records(
    store: SqlJobStore, outbox: WebhookStore
) -> None:
    job = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    running = replace(job, status=JobStatus.RUNNING, current_attempt_id=f"{job.id}-a0")
    store.update_job(running, attempt=attempt_of(job))
    webhook = _webhook(outbox, kinds=("checkpoint_committed",))
    records = batch(checkpoint(10), checkpoint(20))
    for _ in range(2):  # sent twice, taken once
        store.append_events(f"{job.id}-a0", records, NOW)
    bodies = [json.loads(d.body) for d in outbox.list_deliveries(webhook.id)]
    assert [body["data"]["data"]["step"] for body in bodies] == [20, 10]


def test_a_claimed_delivery_is_nobody_elses_until_the_claim_runs_out(
    store: SqlJobStore, outbox: WebhookStore
) -> None:
    _webhook(outbox)
    _submit(store)
    assert len(outbox.claim(NOW, claim_s=60.0)) == 1
    assert outbox.claim(NOW, claim_s=60.0) == []
    assert len(outbox.claim(NOW + 61.0, claim_s=60.0)) == 1


def test_a_webhook_with_many_deliveries_does_not_hold_up_another(
    store: SqlJobStore, outbox: WebhookStore
) -> None:
    busy = _webhook(outbox)
    for _ in range(MAX_CLAIMED_EACH + 3):
        _submit(store)
    quiet = _webhook(outbox)
    _submit(store)
    claimed = outbox.claim(NOW, claim_s=60.0)
    hooks = [each.delivery.webhook_id for each in claimed]
    assert (hooks.count(busy.id), hooks.count(quiet.id)) == (MAX_CLAIMED_EACH, 1)
    assert outbox.claim(NOW, claim_s=60.0, skip=[busy.id]) == []


def test_a_webhook_that_nothing_reaches_is_switched_off_and_can_be_switched_on(
    store: SqlJobStore, outbox: WebhookStore
) -> None:
    webhook = _webhook(outbox)
    for number in range(MAX_DEAD_IN_A_ROW):
        assert outbox.get(webhook.id).is_active
        _submit(store)
        [claimed] = outbox.claim(NOW + number, claim_s=60.0)
        outcome = after_try(MAX_TRIES, Answer(None, "down"), NOW, 0.5)
        outbox.settle(claimed.delivery.id, outcome, NOW)
    off = outbox.get(webhook.id)
    assert (off.is_active, "down" in off.note) == (False, True)
    [dead, *_] = outbox.list_deliveries(webhook.id, state=DeliveryState.DEAD)
    outbox.redeliver(webhook.id, dead.id)
    assert outbox.claim(NOW + 900, claim_s=60.0) == []
    outbox.change(webhook.id, {"is_active": True})
    assert len(outbox.claim(NOW + 900, claim_s=60.0)) == 1


def test_what_is_gone_is_not_found(store: SqlJobStore, outbox: WebhookStore) -> None:
    webhook = _webhook(outbox)
    with pytest.raises(DeliveryNotFound):
        outbox.redeliver(webhook.id, 1)
    _submit(store)
    assert outbox.prune(NOW - 1) == 0
    outbox.delete(webhook.id)
    for look in (outbox.get, outbox.delete, outbox.list_deliveries):
        with pytest.raises(WebhookNotFound):
            look(webhook.id)


# ---- the sender


class _Box:
    def open(self, sealed: str) -> str:
        return sealed.removeprefix("sealed:")


class _Receiver:
    """Answers what a test says, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.messages: list[tuple[dict[str, str], str]] = []

    async def __call__(self, claimed: Claimed, headers: dict[str, str]) -> Answer:
        self.messages.append((headers, claimed.delivery.body))
        return Answer(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])


def _rounds(
    outbox: WebhookStore, receiver: _Receiver, settings: Settings, times: list[float]
) -> None:
    """Let a sender look at each of some times."""
    now = [NOW]
    sender = WebhookSender(
        outbox,
        _Box(),
        settings,
        Telemetry(),
        send=receiver,
        clock=lambda: now[0],
        chance=lambda: 0.5,
    )

    async def _look() -> None:
        for time in times:
            now[0] = time
            await sender.look()
            await sender.finish()

    asyncio.run(_look())


def test_a_message_is_signed_and_sent_again_with_the_same_id_until_it_is_taken(
    store: SqlJobStore, outbox: WebhookStore, tmp_path: Path
) -> None:
    secret = new_secret()
    webhook = _webhook(outbox, secret=f"sealed:{secret}")
    _submit(store)
    receiver = _Receiver(500, 503, 200)
    _rounds(
        outbox, receiver, Settings(home=tmp_path), [NOW, NOW + 1, NOW + 10, NOW + 100, NOW + 1000]
    )
    [delivery] = outbox.list_deliveries(webhook.id)
    assert (delivery.state, delivery.num_tries) == (DeliveryState.DELIVERED, 3)
    assert len({headers["webhook-id"] for headers, _ in receiver.messages}) == 1
    key = base64.b64decode(secret.removeprefix("whsec_"))
    for headers, body in receiver.messages:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{body}"
        digest = base64.b64encode(hmac.digest(key, signed.encode(), hashlib.sha256)).decode()
        assert headers["webhook-signature"] == f"v1,{digest}"


def test_a_dead_message_is_sent_again_by_hand(
    store: SqlJobStore, outbox: WebhookStore, tmp_path: Path
) -> None:
    webhook = _webhook(outbox, secret=new_secret())
    _submit(store)
    times = [NOW + MAX_DELAY_S * turn for turn in range(MAX_TRIES + 3)]
    receiver = _Receiver(500)
    _rounds(outbox, receiver, Settings(home=tmp_path), times)
    [delivery] = outbox.list_deliveries(webhook.id)
    assert delivery.state is DeliveryState.DEAD
    assert len(receiver.messages) == delivery.num_tries == MAX_TRIES
    outbox.redeliver(webhook.id, delivery.id)
    _rounds(outbox, _Receiver(200), Settings(home=tmp_path), [times[-1]])
    assert outbox.list_deliveries(webhook.id)[0].state is DeliveryState.DELIVERED
    assert outbox.get(webhook.id).num_dead_in_a_row == 0


def test_a_webhook_that_goes_meanwhile_does_not_refuse_a_line(
    store: SqlJobStore, outbox: WebhookStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook = _webhook(outbox)
    found = store_webhooks._listeners

    def _stale(connection: Any, job_ids: set[str]) -> Any:
        listening = found(connection, job_ids)
        connection.execute(store_webhooks.webhooks.delete())
        return listening

    monkeypatch.setattr(store_webhooks, "_listeners", _stale)
    job_id = _submit(store)
    assert [line.kind for line in store.list_timeline(job_id)] == ["job_submitted"]
    assert outbox.claim(NOW, claim_s=1.0) == []
    with pytest.raises(WebhookNotFound):
        outbox.get(webhook.id)
