"""The replica groups as the coordinator knows them: who is there, who is over, who seems lost.

Pure: no clock, no socket; `now` is Unix time in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

from trainer.coordination.detection import (
    HeartbeatMonitor,
    RankId,
    Slowness,
    Suspect,
    SuspicionFilter,
)
from trainer.coordination.messages import (
    Answer,
    Arrive,
    Hello,
    RankProcess,
    Rejection,
    Share,
    Vote,
)
from trainer.elastic.coordinator.interface import Departure, GroupStatus, MembershipPolicy, Reply
from trainer.protocol.events import GroupState, LeaveCause, Note

_NUM_DEPARTURES = 100
_NUM_SPEEDS = 5
_MIN_SPEEDS = 3  # the first leases take longer than the others
# Who is half way to being lost may well be so for the same cause.
_DOUBTFUL_SHARE = 0.5


class Group:
    """One incarnation of a sharding group.

    It has an unanswered `request` at most, and was told of a `round` on which it must vote by
    `vote_due_at`. `copy` is that of a listener: `live` while it copies from `donor` and has missed
    no committed round since, `stale` once it has missed one or holds what must not count.
    `num_missed` counts the rounds in a row that failed with it or were committed without it.
    `speeds` are the newest, in rows per second. `share` is what it measures of a validation.
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.group, self.incarnation = hello.group, hello.incarnation
        self.joined_at = now
        self.hello = hello
        self.ranks: dict[int, RankProcess] = {}
        self.request: Arrive | Vote | None = None
        self.round: int | None = None
        self.vote_due_at = math.inf
        self.has_begun = bool(hello.members)  # has come to a round
        self.standing: GroupState = "initial"
        self.copy: Literal["absent", "live", "stale"] = "absent"
        self.donor: Group | None = None
        self.copied_bytes = 0  # when its last round opened
        self.leave_cause: LeaveCause | None = None
        self.num_missed = 0
        self.speeds: deque[float] = deque(maxlen=_NUM_SPEEDS)
        self.share: Share = (0, 1)
        self._request_id = 0
        self._speakers: set[int] = set()  # the first rank of each of its connections

    def add(self, hello: Hello) -> None:
        """Register the ranks of a connection, at first or after it was made again."""
        self.hello = hello
        self.ranks |= {process.rank: process for process in hello.ranks}
        self.ranks = dict(sorted(self.ranks.items()))
        self._speakers.add(hello.ranks[0].rank)
        if not self.is_current:
            is_new = self.donor is None and hello.standing in ("initial", "spare")
            self.standing = hello.standing if is_new else "listening"

    @property
    def is_current(self) -> bool:
        """Whether it holds the newest commit and trains."""
        return self.standing == "current"

    @property
    def is_spare(self) -> bool:
        """Whether it waits until it is wanted."""
        return self.standing == "spare"

    @property
    def is_ready(self) -> bool:
        """Whether it waits for the next round."""
        return isinstance(self.request, Arrive)

    @property
    def was_in_round(self) -> bool:
        """Whether it was in a round before this coordinator was started."""
        return bool(self.hello.members)

    @property
    def speed(self) -> float:
        """Rows per second as of late, 0 where too few leases were timed."""
        return statistics.median(self.speeds) if len(self.speeds) >= _MIN_SPEEDS else 0.0

    @property
    def may_overlap(self) -> bool:
        """Whether it could train on during the next round, and is not about to leave."""
        return self.leave_cause is None and self.arrival.may_overlap

    @property
    def arrival(self) -> Arrive:
        """What it arrived with, which is ready."""
        assert isinstance(self.request, Arrive)
        return self.request

    @property
    def origin(self) -> tuple[int, str, str]:
        """The state that it starts from: number of commits, name, and where its rows are."""
        return self.hello.ledger.commit, self.hello.origin, self.hello.plan

    @property
    def hosts(self) -> list[str]:
        return [process.host for process in self.ranks.values()]

    @property
    def donor_group(self) -> int | None:
        """The number of the group that it copies from."""
        return self.donor.group if self.donor else None

    @property
    def donors(self) -> tuple[str, ...]:
        """Where its ranks serve their shards."""
        return tuple(process.donor for process in self.ranks.values())

    @property
    def identity(self) -> dict[str, Any]:
        """Its number, incarnation and hosts, as events and messages name them."""
        return {"group": self.group, "incarnation": self.incarnation, "hosts": self.hosts}

    def keep(self, request: Arrive | Vote | None, request_id: int) -> None:
        """It asks something, or with None was answered."""
        self.request, self._request_id = request, request_id
        self.has_begun |= request is not None

    def answer(self, body: Answer) -> Reply:
        """The answer to what it asked; it is told also where it asked nothing (id 0)."""
        (reply,) = self._tell(body, [min(self._speakers)])
        return reply

    def dismiss(self, rejection: Rejection, only_waiting: bool = False) -> list[Reply]:
        """Tell it to end, also if it waits for no answer."""
        return self._tell(rejection, self._speakers) if self.request or not only_waiting else []

    def _tell(self, body: Answer, speakers: Iterable[int]) -> list[Reply]:
        told = [
            Reply(RankId(self.group, self.incarnation, rank), self._request_id, body)
            for rank in speakers
        ]
        self.keep(None, 0)
        return told

    def make_current(self) -> None:
        """From here on it holds the newest commit."""
        self.standing, self.copy, self.donor = "current", "absent", None

    def demote(self) -> None:
        """Its state must not count any more: it has to copy everything from another group."""
        self.standing, self.copy = "listening", "stale"

    def status(self) -> GroupStatus:
        return GroupStatus(
            group=self.group,
            incarnation=self.incarnation,
            standing=self.standing,
            processes=tuple((process.host, process.pid) for process in self.ranks.values()),
        )


