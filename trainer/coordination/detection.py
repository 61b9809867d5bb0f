"""Failure detection: silence, hangs, stragglers, bad hosts, copies that differ; pure policies.

Each policy takes observations and the time, in seconds of any steady clock, and returns decisions;
none reads a clock or acts. State belongs to one attempt.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainer.coordination.messages import Heartbeat
from trainer.failures import Failure
from trainer.protocol.events import HostExcluded, StragglerFound
from trainer.spec.training import RecoverySpec

UNTIMED_FACTOR = 10
"""Of `min_hang_s`: so long a rank may stand still outside of training."""
# A rank that is slow in so many windows, without one in which it has recovered, is persistently so.
_SLOW_WINDOWS = 5
# Less than this share of a step is nothing that others wait for. The backward pass, in which a slow
# rank is slow too, is in no local time, as it waits for others.
_LEAST_EXCESS = 0.05
_MAX_REPLACEMENTS = 3
_WINDOW_S = 10.0
_FAILURE_WINDOW_S = 3600.0
AT_ONCE_S = 1.0
"""Losses of groups in so short a time have one cause, as that of a host with several groups."""
_CLEAR_FAULTS = 2
_FAULTS = 5


class RankId(NamedTuple):
    """One rank in one life of its group; in the job domain all ranks are group 0."""

    group: int
    incarnation: int
    rank: int


@dataclass(frozen=True)
class DivergentShard:
    """Replicas of one shard that differ: `ranks` hold another content than most of their group.

    `shard` is the position in the sharding group, from 0 to L - 1, and 0 for what is whole on every
    rank; `table` may also be the name of a dense parameter.
    """

    table: str
    shard: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        # Only parameters outside the tables have a dot in their name, and these have no shards.
        place = self.table if "." in self.table else f"{self.table}, shard {self.shard}"
        return f"{place}, on rank(s) {', '.join(map(str, self.ranks))}"


def differing_copies(checksums: Sequence[int]) -> list[int]:
    """Positions of the copies that differ from what most hold.

    Where two contents are equally common, the one that comes first counts as right: of two copies
    the second differs.
    """
    right, _ = Counter(checksums).most_common(1)[0]
    return [copy for copy, value in enumerate(checksums) if value != right]


def times_needed(beats: Mapping[RankId, Heartbeat]) -> dict[RankId, float]:
    """Seconds that each rank would take for a step if it waited for no other rank; 0 for unknown.

    `beats` are their newest. Waiting for other groups is in none of their times; reading is in
    `local_s` only.

    The ranks of a group take every step together, so that their steps are as long as those of the
    slowest one: the others wait for as long as it is busy on its own when they are not.
    """
    needed: dict[RankId, float] = {}
    groups: defaultdict[int, dict[RankId, Heartbeat]] = defaultdict(dict)
    for rank, each in beats.items():
        groups[rank.group][rank] = each
    for mates in groups.values():
        if not all(each.local_s for each in mates.values()):
            needed |= {rank: each.step_time_s for rank, each in mates.items()}
            continue
        step_s = max(each.step_time_s for each in mates.values())
        busiest_s = max(each.local_s for each in mates.values())
        for rank, each in mates.items():
            needed[rank] = max(step_s - (busiest_s - each.local_s), each.local_s)
    return needed


@dataclass(frozen=True)
class Slowness:
    """A rank takes `own_s` for a step in which it waits for nobody, the median one `median_s`."""

    own_s: float
    median_s: float

    @property
    def slowdown(self) -> float:
        return self.own_s / self.median_s


def slowness_of(beats: Mapping[RankId, Heartbeat]) -> dict[RankId, Slowness]:
    """How slow each rank is beside the others whose times are known; `beats` are their newest.

    Of two measures the greater counts: the step that it needs beside those of all ranks, and what
    it does on its own (reading, lookups, the dense part) beside the ranks that step with it, unless
    that is too little for these to wait for. The median is the lower one, so that of two ranks, or
    of two hosts, the slow one shows.
    """
    needed = {rank: each for rank, each in times_needed(beats).items() if each > 0}
    if not needed:
        return {}
    median_s = statistics.median_low(needed.values())
    found = {rank: Slowness(each, median_s) for rank, each in needed.items()}
    groups: defaultdict[int, dict[RankId, Heartbeat]] = defaultdict(dict)
    for rank in needed:
        groups[rank.group][rank] = beats[rank]
    for mates in groups.values():
        own_s = statistics.median_low(each.local_s for each in mates.values())
        for rank, each in mates.items():
            own = Slowness(each.local_s, own_s)
            is_felt = own_s and each.local_s - own_s > _LEAST_EXCESS * each.step_time_s
            if is_felt and own.slowdown > found[rank].slowdown:
                found[rank] = own
    return found


class ReplacementPolicy:
    """Whether a straggler's host is replaced: only where that is wanted, and not for ever.

    No host is twice, and no `place` of the job: who is slow there on another host, too, has more to
    do. In all there are a few replacements.
    """

    def __init__(self, is_wanted: bool, most: int = _MAX_REPLACEMENTS) -> None:
        self._num_left = most if is_wanted else 0
        self._hosts: set[str] = set()
        self._places: set[int] = set()
        self._judged_until = -math.inf

    def new(self, found: Iterable[StragglerFound]) -> list[StragglerFound]:
        """Those that it was not told of before; times never run backwards."""
        new = [each for each in found if each.time > self._judged_until]
        self._judged_until = max((each.time for each in new), default=self._judged_until)
        return new

    def replaces(self, host: str, *, has_room: bool, place: int | None = None) -> bool:
        """Decide on a straggler; with `has_room` as many workers fit elsewhere."""
        is_new = host not in self._hosts and place not in self._places
        if not (has_room and is_new and self._num_left):
            return False
        self._num_left -= 1
        self._hosts.add(host)
        if place is not None:
            self._places.add(place)
        return True


Suspicion = Literal["silent", "hang"]


@dataclass(frozen=True)
class Suspect:
    """A rank that seems lost, or, as far as is known, any of those `alike`, which include it.

    `patience_s` is how long that is held back where it is doubtful.
    """

    rank: RankId
    reason: Suspicion
    phase: str
    idle_s: float
    patience_s: float
    alike: tuple[RankId, ...]


class SuspicionFilter:
    """Holds suspicions back that would take most of the copies at once, or the last one.

    A fault that so many share is rather the coordinator's own network, or storage that all wait
    for. Those held are watched: who is heard again is fine, and who is not for another
    `patience_s`, while others are fine, is lost. Where no copy is fine it takes `alone_s`. Once a
    network is mended, TCP sends again at another time on each connection.
    """

    def __init__(self, alone_s: float) -> None:
        self._alone_s = alone_s
        self._held_since: dict[int, float] = {}
        self._none_was_fine_at = -math.inf

    def judge(
        self,
        suspects: Mapping[int, Suspect],
        doubtful: Collection[int],
        copies: Collection[int],
        now: float,
    ) -> tuple[set[int], set[int], set[int]]:
        """Groups whose suspicion is confirmed, is held back from now on, or has proved wrong.

        `suspects` go by group; `doubtful` are groups half way to it, and `copies` those that count.
        The doubtful count as endangered, since groups do not fall silent in the same instant.
        """
        cleared = self._held_since.keys() - suspects.keys()
        for group in cleared:
            del self._held_since[group]
        fine = set(copies) - suspects.keys() - set(doubtful)
        if not fine:
            self._none_was_fine_at = now
        is_mass = 2 * len(fine) < len(copies)
        lost: set[int] = set()
        held: set[int] = set()
        for group, suspect in suspects.items():
            since = self._held_since.get(group)
            if since is None and is_mass:
                self._held_since[group] = now
                held.add(group)
            elif since is None:
                lost.add(group)
            elif now >= self._ends_at(since, suspect, bool(fine)):
                del self._held_since[group]
                lost.add(group)
        return lost, held, cleared

    def _ends_at(self, since: float, suspect: Suspect, is_any_fine: bool) -> float:
        if not is_any_fine:
            return since + self._alone_s
        return max(since, self._none_was_fine_at) + suspect.patience_s


class FaultRecord:
    """Finds the group that makes exchanges fail, by what the groups of failed rounds say.

    Guilty is whom most others could not reach; where nobody is named, one of those that failed. On
    a tie it is the newcomer. Twice is enough where one group is named most, else five times.
    """

    def __init__(self) -> None:
        self._complaints: dict[int, dict[int, set[int]]] = {}
        self._errors: dict[int, str] = {}
        self._faults: Counter[int] = Counter()

    def complain(self, number: int, accuser: int, accused: Iterable[int], error: str) -> None:
        """A rank of group `accuser` could not go through with round `number`."""
        named = self._complaints.setdefault(number, {}).setdefault(accuser, set())
        named |= set(accused) - {accuser}
        self._errors.setdefault(accuser, error)

    def judge(self, joined_at: Mapping[int, float]) -> tuple[int, int, str] | None:
        """Count the rounds that failed since the last call; whom to give up, if anybody.

        `joined_at` are the groups that are there, and since when. Of the guilty one: its number,
        how many could not reach it in the last round, and an error of theirs.
        """
        complaints, self._complaints = self._complaints, {}
        for _, said in sorted(complaints.items()):
            named = Counter(group for accused in said.values() for group in accused)
            counts = {group: named[group] for group in joined_at.keys() & (named or said).keys()}
            if not counts:
                continue
            guilty = max(counts, key=lambda group: (counts[group], joined_at[group], group))
            is_clear = named and list(counts.values()).count(counts[guilty]) == 1
            self._faults[guilty] += 1
            if self._faults[guilty] >= (_CLEAR_FAULTS if is_clear else _FAULTS):
                del self._faults[guilty]
                accuser = next((each for each in said if guilty in said[each]), guilty)
                return guilty, named[guilty], self._errors.get(accuser, "")
        return None


class HostRecord:
    """Failures by host; one with `exclude_after` within an hour is left out for `exclude_s`."""

    def __init__(
        self, exclude_after: int, exclude_s: float, avoided: Iterable[tuple[str, float]] = ()
    ) -> None:
        """`avoided` hosts are left out from the start, each until its time (Unix seconds)."""
        self._exclude_after, self._exclude_s = exclude_after, exclude_s
        self._failures: dict[str, deque[float]] = {}
        self._counted_at: dict[str, float] = {}  # the newest failure
        self._until: dict[str, float] = dict(avoided)

    def fail(self, host: str, now: float) -> HostExcluded | None:
        """Count a failure that the host is to blame for; the exclusion that it leads to, if any.

        Several groups that it takes with it at once are one failure. Those that led to an
        exclusion do not count for the next one.
        """
        if abs(now - self._counted_at.get(host, -math.inf)) <= AT_ONCE_S:
            return None
        self._counted_at[host] = now
        failures = self._failures.setdefault(host, deque())
        failures.append(now)
        while failures[0] < now - _FAILURE_WINDOW_S:
            failures.popleft()
        if len(failures) < self._exclude_after:
            return None
        num_failures = len(failures)
        failures.clear()
        return self.exclude(host, "", now, num_failures)

    def blame(self, failure: Failure, hosts: Iterable[str], now: float) -> list[HostExcluded]:
        """Count a failure against the host to blame, else against those that it may lie with, of
        `hosts` on which it happened; the exclusions that it leads to."""
        guilty = {failure.blamed_host} if failure.blamed_host else set()
        if not guilty and failure.reason.rule.blames_hosts:
            guilty = set(hosts)
        return [found for host in guilty if (found := self.fail(host, now))]

    def forgive(self, hosts: Iterable[str], at: float) -> None:
        """What was counted at `at` is not the hosts' fault; an exclusion that it led to stays."""
        for host in hosts:
            if at in (counted := self._failures.get(host, deque())):
                counted.remove(at)

    def exclude(self, host: str, reason: str, now: float, num_failures: int = 0) -> HostExcluded:
        """Leave a host out; what else than failures is the `reason` goes on after its name."""
        self._until[host] = until = now + self._exclude_s
        return HostExcluded(
            time=now, host=host, num_failures=num_failures, until=until, reason=reason
        )

    def excluded(self, now: float) -> frozenset[str]:
        """Hosts that no worker may be placed on."""
        return frozenset(host for host, until in self._until.items() if now < until)


