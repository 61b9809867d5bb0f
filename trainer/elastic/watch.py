"""Which ranks are silent, stand still or are slow, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trainer.elastic.detect import (
    Hang,
    HangDetector,
    HangPolicy,
    Pulse,
    RankId,
    StepTime,
    Straggler,
    StragglerDetector,
    StragglerPolicy,
    times_needed,
)
from trainer.elastic.protocol import Heartbeat

_UNTIMED_FACTOR = 10


class Watch:
    """Heartbeats of all ranks. Times are seconds of the clock of `now`."""

    def __init__(
        self, silence_s: float, hang: HangPolicy, straggler: StragglerPolicy, window_s: float
    ) -> None:
        self._silence_s, self._window_s = silence_s, window_s
        self._heard_at: dict[RankId, float] = {}
        self._pulses: dict[RankId, Heartbeat] = {}
        self._moved_at: dict[RankId, float] = {}
        self._hangs = HangDetector(hang)
        self._untimed_s = _UNTIMED_FACTOR * hang.min_hang_s
        self._stragglers = StragglerDetector(straggler)
        self._window_ends: float | None = None
        self._looked_at: float | None = None

    def hear(self, rank: RankId, now: float) -> None:
        """A rank said something."""
        self._heard_at[rank] = now

    def beat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> None:
        """A rank said how it gets on."""
        self.hear(rank, now)
        known = self._pulses.get(rank)
        if known is None or known.progress != heartbeat.progress:
            self._moved_at[rank] = now
        self._pulses[rank] = heartbeat
        pulse = Pulse(heartbeat.progress, heartbeat.phase, heartbeat.step_time_s)
        self._hangs.observe(rank, pulse, now)

    def forget(self, group: int) -> None:
        """A group is gone."""
        self._hangs.forget(group)
        for known in (self._heard_at, self._pulses, self._moved_at):
            for rank in [rank for rank in known if rank.group == group]:
                del known[rank]

    def forget_rank(self, rank: RankId) -> None:
        """A rank is gone, and its group is not."""
        self._hangs.forget_rank(rank)
        for known in (self._heard_at, self._pulses, self._moved_at):
            known.pop(rank, None)

    def pulse(self, rank: RankId) -> Heartbeat | None:
        """What a rank said last."""
        return self._pulses.get(rank)

    def idle_s(self, rank: RankId, now: float) -> float:
        """Seconds since a rank got something done."""
        return now - self._moved_at.get(rank, now)

    def wake(self, now: float) -> float:
        """Look at the clock; the time that this process slept, which is nobody's silence."""
        slept_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if slept_s <= self._silence_s / 2:
            return 0.0
        self._heard_at = {rank: at + slept_s for rank, at in self._heard_at.items()}
        self._hangs.check(now, waiting=self._pulses)  # starts their clocks anew
        return slept_s

    def silent(self, now: float) -> list[RankId]:
        """Ranks that said nothing for too long."""
        return [rank for rank, at in self._heard_at.items() if now - at > self._silence_s]

    def hangs(self, now: float, waiting: Collection[RankId]) -> list[Hang]:
        """Ranks that stand still though nobody makes them wait; at most one per group.

        Outside of training, where a rank tells of no steps, it may stand still for longer.
        """
        found = self._hangs.check(now, waiting)
        return [hang for hang in found if hang.phase == "train" or hang.idle_s > self._untimed_s]

    def stragglers(self, hosts: Mapping[RankId, str], now: float) -> list[Straggler]:
        """Ranks among those in `hosts` that are persistently slow; looked for once per window."""
        if self._window_ends is None:
            self._window_ends = now + self._window_s
        if now < self._window_ends:
            return []
        self._window_ends = now + self._window_s
        pulses = {rank: self._pulses[rank] for rank in hosts if rank in self._pulses}
        times = {rank: StepTime(each.step_time_s, each.local_s) for rank, each in pulses.items()}
        return self._stragglers.check(times_needed(times), hosts)
