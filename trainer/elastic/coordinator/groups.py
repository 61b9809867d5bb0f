"""The replica groups as the coordinator knows them: who is there, who is over, who seems lost.

Pure: no clock, no socket; `now` is Unix time in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.coordination.detection import HeartbeatMonitor, RankId, Suspect, SuspicionFilter
from trainer.coordination.messages import (
    Answer,
    Arrive,
    GroupState,
    Heartbeat,
    Hello,
    Rejection,
    RoundMember,
    Vote,
)
from trainer.elastic.coordinator.interface import Departure, GroupStatus, MembershipPolicy, Reply
from trainer.protocol.events import Note

_NUM_DEPARTURES = 100
# Who is half way to being lost may well be so for the same cause.
_DOUBTFUL_SHARE = 0.5


@dataclass
class RankState:
    """One rank: its unanswered `request`, and the `round` that it was told of and must vote on."""

    hello: Hello
    request: Arrive | Vote | None = None
    request_id: int = 0
    round: int | None = None
    vote_due_at: float = math.inf


class Group:
    """One incarnation of a sharding group.

    `copy` is that of a listener: `live` while it copies from `donor` and has missed no committed
    round since, `stale` once it has missed one or holds what must not count. `missed_round` is the
    newest round that was committed without it although it was in it; `num_suspended` counts how
    often it was left out of one, since one with it had failed.
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.group, self.incarnation = hello.group, hello.incarnation
        self.num_ranks = hello.num_ranks
        self.joined_at = now
        self.ranks: dict[int, RankState] = {}
        self.standing: GroupState = "initial"
        self.copy: Literal["absent", "live", "stale"] = "absent"
        self.donor: Group | None = None
        self.copied_bytes = 0  # when its last round opened
        self.leave_cause: str | None = None
        self.missed_round = 0
        self.num_suspended = 0
        self._num_waiting = 0  # ranks that wait for the next round

    def add_rank(self, hello: Hello) -> None:
        """Register a rank, at first or after it reconnected."""
        self.ranks.setdefault(hello.rank, RankState(hello)).hello = hello
        if not self.is_current:
            told = {each.standing for each in self.hellos}
            is_new = self.donor is None and told in ({"initial"}, {"spare"})
            self.standing = told.pop() if is_new else "listening"

    @property
    def is_current(self) -> bool:
        """Whether it holds the newest commit and trains."""
        return self.standing == "current"

    @property
    def is_spare(self) -> bool:
        """Whether it waits until it is wanted."""
        return self.standing == "spare"

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are there."""
        return len(self.ranks) == self.num_ranks

    @property
    def is_ready(self) -> bool:
        """Whether all of its ranks wait for the next round."""
        return self._num_waiting == self.num_ranks

    @property
    def was_in_round(self) -> bool:
        """Whether it was in a round before this coordinator was started."""
        return any(hello.members for hello in self.hellos)

    @property
    def has_exact_copy(self) -> bool:
        """Whether a listener that has missed no round has copied everything."""
        return self.copy == "live" and all(arrival.has_copied for arrival in self.arrivals)

    @property
    def may_overlap(self) -> bool:
        """Whether it could train on during the next round, and is not about to leave."""
        return self.leave_cause is None and all(each.may_overlap for each in self.arrivals)

    @property
    def hellos(self) -> list[Hello]:
        """The newest `Hello` of each rank, in the order of arrival."""
        return [state.hello for state in self.ranks.values()]

    @property
    def arrivals(self) -> list[Arrive]:
        """What the ranks arrived with, by rank."""
        requests = (state.request for _, state in sorted(self.ranks.items()))
        return [request for request in requests if isinstance(request, Arrive)]

    @property
    def origin(self) -> tuple[int, str]:
        """The state that it starts from: number of commits, and name."""
        hello = self.ranks[0].hello
        return hello.ledger.commit, hello.origin

    @property
    def hosts(self) -> list[str]:
        return [state.hello.host for _, state in sorted(self.ranks.items())]

    @property
    def identity(self) -> dict[str, Any]:
        """Its number, incarnation and hosts, as events and messages name them."""
        return {"group": self.group, "incarnation": self.incarnation, "hosts": self.hosts}

    def rank_id(self, rank: int) -> RankId:
        return RankId(self.group, self.incarnation, rank)

    def keep(self, rank: int, request: Arrive | Vote | None, request_id: int) -> None:
        """A rank asks something, or with None was answered."""
        state = self.ranks[rank]
        self._num_waiting += isinstance(request, Arrive) - isinstance(state.request, Arrive)
        state.request, state.request_id = request, request_id

    def answer(self, rank: int, body: Answer) -> Reply:
        """The answer to what a rank asked, which one is told that asked nothing, too (id 0)."""
        reply = Reply(self.rank_id(rank), self.ranks[rank].request_id, body)
        self.keep(rank, None, 0)
        return reply

    def dismiss(self, rejection: Rejection, only_waiting: bool = False) -> list[Reply]:
        """Tell its ranks to end, also those that wait for no answer."""
        told = [rank for rank, state in self.ranks.items() if state.request or not only_waiting]
        return [self.answer(rank, rejection) for rank in told]

    def promote(self) -> None:
        """From here on it holds the newest commit."""
        self.standing, self.copy, self.donor = "current", "absent", None

    def demote(self) -> None:
        """Its state must not count any more: it has to copy everything from another group."""
        self.standing, self.copy = "listening", "stale"

    def status(self) -> GroupStatus:
        processes = tuple((hello.host, hello.pid) for hello in self.hellos)
        return GroupStatus(
            group=self.group,
            incarnation=self.incarnation,
            standing=self.standing,
            leave_cause=self.leave_cause,
            processes=processes,
        )

    def as_member(self) -> RoundMember:
        """Its entry in the next round, by what its ranks arrived with."""
        weight = self.arrivals[0].copy_weight if self.is_current else 0.0
        return RoundMember(weight=weight, standing=self.standing, **self.identity)


def disagreement(group: Group) -> str | None:
    """How the ranks of a ready group contradict each other; None where they agree."""
    seen = {(arrival.leases, arrival.num_rows, arrival.commit) for arrival in group.arrivals}
    if len(seen) > 1:
        return f"its ranks arrived with different leases, rows or commits: {sorted(seen)}"
    return None


def choose_donor(listener: Group, current: Iterable[Group], groups: Iterable[Group]) -> Group:
    """Whom a listener copies from: the same group as before while it lives, else the least used.

    Among equals the highest number, since the lowest leads and so has more to do.
    """
    users = [other.donor for other in groups if other is not listener]

    def rank(each: Group) -> tuple[bool, int, int]:
        return each is not listener.donor, users.count(each), -each.group

    return min(current, key=rank)


def choose_start(groups: Iterable[Group]) -> list[Group]:
    """The groups that begin the run: by the most commits, then by the commonest origin."""
    able = list(groups)
    origins = [group.origin for group in able]
    best = max(able, key=lambda g: (g.origin[0], origins.count(g.origin), -g.group)).origin
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
        self._suspicions = SuspicionFilter(policy.min_hang_s)
        limits = policy.heartbeat_timeout_s, policy.min_hang_s
        self._monitor = HeartbeatMonitor(*limits, policy.hang_factor, policy.straggler_factor)

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
        """Whether a current group has still to arrive for the next round; the last is likeliest."""
        return any(
            each.is_current and not each.is_ready for each in reversed(self._groups.values())
        )

    # --- joining and leaving

    def first_incarnation(self, number: int) -> int:
        """The oldest incarnation of a group that may join."""
        known = self._groups.get(number)
        return max(self._fences.get(number, 0), known.incarnation if known else 0)

    def is_back_or_over(self, number: int, incarnation: int) -> bool:
        """Whether an incarnation is complete, or one that need not be waited for."""
        group = self._groups.get(number)
        is_back = group is not None and group.is_complete and group.incarnation >= incarnation
        return is_back or incarnation < self._fences.get(number, 0)

    def enter(self, hello: Hello, now: float) -> Group:
        """A rank joins, at first or after it reconnected."""
        if hello.group not in self._groups:
            self._groups[hello.group] = Group(hello, now)
            self._groups = dict(sorted(self._groups.items()))
        group = self._groups[hello.group]
        group.add_rank(hello)
        self._monitor.hear(RankId(hello.group, hello.incarnation, hello.rank), now)
        return group

    def fence(self, number: int, incarnation: int) -> None:
        """This incarnation of a group is over."""
        self._fences[number] = max(self._fences.get(number, 0), incarnation + 1)

    def remove(self, group: Group, reason: str, message: str, is_lost: bool) -> None:
        """A group is lost, or has left."""
        del self._groups[group.group]
        self.fence(group.group, group.incarnation)
        self._monitor.forget(group.group)
        departure = Departure(
            group=group.group,
            incarnation=group.incarnation,
            reason=reason,
            message=message,
            is_lost=is_lost,
        )
        self.departures.append(departure)

    # --- heartbeats

    def hear(self, rank: RankId, now: float, heartbeat: Heartbeat | None = None) -> None:
        if heartbeat:
            self._monitor.beat(rank, heartbeat, now)
        else:
            self._monitor.hear(rank, now)

    def forget_rank(self, rank: RankId) -> None:
        self._monitor.forget_rank(rank)

    def wake(self, now: float) -> None:
        """Correct all limits for a pause of this process itself."""
        slept_s = self._monitor.wake(now)
        if slept_s:
            for group in self._groups.values():
                for state in group.ranks.values():
                    state.vote_due_at += slept_s

    def is_doubtful(self, rank: RankId, now: float) -> bool:
        """Whether a rank has been silent for so long that its connection may be broken."""
        return self._monitor.is_silent(rank, now, _DOUBTFUL_SHARE)

    def stragglers(self, now: float) -> dict[RankId, float]:
        """Slowdown of the ranks of current groups that are found to be slow now."""
        ranks = {group.rank_id(rank) for group in self.current for rank in group.ranks}
        return self._monitor.stragglers(ranks, now)

    def judge(self, now: float, only_silence: bool) -> tuple[list[Suspect], list[Note]]:
        """Who is lost for silence, a hang or a missing vote, and what to say about the others.

        These are suspicions, not facts: they never take most of the copies at once.
        """
        suspects = self._suspects(now, only_silence)
        if not self._policy.holds_suspicions:
            return list(suspects.values()), []
        doubtful = self._suspects(now, only_silence, _DOUBTFUL_SHARE) if suspects else {}
        copies = [group.group for group in self.current or self.present]
        judgement = self._suspicions.judge(suspects, doubtful, copies, now)
        notes = []
        if judgement.held:
            held = ", ".join(f"{each} ({suspects[each].reason})" for each in sorted(judgement.held))
            message = (
                f"groups {held} seem lost, and too few of {len(copies)} copies are beyond doubt: "
                "nobody is given up yet. The network of the coordinator's host, or storage that "
                "all wait for, is the likelier cause"
            )
            notes.append(Note(time=now, level="warning", message=message))
        back = ", ".join(map(str, sorted(judgement.cleared & self._groups.keys())))
        if back:
            notes.append(Note(time=now, message=f"groups {back} are fine: they get on again"))
        return [suspects[group] for group in sorted(judgement.lost)], notes

    def _suspects(self, now: float, only_silence: bool, share: float = 1.0) -> dict[int, Suspect]:
        """By group a rank that is silent, hangs, or does not vote, for a `share` of what it may."""
        policy = self._policy
        found: dict[int, Suspect] = {}
        for rank in self._monitor.silent(now, share):
            silence_s = policy.heartbeat_timeout_s
            found[rank.group] = Suspect(rank, "silent", "", silence_s, 2 * silence_s)
        if only_silence:
            return found
        ranks = [
            (group.rank_id(rank), state)
            for group in self._groups.values()
            for rank, state in group.ranks.items()
        ]
        waiting = [rank for rank, state in ranks if state.request]
        for hang in self._monitor.hangs(now, waiting, share):
            suspect = Suspect(hang.rank, "hang", hang.phase, hang.idle_s, policy.min_hang_s)
            found.setdefault(hang.rank.group, suspect)
        late_s = policy.vote_timeout_s
        for rank, state in ranks:
            is_voting = state.round is not None and state.request is None
            if is_voting and state.vote_due_at - (1 - share) * late_s < now:
                found.setdefault(rank.group, Suspect(rank, "hang", "sync", late_s, late_s))
        return found
