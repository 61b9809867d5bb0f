"""The groups as the coordinator knows them: who is there, what each rank asked, how each stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.coordination.detection import HangPolicy, HeartbeatMonitor, RankId, StragglerPolicy
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
    CommitRecord,
    CoordinatorStatus,
    Departure,
    Effect,
    EmitEvent,
    GroupStatus,
    MembershipPolicy,
    RankStatus,
    Reply,
    RunFailure,
    RunPhase,
)
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.protocol import events
from trainer.protocol.events import GroupMember, MembershipChanged


@dataclass
class RankState:
    """One rank of a group.

    `request` is what it asked last and waits for, under `request_id`; `round` the round that it
    was given and has not voted on.
    """

    hello: Hello
    request: Arrive | Vote | None = None
    request_id: int = 0
    round: int | None = None


class Group:
    """One life of a sharding group.

    `is_pristine` says that its state is still what the seed or a checkpoint made it. For a
    listener, `has_begun` says that it copies and has missed no committed round since, and
    `must_restart` that it has missed one or holds what must not count.
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
        # What its ranks had copied when they came to its last round.
        self.copied_bytes = 0

    def greet(self, hello: Hello) -> None:
        """Take in the first words of a rank, or its words after it reconnected."""
        known = self.ranks.get(hello.rank)
        if known is None:
            self.ranks[hello.rank] = RankState(hello)
        else:
            known.hello = hello
        if not self.is_current:
            said = {state.hello.standing for state in self.ranks.values()}
            self.is_pristine = self.donor is None and said == {"initial"}
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
        waiting = (isinstance(state.request, Arrive) for state in self.ranks.values())
        return self.is_complete and all(waiting)

    @property
    def arrivals(self) -> list[Arrive]:
        """What the ranks arrived with, by rank."""
        requests = (state.request for _, state in sorted(self.ranks.items()))
        return [request for request in requests if isinstance(request, Arrive)]

    @property
    def origin(self) -> tuple[int, str]:
        """The state that it starts from: commits that it holds, and its name."""
        hello = self.ranks[0].hello
        return hello.ledger.commit, hello.origin

    @property
    def hosts(self) -> list[str]:
        """Host of each rank."""
        return [state.hello.host for _, state in sorted(self.ranks.items())]

    def rank_id(self, rank: int) -> RankId:
        """The full name of one of its ranks."""
        return RankId(self.group, self.incarnation, rank)

    def demote(self) -> None:
        """What it holds must not count any more: it is to copy everything from another group."""
        self.standing, self.is_pristine = "listening", False
        self.has_begun, self.must_restart = False, True

    def miss_round(self) -> None:
        """A round committed without it."""
        self.must_restart |= self.has_begun

    def as_member(self) -> RoundMember:
        """Its place in the next round, by what its ranks arrived with."""
        weight = self.arrivals[0].copy_weight if self.is_current else 0.0
        return RoundMember(
            group=self.group,
            incarnation=self.incarnation,
            weight=weight,
            standing=self.standing,
            hosts=tuple(self.hosts),
        )


def disagreement(group: Group) -> str | None:
    """What the ranks of a group that is ready contradict each other in, if anything."""
    seen = {(arrival.leases, arrival.num_rows, arrival.commit) for arrival in group.arrivals}
    if len(seen) > 1:
        return f"its ranks arrived with different leases, rows or commits: {sorted(seen)}"
    return None


def choose_donor(listener: Group, current: Iterable[Group], groups: Mapping[int, Group]) -> Group:
    """Whom a listener copies from: the same group as before while it lives, else the least used.

    Among equals the highest number, as the lowest leads and so has more to do.
    """
    able = list(current)
    for each in able:
        if each.group == listener.donor:
            return each
    users = [other.donor for other in groups.values() if other is not listener]
    return min(able, key=lambda each: (users.count(each.group), -each.group))


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


