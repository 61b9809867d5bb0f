"""Failure detection: hangs, stragglers, diverging losses, bad hosts; pure policies.

Each policy takes observations and the time, in seconds of any steady clock, and returns decisions;
none reads a clock or acts. State belongs to one attempt and, for ranks, to one incarnation of their
group: the first observation of a later incarnation drops what is known of earlier ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.coordination.messages import Heartbeat

_UNTIMED_FACTOR = 10
# A rank that is slow in so many windows in a row is persistently slow.
_SLOW_WINDOWS = 5
# A normalised entropy of 1 is what a model without features reaches. One above `_MAX_NE` and above
# `_EXPLODE_FACTOR` times the best so far explodes, in so many reports in a row.
_MAX_NE = 1.5
_EXPLODE_FACTOR = 1.5
_EXPLODED_REPORTS = 3
# After so many skipped intervals in a row the data is not to blame, and the job fails.
_MAX_SKIPS_IN_A_ROW = 3
_FAILURE_WINDOW_S = 3600.0


class RankId(NamedTuple):
    """One rank in one life of its group; in the job domain all ranks are group 0."""

    group: int
    incarnation: int
    rank: int


@dataclass(frozen=True)
class Hang:
    """A rank that stands still although its process lives; its peers wait for it."""

    rank: RankId
    phase: str
    idle_s: float


@dataclass
class _Watched:
    """The newest heartbeat of a rank, which has stood still since `since`."""

    heartbeat: Heartbeat
    since: float


class HangDetector:
    """Finds the ranks that stand still.

    No progress for `hang_factor` median steps, and at least `min_hang_s`, is a hang.
    """

    def __init__(self, min_hang_s: float, hang_factor: float) -> None:
        self._min_hang_s, self._hang_factor = min_hang_s, hang_factor
        self.watched: dict[RankId, _Watched] = {}

    def observe(self, rank: RankId, heartbeat: Heartbeat, now: float) -> None:
        """Apply a heartbeat; a later incarnation of a group drops earlier ones."""
        mates = [each for each in self.watched if each.group == rank.group]
        if any(each.incarnation > rank.incarnation for each in mates):
            return
        for each in mates:
            if each.incarnation < rank.incarnation:
                del self.watched[each]
        known = self.watched.get(rank)
        if known is not None and known.heartbeat.progress == heartbeat.progress:
            known.heartbeat = heartbeat
        else:
            self.watched[rank] = _Watched(heartbeat, now)

    def forget(self, group: int) -> None:
        for rank in [each for each in self.watched if each.group == group]:
            del self.watched[rank]

    def check(self, now: float, waiting: Collection[RankId] = ()) -> list[Hang]:
        """The hangs, at most one per group: its ranks that wait for the hung one hang with it.

        Ranks in `waiting` wait for another group or for the coordinator; their clocks start when
        that ends.
        """
        for rank in self.watched.keys() & set(waiting):
            self.watched[rank].since = now
        steps_s = (each.heartbeat.step_time_s for each in self.watched.values())
        known_s = [step_s for step_s in steps_s if step_s > 0]
        median_s = statistics.median(known_s) if known_s else 0.0
        limit_s = max(self._min_hang_s, self._hang_factor * median_s)
        first: dict[int, Hang] = {}
        for rank, watched in self.watched.items():
            hang = Hang(rank, watched.heartbeat.phase, now - watched.since)
            other = first.get(rank.group)
            if hang.idle_s > limit_s and (other is None or hang.idle_s > other.idle_s):
                first[rank.group] = hang
        return list(first.values())


@dataclass(frozen=True)
class Straggler:
    """A rank that is persistently slow."""

    rank: RankId
    host: str
    slowdown: float


def times_needed(beats: Mapping[RankId, Heartbeat]) -> dict[RankId, float]:
    """Seconds that each rank would take for a step if it waited for no other rank; 0 for unknown.

    `beats` are their newest. Waiting for other groups is in none of their times; reading is in
    `local_s` only.

    The ranks of a group take every step together, so that their steps are as long as those of the
    slowest one: the others wait for as long as it is busy on its own when they are not.
    """
    needed: dict[RankId, float] = {}
    for group in {rank.group for rank in beats}:
        mates = {rank: each for rank, each in beats.items() if rank.group == group}
        if not all(each.local_s for each in mates.values()):
            needed |= {rank: each.step_time_s for rank, each in mates.items()}
            continue
        step_s = max(each.step_time_s for each in mates.values())
        busiest_s = max(each.local_s for each in mates.values())
        for rank, each in mates.items():
            needed[rank] = max(step_s - (busiest_s - each.local_s), each.local_s)
    return needed


class StragglerDetector:
    """Finds ranks that are persistently slower than `factor` times the median."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._slow_windows: dict[RankId, int] = {}

    def check(
        self, step_times_s: Mapping[RankId, float], hosts: Mapping[RankId, str]
    ) -> list[Straggler]:
        """Close a window. Each straggler is told once, and again only after it had recovered.

        `step_times_s` are those of the live ranks in this window, 0 for unknown; one that is
        missing loses its count. The median is the lower one, so that of two ranks, or of two
        hosts, the slow one shows.
        """
        known = {rank: each for rank, each in step_times_s.items() if each > 0}
        if len(known) < 2:
            self._slow_windows.clear()
            return []
        median_s = statistics.median_low(known.values())
        slowdown = {rank: each / median_s for rank, each in known.items()}
        slow = {rank for rank, each in slowdown.items() if each > self._factor}
        self._slow_windows = {rank: self._slow_windows.get(rank, 0) + 1 for rank in slow}
        told = [r for r, count in self._slow_windows.items() if count == _SLOW_WINDOWS]
        return [Straggler(rank, hosts[rank], slowdown[rank]) for rank in sorted(told)]


