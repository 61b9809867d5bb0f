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
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainer.coordination.messages import Heartbeat

_UNTIMED_FACTOR = 10


class RankId(NamedTuple):
    """One rank in one life of its group; in the job domain all ranks are group 0."""

    group: int
    incarnation: int
    rank: int


@dataclass(frozen=True)
class HeartbeatSample:
    """The progress of a rank, from a heartbeat.

    `progress` counts what its main thread got done; `step_time_s` is the median time of its newest
    steps without waiting for peers, 0 where it is not known.
    """

    progress: int
    phase: str
    step_time_s: float = 0.0


@dataclass(frozen=True)
class HangPolicy:
    """No progress for `hang_factor` median steps, and at least `min_hang_s`, is a hang."""

    min_hang_s: float
    hang_factor: float

    def limit_s(self, step_times_s: Iterable[float]) -> float:
        """How long a rank may stand still; step times of 0 are unknown and left out."""
        known = [each for each in step_times_s if each > 0]
        median_s = statistics.median(known) if known else 0.0
        return max(self.min_hang_s, self.hang_factor * median_s)


@dataclass(frozen=True)
class Hang:
    """A rank that stands still although its process lives; its peers wait for it."""

    rank: RankId
    phase: str
    idle_s: float


@dataclass
class _Watched:
    pulse: HeartbeatSample
    since: float


