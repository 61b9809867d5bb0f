"""Trying again when remote storage is busy or away: what helps by itself, how often and how long.

What the SDKs of object stores try again by themselves is over in seconds. Here is the patience of a
job on top of it: delays that double, drawn between half and all, until a budget is spent. What no
patience mends (credentials, a bucket that is not there) is said at once.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from trainer.data.errors import StorageAwayError, StorageError

logger = logging.getLogger(__name__)

RETRY_VARIABLE = "SHARDLOOM_STORAGE_RETRY_S"
DEFAULT_RETRY_S = 60.0

Result = TypeVar("Result")
Kind = Literal["away", "refused", "no_bucket", "other"]

_NO_BUCKET = ("NO_SUCH_BUCKET", "bucket does not exist")
_REFUSED = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY",
    "SIGNATURE",
    "EXPIRED_TOKEN",
    "INVALID_CLIENT_TOKEN",
    "MISSING_AUTHENTICATION",
    "HTTP status 401",
    "HTTP status 403",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
)
_AWAY = (
    "NETWORK_CONNECTION",
    "SLOW_DOWN",
    "THROTTLING",
    "TOO_MANY_REQUESTS",
    "REQUEST_TIMEOUT",
    "SERVICE_UNAVAILABLE",
    "INTERNAL_FAILURE",
    "INTERNAL_ERROR",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "resolve host",
)
_AWAY_STATUS = re.compile(r"HTTP status (408|429|5\d\d)")


def kind_of(said: str) -> Kind:
    """What a message of an object store's SDK (AWS or Google, as Arrow words it) comes down to."""
    if any(word in said for word in _NO_BUCKET):
        return "no_bucket"
    if any(word in said for word in _REFUSED):
        return "refused"
    if any(word in said for word in _AWAY) or _AWAY_STATUS.search(said):
        return "away"
    return "other"


def seconds_from_environment(variable: str, default_s: float) -> float:
    """Seconds that a variable names, `default_s` where it is unset or empty.

    Raises `StorageError` for what is no such number.
    """
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise StorageError(f"{variable} is {text!r}; set it to a number of seconds, or unset it")
    return seconds


@dataclass(frozen=True)
class Backoff:
    """How long to try: delays from `first_s` to `longest_s`, `budget_s` seconds in all."""

    budget_s: float = DEFAULT_RETRY_S
    first_s: float = 0.5
    longest_s: float = 10.0

    @classmethod
    def from_environment(cls) -> Backoff:
        """With the budget of SHARDLOOM_STORAGE_RETRY_S (seconds), if that is set."""
        return cls(budget_s=seconds_from_environment(RETRY_VARIABLE, DEFAULT_RETRY_S))

    def delay_s(self, num_failures: int, elapsed_s: float, draw: float) -> float | None:
        """Seconds to wait after `num_failures` in a row, the last `elapsed_s` after the first try.

        `draw` (0 to 1) spreads clients that failed together. None: give up.
        """
        longest = min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        delay = longest * (0.5 + 0.5 * draw)
        return delay if elapsed_s + delay <= self.budget_s else None


def persist(
    operation: Callable[[], Result],
    backoff: Backoff | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = random.random,
) -> Result:
    """Run `operation`, again while it raises `StorageAwayError` and the budget lasts.

    It must do no harm when it is run twice. By default the budget is that of the environment.
    """
    backoff = backoff or Backoff.from_environment()
    began, num_failures = clock(), 0
    while True:
        try:
            return operation()
        except StorageAwayError as error:
            num_failures += 1
            delay_s = backoff.delay_s(num_failures, clock() - began, draw())
            if delay_s is None:
                raise
            logger.warning("%s; trying again in %.1f s", error, delay_s)
        sleep(delay_s)
