"""Webhooks without a network: retries, the outbox in the store, and over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.db import tables
from service.db import webhooks as store_webhooks
from service.db.jobs import JobStore
from service.db.tables import metadata
from service.db.webhooks import MAX_CLAIMED_EACH, WebhookStore
from service.domain.webhooks import (
    FIRST_DELAY_S,
    MAX_BODY_CHARS,
    MAX_DEAD_IN_A_ROW,
    MAX_DELAY_S,
    MAX_TRIES,
    Answer,
    Claimed,
    DeliveryState,
    Outcome,
    Webhook,
    after_try,
    new_secret,
    retry_delay_s,
)
from service.errors import DeliveryNotFound, WebhookNotFound
from service.observability.metrics import ServiceMetrics
from service.settings import Settings
from service.webhooks.sender import TIMEOUT_S, WebhookSender
from tests.harness.builders import NOW, batch, checkpoint, webhook, workers_started
from tests.harness.clock import FakeClock
from tests.harness.databases import store_attempt, store_job
from tests.harness.service import Api, problem_in
from tests.harness.wait import wait_for

pytestmark = pytest.mark.every_database(slow=True)

# ---- what follows from a try


def test_a_message_is_tried_again_until_it_is_taken_or_dies() -> None:
    for status in (200, 204, 299):
        assert after_try(1, Answer(status), NOW, 0.5).state is DeliveryState.DELIVERED
    for answer in (Answer(500), Answer(302), Answer(404), Answer(None, "down")):
        for tries in range(1, MAX_TRIES):
            outcome = after_try(tries, answer, NOW, 0.5)
            assert outcome.state is DeliveryState.PENDING
            assert outcome.next_try_at > NOW
        last = after_try(MAX_TRIES, answer, NOW, 0.5)
        assert last.state is DeliveryState.DEAD
        assert last.disables(MAX_DEAD_IN_A_ROW)
        assert not last.disables(MAX_DEAD_IN_A_ROW - 1)
    gone = after_try(1, Answer(410), NOW, 0.5)
    assert (gone.state, gone.disables(1)) == (DeliveryState.DEAD, True), "it is not asked again"


@given(tries=st.integers(1, 1000), chance=st.floats(0, 1, exclude_max=True))
def test_delays_grow_within_bounds(tries: int, chance: float) -> None:
    delay_s = retry_delay_s(tries, chance)
    assert FIRST_DELAY_S / 2 <= delay_s <= MAX_DELAY_S
    assert retry_delay_s(tries + 1, chance) >= delay_s


# ---- the outbox


@pytest.fixture
def outbox(store: JobStore) -> WebhookStore:
    return WebhookStore(store.engine)


def _webhook(outbox: WebhookStore, **changes: Any) -> Webhook:
    made = webhook(**changes)
    outbox.create(made)
    return made


def _submit(store: JobStore) -> str:
    return store_job(store).id


def test_each_timeline_line_is_queued_for_each_webhook_that_wants_it(
    store: JobStore, outbox: WebhookStore
) -> None:
    every = _webhook(outbox)
    ends = _webhook(outbox, kinds=("job_ended",))
    anywhere = _webhook(outbox, project="*")
    elsewhere = _webhook(outbox, project="other")
    off = _webhook(outbox, is_active=False)
    job_id = _submit(store)
    for hook, wanted in ((every, 1), (ends, 0), (anywhere, 1), (elsewhere, 0), (off, 0)):
        assert len(outbox.list_deliveries(hook.id)) == wanted
    [delivery] = outbox.list_deliveries(every.id)
    [line] = store.list_timeline(job_id)
    body = json.loads(delivery.body)
    assert (body["type"], body["data"]["job_id"]) == ("job_submitted", job_id)
    assert body["data"]["event_id"] == delivery.event_id == line.id
    assert body["timestamp"].endswith("+00:00")


def test_what_a_driver_reports_is_queued_with_the_records(
    store: JobStore, outbox: WebhookStore
) -> None:
    _, attempt = store_attempt(store)
    hook = _webhook(outbox, kinds=("checkpoint_committed",))
    records = batch(checkpoint(10), checkpoint(20))
    for _ in range(2):  # sent twice, taken once
        store.append_events(attempt.id, records, NOW)
    bodies = [json.loads(d.body) for d in outbox.list_deliveries(hook.id)]
    assert [body["data"]["data"]["step"] for body in bodies] == [20, 10]


def test_a_metric_that_is_no_number_is_null_in_a_message(
    store: JobStore, outbox: WebhookStore
) -> None:
    _, attempt = store_attempt(store)
    hook = _webhook(outbox, kinds=("checkpoint_committed",))
    told = {"validation/ne": math.nan, "train/loss": math.inf, "train/rows": 1.0}
    record = checkpoint(10).model_copy(update={"metrics": told})
    store.append_events(attempt.id, batch(record), NOW)
    [delivery] = outbox.list_deliveries(hook.id)
    body = json.loads(delivery.body, parse_constant=pytest.fail)
    assert body["data"]["data"]["metrics"] == dict.fromkeys(told) | {"train/rows": 1.0}


def test_a_message_leaves_large_data_out(store: JobStore, outbox: WebhookStore) -> None:
    _, attempt = store_attempt(store)
    hook = _webhook(outbox, kinds=("workers_started",))
    record = workers_started().model_copy(update={"hosts": ["h"] * MAX_BODY_CHARS})
    store.append_events(attempt.id, batch(record), NOW)
    [delivery] = outbox.list_deliveries(hook.id)
    assert json.loads(delivery.body)["data"]["data"].keys() == {"left_out_bytes"}


def test_deliveries_that_die_at_once_are_all_counted(outbox: WebhookStore) -> None:
    hook, num, died = _webhook(outbox), 4, Outcome(DeliveryState.DEAD, NOW, 500, "down")
    ids = [outbox.add_test(hook.id, "{}", NOW).id for _ in range(num)]
    together = threading.Barrier(num)

    def settle(delivery_id: int) -> None:
        together.wait()
        outbox.settle(delivery_id, died, NOW)

    for times in range(1, 4):
        with ThreadPoolExecutor(num) as threads:
            list(threads.map(settle, ids))
        assert outbox.get(hook.id).num_dead_in_a_row == times * num


def test_a_webhook_with_many_deliveries_does_not_hold_up_another(
    store: JobStore, outbox: WebhookStore
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
    assert len(outbox.claim(NOW + 61.0, claim_s=60.0)) == MAX_CLAIMED_EACH + 1, "it has run out"


def test_a_webhook_that_nothing_reaches_is_switched_off_and_can_be_switched_on(
    store: JobStore, outbox: WebhookStore
) -> None:
    hook = _webhook(outbox)
    for number in range(MAX_DEAD_IN_A_ROW):
        assert outbox.get(hook.id).is_active
        _submit(store)
        [claimed] = outbox.claim(NOW + number, claim_s=60.0)
        outcome = after_try(MAX_TRIES, Answer(None, "down"), NOW, 0.5)
        outbox.settle(claimed.delivery.id, outcome, NOW)
    off = outbox.get(hook.id)
    assert (off.is_active, "down" in off.note) == (False, True)
    [dead, *_] = outbox.list_deliveries(hook.id, state=DeliveryState.DEAD)
    with pytest.raises(DeliveryNotFound):
        outbox.redeliver(_webhook(outbox).id, dead.id)
    outbox.redeliver(hook.id, dead.id)
    assert outbox.claim(NOW + 900, claim_s=60.0) == []
    outbox.change(hook.id, {"is_active": True})
    assert len(outbox.claim(NOW + 900, claim_s=60.0)) == 1


# ---- the sender


class _Box:
    def decrypt(self, sealed: str) -> str:
        return sealed


class _Receiver:
    """Answers what a test says, and keeps what it was sent."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.messages: list[tuple[dict[str, str], str]] = []

    async def __call__(self, url: str, body: str, headers: dict[str, str], **_: object) -> Answer:
        self.messages.append((headers, body))
        return Answer(self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])


