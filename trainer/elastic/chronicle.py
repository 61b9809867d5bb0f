"""What a run went through, as numbers and events: commits, recoveries, goodput. Pure."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from trainer.elastic.goodput import Cause, GoodputMeter, steps_undurable
from trainer.elastic.protocol import Heartbeat, Ledger
from trainer.events import Metrics, Recovered

_NUM_INTERVALS = 21
_NOT_TRAINING: dict[str, Cause] = {"validation": "validation", "checkpoint": "checkpoint"}


@dataclass
class _Trouble:
    """What went wrong first since the newest commit, and what it cost so far."""

    cause: str
    since: float
    syncs_lost: int = 0


class Chronicle:
    """Keeps the times of commits and troubles. `now` is Unix time in seconds."""

    def __init__(self, rows_per_step: int) -> None:
        self.goodput = GoodputMeter()
        self._rows_per_step = rows_per_step
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._committed_at: float | None = None
        self._trouble: _Trouble | None = None
        self._num_tries = 0
        self._beaten_at: dict[int, float] = {}
        self._durable_steps: dict[int, int] = {}

    def try_round(self) -> None:
        """A round begins."""
        self._num_tries += 1

    def trouble(self, cause: str, now: float, syncs_lost: int = 0) -> None:
        """Something keeps the next commit away; of several causes the first is told."""
        if self._trouble is None:
            self._trouble = _Trouble(cause, now)
        self._trouble.syncs_lost += syncs_lost

    def beat(self, group: int, heartbeat: Heartbeat, now: float) -> None:
        """Book the time that a group spends on what is no training."""
        since = self._beaten_at.get(group, now)
        self._beaten_at[group] = now
        cause = _NOT_TRAINING.get(heartbeat.phase)
        if cause:
            self.goodput.spend(group, cause, now - since)

    def commit(self, generation: int, commit: int, now: float) -> Recovered | None:
        """A sync counts; what it recovered from, if anything."""
        trouble, self._trouble = self._trouble, None
        num_tries, self._num_tries = self._num_tries, 0
        since, self._committed_at = self._committed_at, now
        self.goodput.commit(now)
        if trouble is None:
            if since is not None:
                self._intervals.append(now - since)
            return None
        usual_s = statistics.median(self._intervals) if self._intervals else 0.0
        begun = trouble.since if since is None else since
        return Recovered(
            time=now,
            generation=generation,
            commit=commit,
            cause=trouble.cause,
            pause_s=max(0.0, now - begun - usual_s),
            syncs_lost=trouble.syncs_lost,
            num_tries=num_tries,
        )

    def metrics(self, ledger: Ledger, generation: int, now: float) -> dict[str, float]:
        """The job's goodput, the nominal steps at risk, and its groups."""
        return self.goodput.read(now).metrics() | {
            "risk/steps_undurable": float(self._steps_undurable(ledger)),
            "elastic/groups": float(self.goodput.num_training),
            "elastic/generation": float(generation),
            "elastic/commit_interval_s": self.goodput.commit_interval_s,
        }

    def _steps_undurable(self, ledger: Ledger) -> int:
        step = self.step(ledger)
        if ledger.checkpoint_commit == ledger.commit:
            return 0
        return steps_undurable(step, self._durable_steps.get(ledger.checkpoint_commit, 0))

    def step(self, ledger: Ledger) -> int:
        """The nominal step: one for as many rows as the whole job takes at once."""
        return (ledger.rows_trained + ledger.rows_skipped) // self._rows_per_step

    def remember(self, ledger: Ledger) -> None:
        """Note the step of a commit, in case that a checkpoint of it becomes durable."""
        self._durable_steps[ledger.commit] = self.step(ledger)
        old = [commit for commit in self._durable_steps if commit < ledger.checkpoint_commit]
        for commit in old:
            del self._durable_steps[commit]

    def as_event(self, ledger: Ledger, generation: int, now: float) -> Metrics:
        """The metrics, as an event."""
        values = self.metrics(ledger, generation, now)
        return Metrics(time=now, step=self.step(ledger), values=values)
