"""The driver hears the heartbeats of workers in the domain `job`: hangs and stragglers.

All T workers are one group here, which never meets another: of the coordinator only the ears are
used. A collective that hangs ends by its time-out; this is for what has none, such as a reader on
storage that does not answer, or a worker that was stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from trainer import failures
from trainer.attempt import Attempt
from trainer.elastic.coordinator import Coordinator, CoordinatorConfig, LeasedRows
from trainer.elastic.policy import WATCH_SILENCE_S, MembershipPolicy
from trainer.elastic.status import Departure
from trainer.failures import Failure

_REASONS = {"hang": failures.HANG, "silent": failures.HANG}


class JobWatch:
    """Ears of a driver, for one attempt."""

    def __init__(self, attempt: Attempt, host: str) -> None:
        """Listen at `host`, under which the workers reach the driver. Raises OSError."""
        policy = MembershipPolicy.of(attempt.spec, num_groups=1)
        silence_s = max(WATCH_SILENCE_S, attempt.spec.recovery.heartbeat_timeout_s)
        self._coordinator = Coordinator(
            CoordinatorConfig(
                policy=replace(policy, heartbeat_timeout_s=silence_s),
                rows=LeasedRows(num_rows=1, epochs=1, rows_per_lease=1),
                host=host,
                attempt_dir=attempt.context.files.root,
                only_watches=True,
            )
        )
        self._pids: dict[str, set[int]] = {}
        self._run_index = -1

    @property
    def address(self) -> str:
        """Where workers send their heartbeats (host:port)."""
        return self._coordinator.address

    def look(self, run_index: int) -> Failure | None:
        """What ended life `run_index` although its processes may still be there, if it did."""
        status = self._coordinator.status()
        if run_index != self._run_index:
            self._run_index, self._pids = run_index, {}
        for group in status.groups:
            if group.incarnation == run_index:
                for rank in group.ranks:
                    self._pids.setdefault(rank.host, set()).add(rank.pid)
        found = [
            each
            for each in status.departures
            if each.incarnation == run_index and each.reason in _REASONS
        ]
        return _failure(found[-1]) if found else None

    def processes(self) -> dict[str, Collection[int]]:
        """Process ids of the life that was looked at last, by host."""
        return dict(self._pids)

    def close(self) -> None:
        """Stop listening."""
        self._coordinator.stop()


def _failure(departure: Departure) -> Failure:
    evidence = {"watch": departure.message}
    return Failure(_REASONS[departure.reason], departure.message, evidence=evidence)