def _rounds(
    outbox: WebhookStore, receiver: _Receiver, settings: Settings, times: list[float]
) -> None:
    """Let a sender look at each of some times."""
    clock, telemetry = FakeClock(), ServiceMetrics()
    sender = WebhookSender(outbox, _Box(), settings, telemetry, clock)

    async def _poll() -> None:
        for now in times:
            clock.now = now
            await sender.poll()
            await asyncio.gather(*sender._tasks)

    with patch("service.webhooks.sender.post", receiver):
        asyncio.run(_poll())


def test_a_message_is_sent_again_with_the_same_id_until_it_is_taken(
    store: JobStore, outbox: WebhookStore, tmp_path: Path
) -> None:
    hook = _webhook(outbox, secret=new_secret())
    _submit(store)
    receiver = _Receiver(500, 503, 200)
    times = [NOW, NOW + 1, NOW + 10, NOW + 100, NOW + 1000]
    _rounds(outbox, receiver, Settings(home=tmp_path), times)
    [delivery] = outbox.list_deliveries(hook.id)
    assert (delivery.state, delivery.num_tries) == (DeliveryState.DELIVERED, 3)
    assert len({headers["webhook-id"] for headers, _ in receiver.messages}) == 1


def test_a_message_that_is_being_sent_is_nobody_elses_for_as_long_as_that_may_take(
    store: JobStore, outbox: WebhookStore, tmp_path: Path
) -> None:
    _webhook(outbox, secret=new_secret())
    _submit(store)
    others: list[Claimed] = []

    class _Slow(_Receiver):
        async def __call__(self, *args: Any, **kwargs: Any) -> Answer:
            others.extend(outbox.claim(NOW + TIMEOUT_S, claim_s=60.0))
            return await super().__call__(*args, **kwargs)

    receiver = _Slow(200)
    _rounds(outbox, receiver, Settings(home=tmp_path), [NOW])
    assert (len(receiver.messages), others) == (1, [])


