"""Goodput, and the other metrics of a run: commits, recoveries, undurable steps.

Goodput is the share of the groups' time that trained rows that count. Pure arithmetic over event
times in seconds of any steady clock; times of several groups add up (two groups for a second are
two group-seconds). Where the whole job is one failure domain it is one group, and a commit is a
checkpoint.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, get_args

from trainer.coordination.messages import Heartbeat, HeartbeatPhase, Ledger
from trainer.protocol.events import Metrics, Recovered

Cause = Literal["start", "recovery", "hang", "checkpoint", "validation", "redo"]
"""Why a group trained nothing that counts: it started (with its copy from a peer); it was lost and
has not trained again, or waited for others; it hung; it saved; it validated; its work was lost
with it."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
_NUM_SYNC_INTERVALS = 21
_NOT_TRAINING: dict[HeartbeatPhase, Cause] = {
    "validation": "validation",
    "checkpoint": "checkpoint",
}


@dataclass
class _Slot:
    """What one group does since `since`; training time counts with the next commit."""

    cause: Cause
    since: float
    is_training: bool = False
    spent: dict[Cause, float] = field(default_factory=lambda: defaultdict(float))


class GoodputMeter:
    """Adds up the time of all groups that the job wants to have."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._useful_s = 0.0
        self._lost_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._num_losses = 0

    @property
    def num_training(self) -> int:
        return sum(slot.is_training for slot in self._slots.values())

    def start(self, group: int, now: float) -> None:
        """The job wants this group, or a new incarnation joined: its time is lost to `start`.

        Not that of one which the job lost: until it trains again, that is lost to `recovery`.
        """
        slot = self._slots.get(group)
        if slot is None or slot.is_training:
            self._close(group, now)
            self._slots[group] = _Slot("start", now)

    def want(self, groups: Collection[int], num_missing: int, now: float) -> None:
        """The job wants these groups, and so many of those that do not train any more."""
        gone = (each for each, slot in self._slots.items() if not slot.is_training)
        for group in [each for each in gone if each not in groups][num_missing:]:
            self.leave(group, now)
        for group in set(groups) - self._slots.keys():
            self.start(group, now)

    def train(self, group: int, now: float) -> None:
        """The group is current from now on; no effect on one that is already."""
        slot = self._slots.get(group)
        if slot and slot.is_training:
            return
        self._close(group, now)
        self._slots[group] = _Slot("redo", now, is_training=True)

    def spend(self, group: int, cause: Cause, seconds: float) -> None:
        """A group that trains spent some of the time since the newest commit on something else."""
        slot = self._slots.get(group)
        if slot and slot.is_training:
            slot.spent[cause] += seconds

    def commit(self, counting: Collection[int], now: float) -> None:
        """What these groups trained until `now`, which may be past, counts; others have waited."""
        for group, slot in self._slots.items():
            if slot.is_training and group in counting:
                self._useful_s += self._settle(slot, max(now, slot.since))
            elif slot.is_training:
                self._lost_s["recovery"] += self._settle(slot, max(now, slot.since))

    def lose(self, group: int, now: float) -> None:
        """The group is gone with what it trained since the newest commit; the job wants it back."""
        slot = self._slots.get(group)
        self._num_losses += slot is not None and slot.is_training
        self.demote(group, now)

    def demote(self, group: int, now: float) -> None:
        """What the group trained since the newest commit is lost; it has to copy another one."""
        self._close(group, now)
        self._slots[group] = _Slot("recovery", now)

    def leave(self, group: int, now: float) -> None:
        """The job does not want the group any more; it left after a commit, so nothing is lost."""
        self._close(group, now)
        self._slots.pop(group, None)

    def read(self, now: float) -> tuple[float, dict[Cause, float]]:
        """(group-seconds that trained rows that count, those lost by cause) until now.

        What is not committed yet counts as if it were going to be.
        """
        useful_s, lost_s = self._useful_s, self._lost_s.copy()
        for slot in self._slots.values():
            rest_s = _split(slot, now, lost_s)
            if slot.is_training:
                useful_s += rest_s
            else:
                lost_s[slot.cause] += rest_s
        return useful_s, lost_s

    def losses_per_s(self, now: float) -> float:
        """How often a second of its time a group that trained was lost."""
        useful_s, lost_s = self.read(now)
        total_s = useful_s + sum(lost_s.values())
        return self._num_losses / total_s if total_s else 0.0

    def metrics(self, now: float, step: int, durable_step: int) -> dict[str, float]:
        """As metrics of a job that has come to `step`, and whose newest checkpoint is older."""
        useful_s, lost_s = self.read(now)
        total_s = useful_s + sum(lost_s.values())
        return {
            "goodput/share": useful_s / total_s if total_s else 1.0,
            **{f"goodput/lost_s/{cause}": each_s for cause, each_s in lost_s.items()},
            "risk/steps_undurable": float(max(step - durable_step, 0)),
            "elastic/groups": float(self.num_training),
        }

    def _close(self, group: int, now: float) -> None:
        """End the group's period; nothing of it is useful."""
        slot = self._slots.get(group)
        if slot:
            self._lost_s[slot.cause] += self._settle(slot, now)

    def _settle(self, slot: _Slot, now: float) -> float:
        """Split the period and start the next one; returns the seconds that are left."""
        rest_s = _split(slot, now, self._lost_s)
        slot.since = now
        slot.spent.clear()
        return rest_s