@dataclass(frozen=True)
class LossDecision:
    """What to do, and why in a clause (empty where all is well)."""

    action: Literal["go_on", "skip", "fail"]
    cause: str = ""


class LossWatch:
    """Judges the losses of one attempt, interval by interval, and the NE of its reports."""

    def __init__(self, on_non_finite: Literal["fail", "skip"] = "fail") -> None:
        self._on_non_finite = on_non_finite
        self._skips = 0
        self._best_ne = math.inf
        self._exploded = 0

    def judge_loss(self, loss: float) -> LossDecision:
        """Decide on an interval by its mean loss, before it counts."""
        if math.isfinite(loss):
            self._skips = 0
            return LossDecision("go_on")
        cause = f"the training loss became {loss}"
        if self._on_non_finite == "fail":
            return LossDecision("fail", cause)
        self._skips += 1
        if self._skips > _MAX_SKIPS_IN_A_ROW:
            return LossDecision("fail", f"{cause} in {self._skips} intervals in a row")
        return LossDecision("skip", cause)

    def judge_ne(self, ne: float) -> LossDecision:
        """Decide by the NE of a report. One that is not finite is judged by the loss alone."""
        if not math.isfinite(ne):
            return LossDecision("go_on")
        self._best_ne = min(self._best_ne, ne)
        limit = max(_MAX_NE, _EXPLODE_FACTOR * self._best_ne)
        self._exploded = self._exploded + 1 if ne > limit else 0
        if self._exploded < _EXPLODED_REPORTS:
            return LossDecision("go_on")
        return LossDecision(
            "fail",
            f"normalised entropy was above {limit:.3g} in {self._exploded} reports in a row, after "
            f"{self._best_ne:.3g} at best",
        )


@dataclass(frozen=True)
class Exclusion:
    """A host that is left out until `until`, after `num_failures`."""

    host: str
    num_failures: int
    until: float


class HostRecord:
    """Failures by host; one with `exclude_after` within an hour is left out for `exclude_s`."""

    def __init__(
        self, exclude_after: int, exclude_s: float, avoided: Iterable[tuple[str, float]] = ()
    ) -> None:
        """`avoided` hosts are left out from the start, each until its time (Unix seconds)."""
        self._exclude_after, self._exclude_s = exclude_after, exclude_s
        self._failures: dict[str, deque[float]] = {}
        self._until: dict[str, float] = dict(avoided)

    def fail(self, host: str, now: float) -> Exclusion | None:
        """Count a failure that the host is to blame for; the exclusion that it leads to, if any.

        Those that led to an exclusion do not count for the next one.
        """
        failures = self._failures.setdefault(host, deque())
        failures.append(now)
        while failures[0] < now - _FAILURE_WINDOW_S:
            failures.popleft()
        if len(failures) < self._exclude_after:
            return None
        exclusion = Exclusion(host, len(failures), now + self._exclude_s)
        failures.clear()
        self._until[host] = exclusion.until
        return exclusion

    def excluded(self, now: float) -> frozenset[str]:
        """Hosts that no worker may be placed on."""
        return frozenset(host for host, until in self._until.items() if now < until)


class HeartbeatMonitor:
    """Heartbeats of all ranks. Times are seconds of the clock of `now`."""

    def __init__(
        self,
        silence_s: float,
        min_hang_s: float,
        hang_factor: float,
        straggler_factor: float,
        window_s: float,
    ) -> None:
        self._silence_s, self._window_s = silence_s, window_s
        self._untimed_s = _UNTIMED_FACTOR * min_hang_s
        self._heard_at: dict[RankId, float] = {}
        self._hangs = HangDetector(min_hang_s, hang_factor)
        self._stragglers = StragglerDetector(straggler_factor)
        self._window_ends: float | None = None
        self._looked_at: float | None = None

    def hear(self, rank: RankId, now: float) -> None:
        self._heard_at[rank] = now

    def beat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> None:
        self.hear(rank, now)
        self._hangs.observe(rank, heartbeat, now)

    def forget(self, group: int) -> None:
        self._hangs.forget(group)
        for rank in [rank for rank in self._heard_at if rank.group == group]:
            del self._heard_at[rank]

    def forget_rank(self, rank: RankId) -> None:
        self._hangs.watched.pop(rank, None)
        self._heard_at.pop(rank, None)

    def wake(self, now: float) -> float:
        """Correct for a pause of this process itself, and return its seconds."""
        slept_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if slept_s <= self._silence_s / 2:
            return 0.0
        self._heard_at = {rank: at + slept_s for rank, at in self._heard_at.items()}
        self._hangs.check(now, waiting=self._hangs.watched)  # starts their clocks anew
        return slept_s

    def silent(self, now: float) -> list[RankId]:
        """Ranks without a message for too long."""
        return [rank for rank, at in self._heard_at.items() if now - at > self._silence_s]

    def hangs(self, now: float, waiting: Collection[RankId]) -> list[Hang]:
        """Ranks that stand still though nobody makes them wait; at most one per group.

        Outside of training, where a rank tells of no steps, it may stand still for longer.
        """
        found = self._hangs.check(now, waiting)
        return [hang for hang in found if hang.phase == "train" or hang.idle_s > self._untimed_s]

    def stragglers(self, hosts: Mapping[RankId, str], now: float) -> list[Straggler]:
        """Ranks among those in `hosts` that are persistently slow; checked once per window."""
        if self._window_ends is None:
            self._window_ends = now + self._window_s
        if now < self._window_ends:
            return []
        self._window_ends = now + self._window_s
        beats = {r: each.heartbeat for r, each in self._hangs.watched.items() if r in hosts}
        return self._stragglers.check(times_needed(beats), hosts)