def test_a_dead_message_is_sent_again_by_hand(
    store: JobStore, outbox: WebhookStore, tmp_path: Path
) -> None:
    hook = _webhook(outbox, secret=new_secret())
    _submit(store)
    times = [NOW + MAX_DELAY_S * turn for turn in range(MAX_TRIES + 3)]
    receiver = _Receiver(500)
    _rounds(outbox, receiver, Settings(home=tmp_path), times)
    [delivery] = outbox.list_deliveries(hook.id)
    assert delivery.state is DeliveryState.DEAD
    assert len(receiver.messages) == delivery.num_tries == MAX_TRIES
    outbox.redeliver(hook.id, delivery.id)
    _rounds(outbox, _Receiver(200), Settings(home=tmp_path), [times[-1]])
    assert outbox.list_deliveries(hook.id)[0].state is DeliveryState.DELIVERED
    assert outbox.get(hook.id).num_dead_in_a_row == 0


def test_a_receiver_that_answers_at_once_gets_message_upon_message(
    outbox: WebhookStore, tmp_path: Path
) -> None:
    hook, num = _webhook(outbox, secret=new_secret()), 3 * MAX_CLAIMED_EACH
    for _ in range(num):
        outbox.add_test(hook.id, "{}", NOW)
    settings = Settings(home=tmp_path, webhook_poll_s=3600.0)
    receiver = _Receiver(200)
    sender = WebhookSender(outbox, _Box(), settings, ServiceMetrics(), lambda: NOW)
    with patch("service.webhooks.sender.post", receiver):
        sender.start()
        try:
            wait_for(lambda: len(receiver.messages) == num, "all messages")
        finally:
            sender.close()