def choose_donor(listener: Group, current: Iterable[Group], groups: Iterable[Group]) -> Group:
    """Whom a listener copies from: the same group as before while it lives, else the least used.

    Among equals the highest number, since the lowest leads and so has more to do.
    """
    users = [other.donor for other in groups]

    def rank(each: Group) -> tuple[bool, int, int]:
        return each is not listener.donor, users.count(each), -each.group

    return min(current, key=rank)


def choose_start(groups: Iterable[Group]) -> list[Group]:
    """The groups that begin the run: by the most commits, then by the commonest origin."""
    able = list(groups)
    origins = [group.origin for group in able]
    best = max(able, key=lambda group: (group.origin[0], origins.count(group.origin))).origin
    return [group for group in able if group.origin == best]


def copies_alive(groups: Iterable[Group]) -> tuple[int, int]:
    """Copies of the shard with the fewest, and the hosts that the copies of a shard are on."""
    hosts_by_group = [group.hosts for group in groups if group.is_current]
    num_hosts = [len(set(hosts)) for hosts in zip(*hosts_by_group, strict=False)]
    return len(hosts_by_group), min(num_hosts, default=0)


def fenced(message: str) -> Rejection:
    """The answer to an incarnation that is over."""
    return Rejection(reason="fenced", message=message)