def _split(slot: _Slot, now: float, lost_s: dict[Cause, float]) -> float:
    """Add what was spent in this period to `lost_s`; returns the seconds that are left.

    Scaled down where it adds up to more than the period.
    """
    period_s, spent_s = now - slot.since, sum(slot.spent.values())
    scale = min(period_s / spent_s, 1.0) if spent_s else 0.0
    for cause, each_s in slot.spent.items():
        lost_s[cause] += each_s * scale
    return period_s - spent_s * scale


@dataclass
class _Incident:
    """The first failure since the newest commit, and what it cost so far."""

    cause: str
    since: float
    syncs_lost: int = 0


class RunMetrics:
    """Goodput, commits and recoveries of one run. `now` is Unix time in seconds."""

    def __init__(self, rows_per_step: int) -> None:
        self.goodput = GoodputMeter()
        self._rows_per_step = rows_per_step
        self._intervals: deque[float] = deque(maxlen=_NUM_SYNC_INTERVALS)
        self._committed_at: float | None = None
        self.incident: _Incident | None = None  # from which the next commit is a recovery
        self._num_tries = 0
        self._heartbeat_at: dict[int, float] = {}
        self._validation_s: defaultdict[int, float] = defaultdict(float)

    def start_round(self) -> None:
        self._num_tries += 1

    def record_incident(self, cause: str, now: float, syncs_lost: int = 0) -> None:
        """Something delays the next commit; of several causes the first is reported."""
        if self.incident is None:
            self.incident = _Incident(cause, now)
        self.incident.syncs_lost += syncs_lost

    def record_heartbeat(self, group: int, heartbeat: Heartbeat, now: float) -> None:
        """Account for the time that a group spends on validation and checkpoints."""
        since = self._heartbeat_at.get(group, now)
        self._heartbeat_at[group] = now
        cause = _NOT_TRAINING.get(heartbeat.phase)
        if cause:
            self.goodput.spend(group, cause, now - since)
        if cause == "validation" and not heartbeat.is_waiting:
            self._validation_s[group] += now - since

    def commit(
        self, counting: Collection[int], generation: int, commit: int, now: float
    ) -> Recovered | None:
        """A sync of these groups' work counts; returns the recovery that it ends, if any."""
        incident, self.incident = self.incident, None
        num_tries, self._num_tries = self._num_tries, 0
        since, self._committed_at = self._committed_at, now
        self.goodput.commit(counting, now)
        validation_s = max((self._validation_s[group] for group in counting), default=0.0)
        self._validation_s.clear()
        if incident is None:
            if since is not None:
                self._intervals.append(now - since)
            return None
        begun = incident.since if since is None else since
        return Recovered(
            time=now,
            generation=generation,
            commit=commit,
            cause=incident.cause,
            pause_s=max(0.0, now - begun - self._usual_s - validation_s),
            syncs_lost=incident.syncs_lost,
            num_tries=num_tries,
        )

    @property
    def _usual_s(self) -> float:
        """Median time between the newest commits without a failure, 0 before the second."""
        return statistics.median(self._intervals) if self._intervals else 0.0

    def step(self, ledger: Ledger) -> int:
        """The nominal step: one for as many rows as the whole job takes at once."""
        return ledger.rows_done // self._rows_per_step

    def as_event(self, ledger: Ledger, generation: int, now: float) -> Metrics:
        """The job's goodput, the nominal steps at risk, and its groups."""
        step = self.step(ledger)
        values = self.goodput.metrics(now, step, ledger.led.saved_step) | {
            "elastic/generation": float(generation),
            "elastic/commit_interval_s": self._usual_s,
        }
        return Metrics(time=now, step=step, values=values)