def test_a_webhook_that_goes_meanwhile_does_not_refuse_a_line(
    store: JobStore, outbox: WebhookStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = _webhook(outbox)
    found = store_webhooks._subscribed

    def _stale(connection: Any, job_ids: set[str]) -> Any:
        listening = found(connection, job_ids)
        connection.execute(tables.webhooks.delete())
        return listening

    monkeypatch.setattr(store_webhooks, "_subscribed", _stale)
    job_id = _submit(store)
    assert [line.kind for line in store.list_timeline(job_id)] == ["job_submitted"]
    assert outbox.claim(NOW, claim_s=1.0) == []
    with pytest.raises(WebhookNotFound):
        outbox.get(hook.id)


# ---- over HTTP

URL = "https://hooks.example/in"


def _create(api: Api, **fields: Any) -> dict[str, Any]:
    response = api.http.post("/v1/webhooks", json={"url": URL, **fields})
    assert response.status_code == 201, response.text
    return response.json()


def test_a_secret_is_shown_once_and_stored_sealed(api: Api) -> None:
    created = _create(api)
    secret = created["secret"]
    assert secret.startswith("whsec_")
    path = f"/v1/webhooks/{created['id']}"
    for response in (api.http.get(path), api.http.get("/v1/webhooks")):
        assert secret not in response.text
        assert "secret" not in response.text
    with api.store.engine.connect() as connection:
        stored = connection.execute(metadata.tables["webhooks"].select()).mappings().one()
    assert secret not in str(dict(stored))
    rotated = api.http.post(f"{path}:rotate").json()
    assert rotated["secret"] not in ("", secret)


def test_webhooks_are_listed_by_project(api: Api) -> None:
    first, second = _create(api), _create(api, project="ml", kinds=["job_ended"])
    ids = [item["id"] for item in api.http.get("/v1/webhooks").json()["items"]]
    assert ids == [first["id"], second["id"]]
    [found] = api.http.get("/v1/webhooks", params={"project": "ml"}).json()["items"]
    assert (found["id"], found["kinds"]) == (second["id"], ["job_ended"])


def test_a_webhook_is_changed_and_switched_off_and_on(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}"
    changed = api.http.patch(path, json={"kinds": ["job_ended"], "is_active": False}).json()
    assert (changed["kinds"], changed["is_active"], changed["url"]) == (["job_ended"], False, URL)
    assert api.http.patch(path, json={}).json() == changed
    assert api.http.patch(path, json={"is_active": True}).json()["is_active"] is True


def test_deliveries_are_paged_newest_first(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}/deliveries"
    jobs = [api.submit() for _ in range(3)]
    page = api.http.get(path, params={"limit": 2}).json()
    assert [item["job_id"] for item in page["items"]] == [jobs[2], jobs[1]]
    rest = api.http.get(path, params={"limit": 1, "after": page["next"]}).json()
    assert [item["job_id"] for item in rest["items"]] == [jobs[0]]
    assert rest["next"] is None
    assert api.http.get(path, params={"state": "dead"}).json()["items"] == []


def test_a_forgotten_webhook_is_gone(api: Api) -> None:
    path = f"/v1/webhooks/{_create(api)['id']}"
    api.submit()
    problem_in(api.http.post(f"{path}/deliveries/999:redeliver"), 404, "delivery_not_found")
    assert api.http.delete(path).status_code == 204
    problem_in(api.http.get(path), 404, "webhook_not_found")
    problem_in(api.http.delete(path), 404, "webhook_not_found")
    problem_in(api.http.get(f"{path}/deliveries"), 404, "webhook_not_found")
    problem_in(api.http.post(f"{path}:test"), 404, "webhook_not_found")
    problem_in(api.http.post(f"{path}/deliveries/1:redeliver"), 404, "webhook_not_found")


def test_what_cannot_be_a_webhook_is_refused(api: Api) -> None:
    for fields in (
        {"url": "http://127.0.0.1:8700/v1/jobs"},
        {"url": URL, "project": "../x"},
        {"url": URL, "kinds": ["job_end"]},
        {"url": URL, "kinds": ["metrics"]},
    ):
        problem = problem_in(api.http.post("/v1/webhooks", json=fields), 422, "invalid_request")
        assert "Value error" not in str(problem)
    # Nor can it become one later.
    path = f"/v1/webhooks/{_create(api)['id']}"
    response = api.http.patch(path, json={"url": "http://[::ffff:10.0.0.1]/"})
    problem = problem_in(response, 422, "invalid_request")
    assert problem["fields"][0]["path"] == "url"