class HangDetector:
    """Finds the ranks that stand still."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._watched: dict[RankId, _Watched] = {}

    def observe(self, rank: RankId, pulse: HeartbeatSample, now: float) -> None:
        """Apply a heartbeat; a later incarnation of a group drops earlier ones."""
        incarnations = {
            each: each.incarnation for each in self._watched if each.group == rank.group
        }
        if any(incarnation > rank.incarnation for incarnation in incarnations.values()):
            return
        for each, incarnation in incarnations.items():
            if incarnation < rank.incarnation:
                del self._watched[each]
        known = self._watched.get(rank)
        stands_still = known is not None and known.pulse.progress == pulse.progress
        since = known.since if known and stands_still else now
        self._watched[rank] = _Watched(pulse, since)

    def forget(self, group: int) -> None:
        """Drop a group, which has left."""
        for rank in [each for each in self._watched if each.group == group]:
            del self._watched[rank]

    def forget_rank(self, rank: RankId) -> None:
        """Forget one rank."""
        self._watched.pop(rank, None)

    def check(self, now: float, waiting: Collection[RankId] = ()) -> list[Hang]:
        """The hangs, at most one per group: its ranks that wait for the hung one hang with it.

        Ranks in `waiting` wait for another group or for the coordinator; their clocks start when
        that ends.
        """
        for rank in self._watched.keys() & set(waiting):
            self._watched[rank].since = now
        limit_s = self._policy.limit_s(each.pulse.step_time_s for each in self._watched.values())
        first: dict[int, Hang] = {}
        for rank, watched in self._watched.items():
            hang = Hang(rank, watched.pulse.phase, now - watched.since)
            other = first.get(rank.group)
            if hang.idle_s > limit_s and (other is None or hang.idle_s > other.idle_s):
                first[rank.group] = hang
        return list(first.values())


@dataclass(frozen=True)
class StragglerPolicy:
    """Slower than `factor` times the median in `num_windows` windows in a row is persistent."""

    factor: float
    num_windows: int = 5


@dataclass(frozen=True)
class Straggler:
    """A rank that is persistently slow; `is_whole_host` says that all ranks of its host are."""

    rank: RankId
    host: str
    slowdown: float
    is_whole_host: bool


class StepTime(NamedTuple):
    """Of a rank: `step_s`, how long its steps take, and `local_s` of it without waiting; 0 unknown.

    Waiting for other groups is in neither; reading is in `local_s` only.
    """

    step_s: float
    local_s: float = 0.0


def times_needed(times: Mapping[RankId, StepTime]) -> dict[RankId, float]:
    """Seconds that each rank would take for a step if it waited for no other rank; 0 for unknown.

    The ranks of a group take every step together, so that their steps are as long as those of the
    slowest one: the others wait for as long as it is busy on its own when they are not.
    """
    needed: dict[RankId, float] = {}
    for group in {rank.group for rank in times}:
        mates = {rank: each for rank, each in times.items() if rank.group == group}
        if not all(each.local_s for each in mates.values()):
            needed |= {rank: each.step_s for rank, each in mates.items()}
            continue
        step_s = max(each.step_s for each in mates.values())
        busiest_s = max(each.local_s for each in mates.values())
        for rank, each in mates.items():
            needed[rank] = max(step_s - (busiest_s - each.local_s), each.local_s)
    return needed


class StragglerDetector:
    """Finds ranks that are persistently slower than the others."""

    def __init__(self, policy: StragglerPolicy) -> None:
        self._policy = policy
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
        slow = {rank for rank, each in slowdown.items() if each > self._policy.factor}
        self._slow_windows = {rank: self._slow_windows.get(rank, 0) + 1 for rank in slow}
        told = [r for r, count in self._slow_windows.items() if count == self._policy.num_windows]
        return [
            Straggler(
                rank,
                hosts[rank],
                slowdown[rank],
                is_whole_host=all(each in slow for each in known if hosts[each] == hosts[rank]),
            )
            for rank in sorted(told)
        ]


LossAction = Literal["go_on", "skip", "fail"]


@dataclass(frozen=True)
class LossPolicy:
    """What follows a loss that is NaN or infinite, or a normalised entropy that explodes.

    NE of 1 is what a model without features reaches; above `max_ne` and above `explode_factor`
    times the best so far, in `num_reports` reports in a row, it explodes. After
    `max_skips_in_a_row` skipped intervals the data is not to blame, and the job fails.
    """

    on_non_finite: Literal["fail", "skip"] = "fail"
    max_ne: float = 1.5
    explode_factor: float = 1.5
    num_reports: int = 3
    max_skips_in_a_row: int = 3


@dataclass(frozen=True)
class LossDecision:
    """What to do, and why in a clause (empty where all is well)."""

    action: LossAction
    cause: str = ""


@dataclass
class LossWatch:
    """Judges the losses of one attempt, interval by interval, and the NE of its reports."""

    policy: LossPolicy
    _skips: int = field(default=0, init=False)
    _best_ne: float = field(default=math.inf, init=False)
    _exploded: int = field(default=0, init=False)

    def judge_loss(self, loss: float) -> LossDecision:
        """Decide on an interval by its mean loss, before it counts."""
        if math.isfinite(loss):
            self._skips = 0
            return LossDecision("go_on")
        cause = f"the training loss became {loss}"
        if self.policy.on_non_finite == "fail":
            return LossDecision("fail", cause)
        self._skips += 1
        if self._skips > self.policy.max_skips_in_a_row:
            return LossDecision("fail", f"{cause} in {self._skips} intervals in a row")
        return LossDecision("skip", cause)

    def judge_ne(self, ne: float) -> LossDecision:
        """Decide by the NE of a report. One that is not finite is judged by the loss alone."""
        if not math.isfinite(ne):
            return LossDecision("go_on")
        self._best_ne = min(self._best_ne, ne)
        limit = max(self.policy.max_ne, self.policy.explode_factor * self._best_ne)
        self._exploded = self._exploded + 1 if ne > limit else 0
        if self._exploded < self.policy.num_reports:
            return LossDecision("go_on")
        return LossDecision(
            "fail",
            f"normalised entropy was above {limit:.3g} in {self._exploded} reports in a row, after "
            f"{self._best_ne:.3g} at best",
        )


@dataclass(frozen=True)
class HostPolicy:
    """A host with `exclude_after` failures within `window_s` is left out for `exclude_s`."""

    exclude_after: int
    exclude_s: float
    window_s: float = 3600.0


@dataclass(frozen=True)
class Exclusion:
    """A host that is left out until `until`, after `num_failures`."""

    host: str
    num_failures: int
    until: float


class HostRecord:
    """Failures by host, and which hosts are left out."""

    def __init__(self, policy: HostPolicy, avoided: Iterable[tuple[str, float]] = ()) -> None:
        """`avoided` hosts are left out from the start, each until its time (Unix seconds)."""
        self._policy = policy
        self._failures: dict[str, deque[float]] = {}
        self._until: dict[str, float] = dict(avoided)

    def fail(self, host: str, now: float) -> Exclusion | None:
        """Count a failure that the host is to blame for; the exclusion that it leads to, if any.

        Those that led to an exclusion do not count for the next one.
        """
        failures = self._failures.setdefault(host, deque())
        failures.append(now)
        while failures[0] < now - self._policy.window_s:
            failures.popleft()
        if len(failures) < self._policy.exclude_after:
            return None
        exclusion = Exclusion(host, len(failures), now + self._policy.exclude_s)
        failures.clear()
        self._until[host] = exclusion.until
        return exclusion

    def excluded(self, now: float) -> frozenset[str]:
        """Hosts that no worker may be placed on."""
        return frozenset(host for host, until in self._until.items() if now < until)


class HeartbeatMonitor:
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
        """Note a message of a rank."""
        self._heard_at[rank] = now

    def beat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> None:
        """Apply a heartbeat of a rank."""
        self.hear(rank, now)
        known = self._pulses.get(rank)
        if known is None or known.progress != heartbeat.progress:
            self._moved_at[rank] = now
        self._pulses[rank] = heartbeat
        pulse = HeartbeatSample(heartbeat.progress, heartbeat.phase, heartbeat.step_time_s)
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
        """The newest heartbeat of a rank."""
        return self._pulses.get(rank)

    def idle_s(self, rank: RankId, now: float) -> float:
        """Seconds since a rank got something done."""
        return now - self._moved_at.get(rank, now)

    def wake(self, now: float) -> float:
        """Correct for a pause of this process itself, and return its seconds."""
        slept_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if slept_s <= self._silence_s / 2:
            return 0.0
        self._heard_at = {rank: at + slept_s for rank, at in self._heard_at.items()}
        self._hangs.check(now, waiting=self._pulses)  # starts their clocks anew
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
        pulses = {rank: self._pulses[rank] for rank in hosts if rank in self._pulses}
        times = {rank: StepTime(each.step_time_s, each.local_s) for rank, each in pulses.items()}
        return self._stragglers.check(times_needed(times), hosts)
