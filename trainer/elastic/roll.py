"""The roll of groups behind the membership: who may come, who goes, what is told about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from trainer import events
from trainer.elastic.chronicle import Chronicle
from trainer.elastic.detect import HangPolicy, RankId, StragglerPolicy
from trainer.elastic.effects import Announce, CommitRecord, Effect, Reply
from trainer.elastic.leases import LeaseBook
from trainer.elastic.policy import MembershipPolicy
from trainer.elastic.protocol import Answer, Hello, Ledger, Refusal
from trainer.elastic.roster import Group, RankState, describe
from trainer.elastic.status import (
    CoordinatorStatus,
    Departure,
    GroupStatus,
    RankStatus,
    RunFailure,
    RunPhase,
)
from trainer.elastic.watch import Watch

_NUM_DEPARTURES = 100


class Roll:
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
        self._chronicle = Chronicle(policy.rows_per_step)
        self._watch = Watch(
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
        self._effects.append(Announce(event))

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
        refusal = Refusal(reason="fenced", message=message)
        self._refuse(group, refusal, only_waiting)

    def _refuse(self, group: Group, refusal: Refusal, only_waiting: bool = False) -> None:
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

    def _failed_refusal(self) -> Refusal:
        message = self._failure.message if self._failure else "the run has failed"
        return Refusal(reason="failed", message=message)


def rank_ids(groups: Iterable[Group], waiting: bool) -> list[RankId]:
    """The ranks that wait for the coordinator, or those that do not."""
    return [
        group.rank_id(rank)
        for group in groups
        for rank, state in group.ranks.items()
        if (state.request is not None) == waiting
    ]
