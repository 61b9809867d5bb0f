"""Webhooks: subscriptions, messages, signatures and the retry schedule. Pure.

Messages follow the Standard Webhooks specification: a receiver checks `webhook-signature`, the
HMAC-SHA256 of `ID.TIMESTAMP.BODY` under the secret, and drops a `webhook-id` that it has seen.
"""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

import standardwebhooks

from service.domain.models import TimelineEvent

MAX_TRIES = 10
FIRST_DELAY_S = 5.0
MAX_DELAY_S = 6 * 3600.0
_GROWTH = 4.0
# Half of a delay is fixed, the rest random, so that retries do not arrive together.
_FIXED_SHARE = 0.5
MAX_DEAD_IN_A_ROW = 5
# Of a message about an event: who wants the rest of its data reads the timeline.
MAX_BODY_CHARS = 1 << 18
_SECRET_BYTES = 32
_HTTP_GONE = 410


@dataclass(frozen=True)
class Webhook:
    """A URL that receives the timeline events of a project (`*`: of every project).

    `kinds` names the wanted events, empty for all. `secret` is encrypted. `note` says why the
    service switched the webhook off, if it did.
    """

    id: str
    project: str
    url: str
    description: str
    kinds: tuple[str, ...]
    secret: str
    is_active: bool
    created_at: float
    note: str = ""
    num_dead_in_a_row: int = 0


class DeliveryState(StrEnum):
    """Where a delivery is: `dead` ones are sent again only by hand."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True)
class Delivery:
    """One message to one webhook. Times are Unix seconds."""

    id: int
    webhook_id: str
    job_id: str | None
    event_id: int | None
    kind: str
    body: str
    created_at: float
    state: DeliveryState
    num_tries: int
    next_try_at: float
    ended_at: float | None
    status_code: int | None
    message: str

    @property
    def message_id(self) -> str:
        """Identifies the message to the receiver: the same at every try."""
        return f"msg-{self.webhook_id.partition('-')[2]}-{self.id}"


@dataclass(frozen=True)
class Claimed:
    """A delivery that this sender is to make: its URL and the encrypted signing secret."""

    delivery: Delivery
    url: str
    secret: str


@dataclass(frozen=True)
class Answer:
    """Result of a try: the HTTP status, or None and why there was no answer."""

    status_code: int | None
    message: str = ""

    @property
    def is_success(self) -> bool:
        return self.status_code is not None and 200 <= self.status_code < 300


@dataclass(frozen=True)
class Outcome:
    """What follows from a try, as stored with the delivery."""

    state: DeliveryState
    next_try_at: float
    status_code: int | None
    message: str

    def disables(self, num_dead_in_a_row: int) -> bool:
        """Whether the webhook is switched off: nothing reaches it, or it said that it is gone."""
        if self.state is not DeliveryState.DEAD:
            return False
        return self.status_code == _HTTP_GONE or num_dead_in_a_row >= MAX_DEAD_IN_A_ROW


def after_try(num_tries: int, answer: Answer, now: float, chance: float) -> Outcome:
    """What follows from try number `num_tries` (from 1); `chance` in [0, 1) spreads the retries."""
    if answer.is_success:
        return Outcome(DeliveryState.DELIVERED, now, answer.status_code, "")
    said = answer.message or f"answered {answer.status_code}"
    if num_tries >= MAX_TRIES or answer.status_code == _HTTP_GONE:
        return Outcome(DeliveryState.DEAD, now, answer.status_code, said)
    next_try_at = now + retry_delay_s(num_tries, chance)
    return Outcome(DeliveryState.PENDING, next_try_at, answer.status_code, said)


def retry_delay_s(num_tries: int, chance: float) -> float:
    """Seconds to the next try after `num_tries`, growing fourfold up to six hours."""
    longest = min(MAX_DELAY_S, FIRST_DELAY_S * _GROWTH ** min(num_tries - 1, 20))
    return longest * (_FIXED_SHARE + (1 - _FIXED_SHARE) * chance)


def body_of(event: TimelineEvent, project: str) -> str:
    """The message about a timeline event, as JSON; without its data where that is large."""
    data = {
        "event_id": event.id,
        "project": project,
        "job_id": event.job_id,
        "attempt_id": event.attempt_id,
        "message": event.message,
        "actor": event.actor,
        "data": event.data,
    }
    body = _message(event.kind, event.time, data)
    if len(body) <= MAX_BODY_CHARS:
        return body
    return _message(event.kind, event.time, {**data, "data": {"left_out_bytes": len(body)}})


def test_body(webhook: Webhook, now: float) -> str:
    """A message about no job, to try a webhook with."""
    return _message("test", now, {"webhook_id": webhook.id, "project": webhook.project})


def _message(kind: str, time: float, data: dict[str, object]) -> str:
    moment = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")
    # JSON has neither NaN nor infinity: as in answers of the API, null takes their place.
    data = json.loads(json.dumps(data), parse_constant=lambda name: None)
    return json.dumps({"type": kind, "timestamp": moment, "data": data}, separators=(",", ":"))


def new_secret() -> str:
    """A fresh secret, shown once: `whsec_` and 32 random bytes in base64."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()}"


def headers_of(delivery: Delivery, secret: str, now: float) -> dict[str, str]:
    """Headers of a try at `now` (Unix seconds); `secret` is decrypted."""
    sent_at = datetime.fromtimestamp(int(now), UTC)
    signer = standardwebhooks.Webhook(secret)
    return {
        "content-type": "application/json",
        "user-agent": "shardloom-webhooks/1",
        "webhook-id": delivery.message_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": signer.sign(delivery.message_id, sent_at, delivery.body),
    }