@dataclass
class _Watched:
    """A rank, whose last message came at `spoke_at`; its silence counts from `heard_at`, which is
    later where none was heard. Its newest heartbeat has brought nothing since `since`.

    One that only connected has no heartbeat yet, and does not hang.
    """

    spoke_at: float
    heard_at: float
    heartbeat: Heartbeat | None = None
    since: float = 0.0


class HeartbeatMonitor:
    """Heartbeats of all ranks: silence, hangs, stragglers. Times are seconds of the clock of `now`.

    While none is heard none is silent: the network here was away, and once it is mended TCP sends
    again on each connection at another time, within as long as it was away. No progress for
    `hang_factor` median steps, and at least `min_hang_s`, is a hang.
    """

    def __init__(self, limits: RecoverySpec) -> None:
        self._limits, self._silence_s = limits, limits.heartbeat_timeout_s
        self._ranks: dict[RankId, _Watched] = {}
        self._slow_windows: dict[RankId, int] = {}
        self._window_ends: float | None = None
        self._looked_at: float | None = None
        self._heard_at = math.inf  # of any rank

    def hear(self, rank: RankId, now: float) -> None:
        away_s = now - self._heard_at
        if away_s > self._silence_s / 2:
            for watched in self._ranks.values():
                watched.heard_at += away_s
        self._heard_at = now
        watched = self._ranks.setdefault(rank, _Watched(now, now))
        watched.spoke_at = watched.heard_at = now

    def busy_ranks(self, ranks: Sequence[RankId]) -> tuple[RankId, ...]:
        """Of the ranks of a group those that do not wait for the others; all if that is unknown."""
        beats = ((rank, self._ranks[rank].heartbeat) for rank in ranks)
        return tuple(rank for rank, beat in beats if beat and not beat.is_waiting) or tuple(ranks)

    def beat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> None:
        self.hear(rank, now)
        watched = self._ranks[rank]
        known, watched.heartbeat = watched.heartbeat, heartbeat
        if known is None or known.progress != heartbeat.progress:
            watched.since = now

    def forget(self, group: int) -> None:
        self._ranks = {rank: each for rank, each in self._ranks.items() if rank.group != group}

    def forget_rank(self, rank: RankId) -> None:
        self._ranks.pop(rank, None)

    def wake(self, now: float) -> float:
        """Correct for a pause of this process itself, and return its seconds."""
        slept_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        if slept_s <= self._silence_s / 2:
            return 0.0
        for watched in self._ranks.values():
            watched.heard_at += slept_s
            watched.since = now
        self._heard_at = now
        return slept_s

    def silent(self, now: float, share: float = 1.0) -> list[RankId]:
        """Ranks without a message for too long, or for a `share` of that."""
        limit_s = share * self._silence_s
        return [rank for rank, each in self._ranks.items() if now - each.heard_at > limit_s]

    def may_be_cut_off(self, rank: RankId, now: float) -> bool:
        """Whether no message came from a rank for half of that, even if none came from anybody."""
        return now - self._ranks[rank].spoke_at > self._silence_s / 2

    def hangs(self, now: float, waiting: Collection[int] = (), share: float = 1.0) -> list[Suspect]:
        """Ranks that stand still although their processes live, at most one per group: its ranks
        that wait for the hung one stand still with it. That one began the fewest steps; within a
        step of all they are alike, as which heartbeat came first says nothing.

        Groups in `waiting` wait for others or for the coordinator; the clocks of their ranks, and
        of those that say that they wait, start when that ends. Outside of training, where a rank
        tells of no steps, it may stand still for longer, and so may the ranks of its group, which
        wait for it. `share` is that of the limits.
        """
        beats: dict[RankId, Heartbeat] = {}
        for rank, watched in self._ranks.items():
            beat = watched.heartbeat
            if rank.group in waiting or (beat and beat.is_waiting):
                watched.since = now
            if beat:
                beats[rank] = beat
        known_s = [beat.step_time_s for beat in beats.values() if beat.step_time_s > 0]
        median_s = statistics.median(known_s) if known_s else 0.0
        limit_s = share * max(self._limits.min_hang_s, self._limits.hang_factor * median_s)
        untimed_s = share * UNTIMED_FACTOR * self._limits.min_hang_s
        idle_s = {rank: now - self._ranks[rank].since for rank in beats}
        excused: set[int] = set()
        for rank, beat in beats.items():
            is_waiting = beat.is_waiting or rank.group in waiting
            if beat.phase != "train" and idle_s[rank] <= untimed_s and not is_waiting:
                excused.add(rank.group)
        found = []
        for group in {rank.group for rank in beats if idle_s[rank] > limit_s} - excused:
            still = [each for each in beats if each.group == group and idle_s[each] > limit_s / 2]
            fewest = min(beats[each].num_steps for each in still)
            alike = tuple(each for each in still if beats[each].num_steps == fewest)
            rank = max(alike, key=lambda each: idle_s[each])
            at = beats[rank].phase, idle_s[rank]
            found.append(Suspect(rank, "hang", *at, self._limits.min_hang_s, alike))
        return found

    def stragglers(self, groups: Collection[int], now: float) -> dict[RankId, Slowness]:
        """The ranks of `groups` that are persistently slow; checked once per window.

        Slow is what takes more than `straggler_factor` times the median; a rank has recovered when
        it is half as far above. Each is told once, and again only after it had recovered.
        """
        if self._window_ends is None:
            self._window_ends = now + _WINDOW_S
        if now < self._window_ends:
            return {}
        self._window_ends = now + _WINDOW_S
        found = slowness_of(
            {
                rank: watched.heartbeat
                for rank, watched in self._ranks.items()
                if rank.group in groups and watched.heartbeat
            }
        )
        slow_factor = self._limits.straggler_factor
        is_fine = (1 + slow_factor) / 2
        counts = {r: self._slow_windows.get(r, 0) for r in found if found[r].slowdown > is_fine}
        slow = [rank for rank in counts if found[rank].slowdown > slow_factor]
        self._slow_windows = counts | {rank: counts[rank] + 1 for rank in slow}
        return {rank: found[rank] for rank in sorted(slow) if counts[rank] + 1 == _SLOW_WINDOWS}