def describe(
    groups: Iterable[Group], generation: int, commit: int, now: float
) -> MembershipChanged:
    """Who is there, as an event."""
    present = [group for group in groups if group.is_complete]
    num_copies, num_hosts = copies_alive(present)
    return MembershipChanged(
        time=now,
        generation=generation,
        commit=commit,
        groups=[
            GroupMember(
                group=group.group,
                incarnation=group.incarnation,
                hosts=group.hosts,
                standing=group.standing,
            )
            for group in sorted(present, key=lambda group: group.group)
        ],
        copies_alive=num_copies,
        host_copies_alive=num_hosts,
    )


# The roll of groups behind the membership: who may come, who goes, what is told about it.

_NUM_DEPARTURES = 100


class GroupRegistry:
    """Groups, the fences that keep their earlier lives out, and the effects to come."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook) -> None:
        self._policy, self._book = policy, book
        self._phase: RunPhase = "starting"
        self._failure: RunFailure | None = None
        self._ledger = Ledger()
        self._generation = 0
        self._groups: dict[int, Group] = {}
        self._expected = set(range(policy.num_groups))
        self._fences: dict[int, int] = {}
        self._departures: deque[Departure] = deque(maxlen=_NUM_DEPARTURES)
        self._leader: int | None = None
        self._told: events.MembershipChanged | None = None
        self._effects: list[Effect] = []
        self._chronicle = RunMetrics(policy.rows_per_step)
        self._watch = HeartbeatMonitor(
            policy.heartbeat_timeout_s,
            HangPolicy(min_hang_s=policy.min_hang_s, hang_factor=policy.hang_factor),
            StragglerPolicy(policy.straggler_factor),
            policy.straggler_window_s,
        )

    # --- reading

    @property
    def _present(self) -> list[Group]:
        return [group for _, group in sorted(self._groups.items())]

    @property
    def _current(self) -> list[Group]:
        return [group for group in self._present if group.is_current]

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
        current = [group.group for group in self._current]
        if self._leader not in current:
            self._leader = min(current, default=None)
        return self._leader

    def status(self, now: float) -> CoordinatorStatus:
        """Everything at this moment."""
        return CoordinatorStatus(
            phase=self._phase,
            generation=self._generation,
            ledger=self._ledger,
            leader=self._choose_leader(),
            groups=tuple(self._group_status(group, now) for group in self._present),
            departures=tuple(self._departures),
            failure=self._failure,
            metrics=self._chronicle.metrics(self._ledger, self._generation, now),
        )

    def _group_status(self, group: Group, now: float) -> GroupStatus:
        ranks = (self._rank_status(group, rank, now) for rank in sorted(group.ranks))
        return GroupStatus(
            group=group.group,
            incarnation=group.incarnation,
            standing=group.standing,
            is_complete=group.is_complete,
            leave_cause=group.leave_cause,
            rows_leased=sum(lease.num_rows for lease in self._book.held(group.group)),
            ranks=tuple(ranks),
        )

    def _rank_status(self, group: Group, rank: int, now: float) -> RankStatus:
        hello, rank_id = group.ranks[rank].hello, group.rank_id(rank)
        status = RankStatus(rank=rank, host=hello.host, pid=hello.pid)
        pulse = self._watch.pulse(rank_id)
        if pulse is None:
            return status
        idle_s = self._watch.idle_s(rank_id, now)
        seen = {"phase": pulse.phase, "step": pulse.step, "step_time_s": pulse.step_time_s}
        return status.model_copy(update=seen | {"idle_s": idle_s})

    # --- telling

    def _flush(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _tell(self, to: RankId, request_id: int, body: Answer) -> None:
        self._effects.append(Reply(to, request_id, body))

    def _answer(self, group: Group, rank: int, body: Answer) -> None:
        """Answer what a rank asked last."""
        state = group.ranks[rank]
        self._tell(group.rank_id(rank), state.request_id, body)
        state.request = None

    def _announce(self, event: events.Event) -> None:
        self._effects.append(EmitEvent(event))

    def _record(self, record: CommitRecord) -> None:
        self._effects.append(record)

    def _tell_membership(self, now: float) -> None:
        """Announce who is there, where that changed."""
        event = describe(self._present, self._generation, self._ledger.commit, now)
        if self._told is None or event.groups != self._told.groups:
            self._told = event
            self._announce(event)

    def _tell_metrics(self, now: float) -> None:
        self._announce(self._chronicle.as_event(self._ledger, self._generation, now))

    # --- coming and going

    def _enter(self, hello: Hello, now: float) -> Group:
        group = Group(hello, now)
        self._groups[hello.group] = group
        self._chronicle.goodput.start(hello.group, now)
        return group

    def _fenced_out(self, hello: Hello) -> str | None:
        """Why this life of a group may not come, if so."""
        known = self._groups.get(hello.group)
        oldest = max(self._fences.get(hello.group, 0), known.incarnation if known else 0)
        if hello.incarnation < oldest:
            return (
                f"life {hello.incarnation} of group {hello.group} is over: it was lost or left, "
                f"and from life {oldest} on it may come again"
            )
        return None

    def _become_current(self, group: Group, how: str, now: float) -> None:
        group.standing, group.is_pristine = "current", False
        group.has_begun = group.must_restart = False
        group.donor = None
        self._chronicle.goodput.train(group.group, now)
        self._announce(
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

    def _strike(self, group: Group, reason: str, message: str, now: float) -> None:
        """A group is lost: its leases return, its ranks are told to end."""
        had_work = group.is_current and bool(self._book.held(group.group))
        rows = self._remove(group, reason, message, now, is_lost=not self._is_over)
        if self._is_over:
            return
        if group.is_current:
            self._chronicle.trouble(reason, now, syncs_lost=int(had_work))
        self._chronicle.goodput.lose(group.group, now)
        self._announce(
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
        self._tell_membership(now)

    def _release(self, group: Group, cause: str, now: float) -> None:
        """A group leaves as asked, nothing of it being lost."""
        self._remove(group, cause, f"left: {cause}", now, is_lost=False)
        if cause in ("resize", "drain"):
            self._expected.discard(group.group)
        self._chronicle.goodput.leave(group.group, now)
        self._announce(
            events.GroupLeft.model_validate(
                {
                    "time": now,
                    "group": group.group,
                    "incarnation": group.incarnation,
                    "cause": cause,
                    "hosts": group.hosts,
                }
            )
        )

    def _remove(self, group: Group, reason: str, message: str, now: float, is_lost: bool) -> int:
        """Take a group off the roll for good; the rows that it gave back."""
        del self._groups[group.group]
        self._fences[group.group] = group.incarnation + 1
        self._watch.forget(group.group)
        departure = Departure(
            group=group.group,
            incarnation=group.incarnation,
            reason=reason,
            message=message,
            is_lost=is_lost,
            at=now,
        )
        self._departures.append(departure)
        return self._book.give_back(group.group)

    def _dismiss(self, group: Group, message: str, only_waiting: bool = False) -> None:
        """Tell the ranks of a group to end, also those that wait for no answer."""
        refusal = Rejection(reason="fenced", message=message)
        self._refuse(group, refusal, only_waiting)

    def _refuse(self, group: Group, refusal: Rejection, only_waiting: bool = False) -> None:
        for rank, state in group.ranks.items():
            if state.request:
                self._answer(group, rank, refusal)
            elif not only_waiting:
                self._tell(group.rank_id(rank), 0, refusal)

    def _fail(self, reason: str, message: str, now: float) -> None:
        """The run cannot go on: every rank is told so."""
        self._phase = "failed"
        self._failure = RunFailure(reason=reason, message=message)
        self._announce(events.Note(time=now, level="error", message=message))
        for group in self._present:
            self._refuse(group, self._failed_refusal())

    def _failed_refusal(self) -> Rejection:
        message = self._failure.message if self._failure else "the run has failed"
        return Rejection(reason="failed", message=message)


def rank_ids(groups: Iterable[Group], waiting: bool) -> list[RankId]:
    """The ranks that wait for the coordinator, or those that do not."""
    return [
        group.rank_id(rank)
        for group in groups
        for rank, state in group.ranks.items()
        if (state.request is not None) == waiting
    ]
