"""Losses of groups within one life of a job: backoff, the job's own faults, and bad hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from trainer import failures
from trainer.elastic.detect import Exclusion, HostRecord
from trainer.failures import Failure

_WINDOW_S = 60.0
# Where a group ran cannot be to blame for these.
_NOT_OF_HOSTS = frozenset({failures.DIVERGED, failures.PREEMPTED})


@dataclass
class Casualties:
    """What was lost so far. `max_suspicious` errors that may lie in the job itself are let pass.

    `last` is the newest failure; no group starts before `may_start_at`.
    """

    record: HostRecord
    max_suspicious: int
    last: Failure | None = None
    may_start_at: float = 0.0
    _num_suspicious: int = 0
    _times: deque[float] = field(default_factory=deque)

    def add(self, failure: Failure, hosts: Collection[str], now: float) -> list[Exclusion]:
        """Count a lost group, which ran on `hosts`; those that are left out from now on."""
        self.last = failure
        self._times.append(now)
        while self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        delay_s = failures.restart_delay_s(len(self._times))
        self.may_start_at = max(self.may_start_at, now + delay_s)
        if failure.reason not in failures.RESTARTABLE - _NOT_OF_HOSTS:
            return []
        guilty = failure.evidence.get("host")
        found = [self.record.fail(each, now) for each in ({guilty} if guilty else set(hosts))]
        return [exclusion for exclusion in found if exclusion]

    def learn(self, failure: Failure) -> None:
        """Take the last word of workers that were given up before: it may say more."""
        self.last = failures.explain([failure, *([self.last] if self.last else [])])

    def is_fatal(self, failure: Failure) -> bool:
        """Whether a group's own last word ends the job; counts it."""
        self._num_suspicious += failures.is_suspicious(failure)
        return not failures.should_replace(failure, self._num_suspicious, self.max_suspicious)
