"""When the SDK tries again, and when it gives up. No request is made here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.client_errors import ServerFault, ServiceUnreachable, ShardloomError

# How long followers go on asking a service that does not answer; restarting one takes seconds.
PATIENCE_S = 120.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter: how long to wait after each failure, and when to give up."""

    num_retries: int = 4
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def delay_s(self, num_failures: int, jitter: float) -> float:
        """Seconds to wait after failure number `num_failures` (from 1).

        `jitter` in [0, 1) scales the delay down by up to a half, so that clients spread out.
        """
        num_doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        return min(self.first_delay_s * 2.0**num_doublings, self.max_delay_s) * (1 - jitter / 2)


class Patience:
    """Counts failures in a row; gives up when neither retries nor `patience_s` are left."""

    def __init__(
        self,
        policy: RetryPolicy,
        patience_s: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._patience_s = patience_s
        self._sleep = sleep
        self._clock = clock
        self.note_answer()

    def note_answer(self) -> None:
        """Somebody answered: what failed before no longer counts."""
        self._num_failures = 0
        self._answered_s = self._clock()

    def endure(self, error: ShardloomError) -> None:
        """Sleep before the next try, or raise `error` when there is none left."""
        self._num_failures += 1
        has_retries = self._num_failures <= self._policy.num_retries
        if not has_retries and self._clock() - self._answered_s >= self._patience_s:
            raise error
        self._sleep(self._policy.delay_s(self._num_failures, random.random()))


def may_pass(error: ShardloomError) -> bool:
    """Whether the same request may be answered later: the service is away or overloaded."""
    if isinstance(error, ServerFault):
        return error.status in RETRIED_STATUSES
    return isinstance(error, ServiceUnreachable)
