"""Replicas share the outbox of webhooks: each delivery is claimed by one, on either database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.store.sql import SqlJobStore
from service.store.webhooks import WebhookStore
from service.webhooks import (
    Answer,
    DeliveryState,
    Webhook,
    after_try,
    new_webhook_id,
)
from tests.integration.postgresql import PostgresqlServer
from tests.unit.service.builders import NOW, queued_job

NUM_JOBS = 60
NUM_REPLICAS = 4


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database at the newest migration."""
    if request.param == "sqlite":
        found = f"sqlite:///{tmp_path / 'shardloom.db'}"
        SqlJobStore.open(found).close()
        return found
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.migrated_database()


def _webhook() -> Webhook:
    return Webhook(
        id=new_webhook_id(),
        project="*",
        url="https://hooks.example/",
        description="",
        kinds=(),
        secret="sealed",
        is_active=True,
        created_at=NOW,
    )


def _drain(url: str, start: threading.Barrier) -> list[int]:
    """Claim and deliver as a replica does, until nothing is due; returns what was claimed."""
    store = SqlJobStore.open(url)
    outbox, claimed = WebhookStore(store.engine), list[int]()
    start.wait()
    while found := outbox.claim(NOW, claim_s=60.0):
        for each in found:
            claimed.append(each.delivery.id)
            outbox.settle(each.delivery.id, after_try(1, Answer(200), NOW, 0.5), NOW)
    store.close()
    return claimed


def test_each_delivery_is_claimed_by_one_replica(url: str) -> None:
    store = SqlJobStore.open(url)
    outbox, hooks = WebhookStore(store.engine), [_webhook() for _ in range(3)]
    for hook in hooks:
        outbox.create(hook)
    for _ in range(NUM_JOBS):
        store.create_job(queued_job(), idempotency_key=None, request_hash="")
    start = threading.Barrier(NUM_REPLICAS)
    with ThreadPoolExecutor(NUM_REPLICAS) as pool:
        rounds = [pool.submit(_drain, url, start) for _ in range(NUM_REPLICAS)]
        counts = Counter(each for found in rounds for each in found.result())
    # A replica may find all that is due locked by others, and stop early; one goes on.
    leftover = _drain(url, threading.Barrier(1))
    counts.update(leftover)
    assert sorted(counts.values()) == [1] * NUM_JOBS * len(hooks)
    for hook in hooks:
        found = outbox.list_deliveries(hook.id, limit=500)
        assert {each.state for each in found} == {DeliveryState.DELIVERED}
    store.close()
