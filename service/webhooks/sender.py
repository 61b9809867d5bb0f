"""The delivery loop of webhooks: a thread with an event loop that empties the outbox.

Delivery is at least once: a delivery is claimed, sent, and its outcome stored. A claim that runs
out, because its sender died or the database was away, is taken up by the next sender.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from service.auth.crypto import MasterKeys
from service.db.webhooks import MAX_CLAIMED_EACH, WebhookStore
from service.domain.webhooks import Answer, Claimed, after_try, headers_of
from service.errors import ServiceError
from service.observability.metrics import ServiceMetrics
from service.settings import Settings
from service.webhooks.safe_http import post

logger = logging.getLogger(__name__)
# The longest that one try takes, all in all.
TIMEOUT_S = 10.0
# Far beyond that: a claim that runs out belongs to a sender that died.
_CLAIM_S = 120.0


@dataclass
class WebhookSender:
    """Delivers until closed; `clock` gives Unix seconds. Several may share a store."""

    store: WebhookStore
    keys: MasterKeys
    settings: Settings
    telemetry: ServiceMetrics
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._num_in_flight: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="webhooks", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop; tries in flight are cancelled and repeated by the next sender."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    async def _serve(self) -> None:
        closed = asyncio.create_task(asyncio.to_thread(self._closing.wait))
        while not self._closing.is_set():
            before = {*self._tasks}
            try:
                await self.poll()
            except ServiceError as error:
                logger.warning("webhooks are delayed: %s", error)
            except Exception:  # the loop must outlive any failed poll
                logger.exception("polling the webhook outbox failed, trying again")
            # After each delivery, also one that ended during the poll, there is room for another.
            await asyncio.wait(
                {closed, *before, *self._tasks},
                timeout=self.settings.webhook_poll_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def poll(self) -> None:
        busy = [hook for hook, count in self._num_in_flight.items() if count >= MAX_CLAIMED_EACH]
        for each in await asyncio.to_thread(
            self.store.claim, self.clock(), claim_s=_CLAIM_S, skip=busy
        ):
            self._num_in_flight[each.delivery.webhook_id] += 1
            task = asyncio.create_task(self._deliver(each))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver(self, claimed: Claimed) -> None:
        delivery = claimed.delivery
        try:
            answer = await self._try(claimed)
            outcome = after_try(delivery.num_tries + 1, answer, self.clock(), random.random())
            self.telemetry.webhook_tries.labels(outcome.state).inc()
            if not answer.is_success:
                logger.info("webhook %s: %s", delivery.webhook_id, outcome.message)
            await asyncio.to_thread(self.store.settle, delivery.id, outcome, self.clock())
        except ServiceError as error:
            # The claim runs out and the delivery is made again: at least once.
            logger.warning("the outcome of delivery %d is not stored: %s", delivery.id, error)
        finally:
            self._num_in_flight[delivery.webhook_id] -= 1

    async def _try(self, claimed: Claimed) -> Answer:
        try:
            secret = self.keys.decrypt(claimed.secret)
        except ServiceError as error:
            return Answer(None, f"the secret cannot be decrypted: {error}")
        headers = headers_of(claimed.delivery, secret, self.clock())
        return await post(
            claimed.url,
            claimed.delivery.body,
            headers,
            allowed=self.settings.webhook_allowed_networks,
            timeout_s=TIMEOUT_S,
        )