class GroupRegistry:
    """The groups that are there, by number, the incarnations that are over, and the heartbeats."""

    def __init__(self, policy: MembershipPolicy) -> None:
        self._policy = policy
        self._groups: dict[int, Group] = {}
        self._fences: dict[int, int] = {}  # the oldest incarnation that may join
        self.departures: deque[Departure] = deque(maxlen=_NUM_DEPARTURES)
        self._leader: int | None = None
        self._awaited: list[Group] = []
        self._suspicions = SuspicionFilter(policy.recovery.min_hang_s)
        self.monitor = HeartbeatMonitor(policy.recovery)

    @property
    def present(self) -> list[Group]:
        return list(self._groups.values())

    @property
    def current(self) -> list[Group]:
        return [group for group in self._groups.values() if group.is_current]

    def get(self, number: int) -> Group | None:
        return self._groups.get(number)

    def find(self, rank: RankId) -> Group | None:
        """The group of a rank that has joined and whose incarnation is not over."""
        group = self._groups.get(rank.group)
        known = group and group.incarnation == rank.incarnation and rank.rank in group.ranks
        return group if known else None

    def choose_leader(self) -> int | None:
        """The leader: the same as long as it is current, else the lowest number that is."""
        leader = self._groups.get(self._leader) if self._leader is not None else None
        if leader is None or not leader.is_current:
            self._leader = min((group.group for group in self.current), default=None)
        return self._leader

    def is_waited_for(self) -> bool:
        """Whether a current group has still to arrive for the next round.

        All are gone through only when the last of those found so before has arrived.
        """

        def is_awaited(group: Group) -> bool:
            is_there = self._groups.get(group.group) is group
            return is_there and group.is_current and not group.is_ready

        while self._awaited and not is_awaited(self._awaited[-1]):
            self._awaited.pop()
        if not self._awaited:
            self._awaited = [group for group in self._groups.values() if is_awaited(group)]
        return bool(self._awaited)

    # --- joining and leaving

    def first_incarnation(self, number: int) -> int:
        """The oldest incarnation of a group that may join."""
        known = self._groups.get(number)
        return max(self._fences.get(number, 0), known.incarnation if known else 0)

    def is_back_or_over(self, number: int, incarnation: int) -> bool:
        """Whether an incarnation is there, or one that need not be waited for."""
        group = self._groups.get(number)
        is_back = group is not None and group.incarnation >= incarnation
        return is_back or incarnation < self._fences.get(number, 0)

    def enter(self, hello: Hello, now: float) -> Group:
        """A group joins, at first or after it reconnected."""
        if hello.group not in self._groups:
            self._groups[hello.group] = Group(hello, now)
            self._groups = dict(sorted(self._groups.items()))
        group = self._groups[hello.group]
        group.add(hello)
        for process in hello.ranks:
            self.monitor.hear(RankId(hello.group, hello.incarnation, process.rank), now)
        return group

    def fence(self, number: int, incarnation: int) -> None:
        """This incarnation of a group is over."""
        self._fences[number] = max(self._fences.get(number, 0), incarnation + 1)

    def remove(
        self, group: Group, reason: str, message: str, is_lost: bool, host: str = ""
    ) -> None:
        del self._groups[group.group]
        self.fence(group.group, group.incarnation)
        self.monitor.forget(group.group)
        departure = Departure(
            group=group.group,
            incarnation=group.incarnation,
            reason=reason,
            message=message,
            is_lost=is_lost,
            host=host,
        )
        self.departures.append(departure)

    # --- heartbeats

    def wake(self, now: float) -> None:
        """Correct all limits for a pause of this process itself."""
        slept_s = self.monitor.wake(now)
        if slept_s:
            for group in self._groups.values():
                group.vote_due_at += slept_s

    def stragglers(self, now: float) -> dict[RankId, Slowness]:
        """The ranks of groups that train which are found to be slow now.

        Where all workers are one group, which syncs with no other, that trains.
        """
        training = self.current or self.present
        return self.monitor.stragglers({group.group for group in training}, now)

    def judge(self, now: float, only_silence: bool) -> tuple[list[Suspect], list[Note]]:
        """Who is lost for silence, a hang or a missing vote, and what to say about the others.

        These are suspicions, not facts: they never take most of the copies at once.
        """
        suspects = self._suspects(now, only_silence)
        if not self._policy.holds_suspicions:
            return list(suspects.values()), []
        doubtful = self._suspects(now, only_silence, _DOUBTFUL_SHARE) if suspects else {}
        copies = [group.group for group in self.current or self.present]
        lost, held, cleared = self._suspicions.judge(suspects, doubtful, copies, now)
        notes = []
        if held:
            named = ", ".join(f"{each} ({suspects[each].reason})" for each in sorted(held))
            message = (
                f"groups {named} seem lost, and too few of {len(copies)} copies are beyond doubt: "
                "nobody is given up yet. The network of the coordinator's host, or storage that "
                "all wait for, is the likelier cause"
            )
            notes.append(Note(time=now, level="warning", message=message))
        back = ", ".join(map(str, sorted(cleared & self._groups.keys())))
        if back:
            notes.append(Note(time=now, message=f"groups {back} are fine: they get on again"))
        return [suspects[group] for group in sorted(lost)], notes

    def _suspects(self, now: float, only_silence: bool, share: float = 1.0) -> dict[int, Suspect]:
        """By group a rank that is silent, hangs, or does not vote, for a `share` of what it may."""
        policy = self._policy
        found: dict[int, Suspect] = {}
        for rank in self.monitor.silent(now, share):
            silence_s = policy.recovery.heartbeat_timeout_s
            found[rank.group] = Suspect(rank, "silent", "", silence_s, 2 * silence_s, (rank,))
        if only_silence:
            return found
        waiting = {group.group for group in self._groups.values() if group.request}
        for hang in self.monitor.hangs(now, waiting, share):
            found.setdefault(hang.rank.group, hang)
        late_s = policy.vote_timeout_s
        for group in self._groups.values():
            is_voting = group.round is not None and group.request is None
            if is_voting and group.vote_due_at - (1 - share) * late_s < now:
                ranks = [RankId(group.group, group.incarnation, rank) for rank in group.ranks]
                busy = self.monitor.busy_ranks(ranks)
                late = Suspect(busy[0], "hang", "sync", late_s, late_s, busy)
                found.setdefault(group.group, late)
        return found
