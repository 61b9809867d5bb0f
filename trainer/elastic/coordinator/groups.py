"""The replica groups as the coordinator knows them.

`Group` is one incarnation of a group with the newest request of each of its ranks. `GroupRegistry`
holds all groups, fences off incarnations that were lost or left, and collects what the coordinator
is to do next (`Effect`). Pure: no clock, no socket; `now` is Unix time in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.coordination.detection import HeartbeatMonitor, RankId
from trainer.coordination.messages import (
    Answer,
    Arrive,
    GroupState,
    Hello,
    Ledger,
    Rejection,
    RoundMember,
    Vote,
)
from trainer.elastic.coordinator.goodput import RunMetrics
from trainer.elastic.coordinator.interface import (
    CoordinatorStatus,
    Departure,
    Effect,
    GroupStatus,
    MembershipPolicy,
    Reply,
    RunPhase,
)
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.failures import Failure
from trainer.protocol import events

_NUM_DEPARTURES = 100


@dataclass
class RankState:
    """One rank of a group.

    `request` is its unanswered request, with `request_id`; `round` the round that it was given and
    has not voted on.
    """

    hello: Hello
    request: Arrive | Vote | None = None
    request_id: int = 0
    round: int | None = None


class Group:
    """One incarnation of a sharding group.

    `is_pristine` says that its state is still what the seed or a checkpoint made it. For a
    listener, `has_begun` says that it copies and has missed no committed round since, and
    `must_restart` that it has missed one or holds what must not count. `missed_round` is the newest
    round that was committed without it although it was in it, and `num_suspended` counts how often
    it was left out of one, since one with it had failed.
    """

    def __init__(self, hello: Hello, now: float) -> None:
        self.group, self.incarnation = hello.group, hello.incarnation
        self.num_ranks = hello.num_ranks
        self.joined_at = now
        self.ranks: dict[int, RankState] = {}
        self.standing: GroupState = "initial"
        self.is_pristine = True
        self.has_begun = False
        self.must_restart = False
        self.leave_cause: str | None = None
        self.donor: int | None = None
        self.missed_round = 0
        self.num_suspended = 0
        self.num_waiting = 0  # ranks that wait for the next round
        self.is_inspected = False  # what they arrived with
        self.copied_bytes = 0
        """What its ranks had copied when they arrived for its last round."""

    def add_rank(self, hello: Hello) -> None:
        """Register a rank, at first or after it reconnected."""
        self.ranks.setdefault(hello.rank, RankState(hello)).hello = hello
        if not self.is_current:
            standings = {hello.standing for hello in self.hellos}
            self.is_pristine = self.donor is None and standings == {"initial"}
            self.standing = "initial" if self.is_pristine else "listening"

    @property
    def is_current(self) -> bool:
        """Whether it holds the newest commit and trains."""
        return self.standing == "current"

    @property
    def is_complete(self) -> bool:
        """Whether all of its ranks are there."""
        return len(self.ranks) == self.num_ranks

    @property
    def is_ready(self) -> bool:
        """Whether all of its ranks wait for the next round."""
        return self.num_waiting == self.num_ranks

    def keep(self, rank: int, request: Arrive | Vote | None, request_id: int) -> None:
        """A rank asks something, or with None was answered."""
        state = self.ranks[rank]
        self.num_waiting += isinstance(request, Arrive) - isinstance(state.request, Arrive)
        self.is_inspected = False
        state.request, state.request_id = request, request_id

    @property
    def has_exact_copy(self) -> bool:
        """Whether a listener that has missed no round has copied everything."""
        is_copying = self.has_begun and not (self.must_restart or self.is_current)
        return is_copying and all(arrival.has_copied for arrival in self.arrivals)

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

    def rank_id(self, rank: int) -> RankId:
        return RankId(self.group, self.incarnation, rank)

    def demote(self) -> None:
        """Its state must not count any more: it has to copy everything from another group."""
        self.standing, self.is_pristine = "listening", False
        self.has_begun, self.must_restart = False, True

    def status(self) -> GroupStatus:
        return GroupStatus(
            group=self.group,
            incarnation=self.incarnation,
            standing=self.standing,
            leave_cause=self.leave_cause,
            processes=tuple((hello.host, hello.pid) for hello in self.hellos),
        )

    def as_member(self) -> RoundMember:
        """Its entry in the next round, by what its ranks arrived with."""
        weight = self.arrivals[0].copy_weight if self.is_current else 0.0
        return RoundMember(
            group=self.group,
            incarnation=self.incarnation,
            weight=weight,
            standing=self.standing,
            hosts=tuple(self.hosts),
        )


def disagreement(group: Group) -> str | None:
    """How the ranks of a ready group contradict each other; None where they agree."""
    seen = {(arrival.leases, arrival.num_rows, arrival.commit) for arrival in group.arrivals}
    if len(seen) > 1:
        return f"its ranks arrived with different leases, rows or commits: {sorted(seen)}"
    return None


def choose_donor(listener: Group, current: Iterable[Group], groups: Mapping[int, Group]) -> Group:
    """Whom a listener copies from: the same group as before while it lives, else the least used.

    Among equals the highest number, since the lowest leads and so has more to do.
    """
    users = [other.donor for other in groups.values() if other is not listener]

    def rank(each: Group) -> tuple[bool, int, int]:
        return each.group != listener.donor, users.count(each.group), -each.group

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


class GroupRegistry:
    """All groups, fenced-off incarnations, and pending effects."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook) -> None:
        self._policy, self._book = policy, book
        self._phase: RunPhase = "starting"
        self._failure: Failure | None = None
        self._ledger = Ledger()
        self._generation = 0
        self._groups: dict[int, Group] = {}
        self._expected = set(range(policy.num_groups))
        self._fences: dict[int, int] = {}
        self._departures: deque[Departure] = deque(maxlen=_NUM_DEPARTURES)
        self._leader: int | None = None
        self._was_short = False
        self._emitted_members: list[events.GroupMember] | None = None
        self._effects: list[Effect] = []
        self._run_metrics = RunMetrics(policy.rows_per_step)
        self._monitor = HeartbeatMonitor(
            policy.heartbeat_timeout_s,
            policy.min_hang_s,
            policy.hang_factor,
            policy.straggler_factor,
        )

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def _present(self) -> list[Group]:
        return [group for _, group in sorted(self._groups.items())]

    @property
    def _current(self) -> list[Group]:
        return [group for group in self._present if group.is_current]

    @property
    def _is_short(self) -> bool:
        """Whether too few groups hold the state for training to go on."""
        return len(self._current) < self._policy.min_groups

    @property
    def _is_over(self) -> bool:
        return self._phase in ("finished", "failed")

    def _rank(self, rank: RankId) -> RankState | None:
        group = self._group(rank)
        return group.ranks.get(rank.rank) if group else None

    def _group(self, rank: RankId) -> Group | None:
        group = self._groups.get(rank.group)
        return group if group and group.incarnation == rank.incarnation else None

    def _choose_leader(self) -> int | None:
        """The leader: the same as long as it is current, else the lowest number that is."""
        leader = self._groups.get(self._leader) if self._leader is not None else None
        if leader is None or not leader.is_current:
            self._leader = min((group.group for group in self._current), default=None)
        return self._leader

    def status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            phase=self._phase,
            ledger=self._ledger,
            leader=self._choose_leader(),
            groups=tuple(group.status() for group in self._present),
            departures=tuple(self._departures),
            failure=self._failure,
        )

    # --- effects

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _reply(self, to: RankId, request_id: int, body: Answer) -> None:
        self._effects.append(Reply(to, request_id, body))

    def _answer(self, group: Group, rank: int, body: Answer) -> None:
        state = group.ranks[rank]
        self._reply(group.rank_id(rank), state.request_id, body)
        group.keep(rank, None, 0)

    def _emit(self, event: events.Event) -> None:
        self._effects.append(event)

    def _emit_membership(self, now: float) -> None:
        """Emit who is there, where that changed."""
        present = [group for group in self._present if group.is_complete]
        members = [
            events.GroupMember(
                group=group.group,
                incarnation=group.incarnation,
                hosts=group.hosts,
                standing=group.standing,
            )
            for group in present
        ]
        if members == self._emitted_members:
            return
        self._emitted_members = members
        num_copies, num_hosts = copies_alive(present)
        self._emit(
            events.MembershipChanged(
                time=now,
                generation=self._generation,
                commit=self._ledger.commit,
                groups=members,
                copies_alive=num_copies,
                host_copies_alive=num_hosts,
            )
        )

        is_short = self._phase == "running" and self._is_short
        if is_short != self._was_short:
            self._was_short = is_short
            have = f"{num_copies} group(s) hold the state, parallelism.min_groups is"
            least = self._policy.min_groups
            verb, level = ("waits for more", "warning") if is_short else ("goes on", "info")
            message = f"training {verb}: {have} {least}"
            self._emit(events.Note(time=now, level=level, message=message))  # type: ignore[arg-type]

    def _emit_metrics(self, now: float) -> None:
        self._emit(self._run_metrics.as_event(self._ledger, self._generation, now))

    # --- joining and leaving

    def _enter(self, hello: Hello, now: float) -> Group:
        group = Group(hello, now)
        self._groups[hello.group] = group
        self._run_metrics.goodput.start(hello.group, now)
        return group

    def _become_current(self, group: Group, how: str, now: float) -> None:
        group.standing, group.is_pristine = "current", False
        group.has_begun = group.must_restart = False
        group.donor = None
        self._run_metrics.goodput.train(group.group, now)
        self._emit(
            events.GroupJoined(
                time=now,
                group=group.group,
                incarnation=group.incarnation,
                hosts=group.hosts,
                how="start" if how == "start" else "peer_copy",
                copied_bytes=group.copied_bytes,
                duration_s=now - group.joined_at,
            )
        )

    def _lose(self, group: Group, reason: str, message: str, now: float) -> None:
        """A group is lost: its leases return, its ranks are told to end.

        After the end of the run that is how groups go: ranks that still clean up are left alone.
        """
        self._dismiss(group, fenced(message), only_waiting=self._phase == "finished")
        had_work = group.is_current and bool(self._book.held(group.group))
        rows = self._remove(group, reason, message, is_lost=not self._is_over)
        if self._is_over:
            return
        if group.is_current:
            self._run_metrics.record_incident(reason, now, syncs_lost=int(had_work))
        self._run_metrics.goodput.lose(group.group, now)
        self._emit(
            events.GroupLost(
                time=now,
                group=group.group,
                incarnation=group.incarnation,
                reason=reason,
                message=message,
                hosts=group.hosts,
                rows_returned=rows,
            )
        )
        self._emit_membership(now)

    def _release(self, group: Group, cause: str, now: float) -> None:
        """A group leaves as asked; no work is lost."""
        self._remove(group, cause, f"left: {cause}", is_lost=False)
        if cause in ("resize", "drain"):
            self._expected.discard(group.group)
        self._run_metrics.goodput.leave(group.group, now)
        self._emit(
            events.GroupLeft(
                time=now,
                group=group.group,
                incarnation=group.incarnation,
                cause=cause,  # type: ignore[arg-type]
                hosts=group.hosts,
            )
        )

    def _remove(self, group: Group, reason: str, message: str, is_lost: bool) -> int:
        """Remove a group and fence its incarnation; returns the rows that it gave back."""
        del self._groups[group.group]
        self._fences[group.group] = group.incarnation + 1
        self._monitor.forget(group.group)
        self._departures.append(
            Departure(
                group=group.group,
                incarnation=group.incarnation,
                reason=reason,
                message=message,
                is_lost=is_lost,
            )
        )
        return self._book.give_back(group.group)

    def _dismiss(self, group: Group, rejection: Rejection, only_waiting: bool = False) -> None:
        """Tell the ranks of a group to end, also those that wait for no answer."""
        for rank, state in group.ranks.items():
            if state.request:
                self._answer(group, rank, rejection)
            elif not only_waiting:
                self._reply(group.rank_id(rank), 0, rejection)

    def _fail(self, reason: str, message: str, now: float) -> None:
        """The run cannot go on: every rank is told so."""
        self._phase = "failed"
        self._failure = Failure(reason, message)
        self._emit(events.Note(time=now, level="error", message=message))
        for group in self._present:
            self._dismiss(group, Rejection(reason="failed", message=message))


def fenced(message: str) -> Rejection:
    """The answer to an incarnation that is over."""
    return Rejection(reason="fenced", message=message)


def waiting_ranks(groups: Iterable[Group]) -> list[RankId]:
    """The ranks that wait for the coordinator."""
    return [
        group.rank_id(rank)
        for group in groups
        for rank, state in group.ranks.items()
        if state.request is not None
    ]
