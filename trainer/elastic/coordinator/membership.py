"""What a coordinator that was restarted makes of the words of the groups that were there before.

Nothing about the run is stored: every rank keeps the newest ledger, its group's leases and the
members of its last round. A sync counts if any rank heard so; its round then stands in the newest
ledger. The others hear so when they repeat their vote.

Every public method takes a message (or a wish, or the time) and returns what to do about it. `now`
is Unix time in seconds that never runs backwards.

Why nobody waits for ever: a round opens once every current group waits for it. It ends with the
first refusal, with the loss of any of its groups, or when all ranks agreed, and every rank that
voted is answered then; one that neither votes nor moves is lost after a time. A listener is in the
rounds that it has arrived for and holds up none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from trainer.coordination.detection import RankId
from trainer.coordination.messages import (
    Arrive,
    Heartbeat,
    Hello,
    Lease,
    Ledger,
    Rejection,
    Vote,
    Welcome,
)
from trainer.elastic.coordinator.groups import Group, rank_ids
from trainer.elastic.coordinator.interface import Effect, MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook, LeaseError
from trainer.elastic.coordinator.rounds import SyncRounds
from trainer.protocol import events


@dataclass
class Recovery:
    """Waits until `deadline` for every group that some rank saw in its last round."""

    deadline: float
    expected: set[tuple[int, int]] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    def is_over(self, groups: Mapping[int, Group], now: float) -> bool:
        """Whether everybody who is expected came back, or the time for it has passed."""
        return now >= self.deadline or all(
            group in self.lost or _is_back(groups.get(group), life) for group, life in self.expected
        )


def _is_back(group: Group | None, life: int) -> bool:
    return group is not None and group.is_complete and group.incarnation >= life


def _hellos(groups: Iterable[Group]) -> list[Hello]:
    return [state.hello for group in groups for state in group.ranks.values()]


def newest_ledger(groups: Iterable[Group]) -> Ledger:
    """The ledger with the most commits that a rank of a current group holds."""
    ledgers = [hello.ledger for hello in _hellos(groups) if hello.standing == "current"]
    return max(ledgers, key=_extent, default=Ledger())


def _extent(ledger: Ledger) -> tuple[int, int]:
    return ledger.commit, ledger.rows_trained + ledger.rows_skipped


def was_current(group: Group) -> bool:
    """Whether a group was current before: what one of its ranks heard, all of them will."""
    return any(state.hello.standing == "current" for state in group.ranks.values())


def is_veteran(group: Group) -> bool:
    """Whether a group was in some round before."""
    return any(state.hello.members for state in group.ranks.values())


def contradicts(group: Group, ledger: Ledger) -> bool:
    """Whether a rank of the group holds the newest commit by another round than `ledger`."""
    held = (state.hello.ledger for state in group.ranks.values())
    return any(each.commit == ledger.commit and each.round != ledger.round for each in held)


def leases_of(group: Group) -> tuple[Lease, ...]:
    """The leases of a group, by those of its ranks that heard the newest verdict."""
    hellos = [state.hello for state in group.ranks.values()]
    return max(hellos, key=lambda hello: hello.ledger.commit).leases


# Who trains, and which syncs count: the coordinator's decisions, without a clock or a socket.


class Membership(SyncRounds):
    """The state of one run, rebuilt from the words of the groups where it is lost."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook, store: str = "") -> None:
        """`book` is that of a fresh run; `store` (host:port) is named in every `Welcome`."""
        super().__init__(policy, book)
        self._store = store
        self._recovery: Recovery | None = None
        self._unwelcomed: list[tuple[RankId, int]] = []
        self._has_settled = False
        self._metrics_due: float | None = None

    # --- messages

    def on_hello(self, hello: Hello, request_id: int, now: float) -> list[Effect]:
        """A rank comes, for the first time or again after its connection broke."""
        rank = RankId(hello.group, hello.incarnation, hello.rank)
        refusal = self._unwelcome(hello)
        if refusal:
            self._tell(rank, request_id, refusal)
            return self._flush()
        known = self._groups.get(hello.group)
        if known and known.incarnation < hello.incarnation:
            self._lose(known, "replaced", f"life {hello.incarnation} of the group has begun", now)
        if hello.members and not self._knows_run and not self._recovery:
            self._recovery = Recovery(now + self._policy.recovery_grace_s)
            self._phase = "recovering"
        if self._recovery:
            self._recovery.expected |= set(hello.members)
        self._number = max(self._number, hello.round)
        self._generation = max(self._generation, hello.generation)
        group = self._groups.get(hello.group) or self._enter(hello, now)
        group.greet(hello)
        self._watch.hear(rank, now)
        self._unwelcomed.append((rank, request_id))
        self._advance(now)
        self._welcome_all(veterans_only=self._recovery is not None)
        return self._flush()

    def _unwelcome(self, hello: Hello) -> Rejection | None:
        if self._phase == "failed":
            return self._failed_refusal()
        why = self._fenced_out(hello)
        if not why and hello.members and self._knows_run and hello.group not in self._groups:
            why = f"group {hello.group} came back when the others had gone on without it"
        return Rejection(reason="fenced", message=why) if why else None

    def _welcome_all(self, veterans_only: bool) -> None:
        """Welcome who waits for it; while it is not known who is current, only who does not ask."""
        waiting, self._unwelcomed = self._unwelcomed, []
        welcome = Welcome(
            store=self._store, generation=self._generation, has_current=bool(self._current)
        )
        for rank, request_id in waiting:
            state = self._rank(rank)
            if state is None:
                continue
            if veterans_only and not state.hello.members:
                self._unwelcomed.append((rank, request_id))
            else:
                self._tell(rank, request_id, welcome)

    def on_heartbeat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> list[Effect]:
        """A rank lives."""
        if self._rank(rank):
            self._watch.beat(rank, heartbeat, now)
            if rank.rank == 0:
                self._chronicle.beat(rank.group, heartbeat, now)
        return self._flush()

    def on_arrive(self, rank: RankId, request_id: int, arrive: Arrive, now: float) -> list[Effect]:
        """A rank is ready for the next round."""
        group = self._take(rank, request_id, arrive, now)
        if group is None:
            return self._flush()
        state, opened = group.ranks[rank.rank], self._round
        if opened and state.round == opened.number:
            self._answer(group, rank.rank, self._as_told(opened, group, rank.rank))
            return self._flush()
        state.round = None
        if arrive.report and group.is_current and group.group == self._choose_leader():
            self._report = arrive.report
        self._advance(now)
        return self._flush()

    def on_vote(self, rank: RankId, request_id: int, vote: Vote, now: float) -> list[Effect]:
        """A rank holds the averages of a round, or could not form them."""
        group = self._take(rank, request_id, vote, now)
        if group and not self._recovery:
            self._judge(group, rank.rank, vote, now)
            self._advance(now)
        return self._flush()

    def _take(
        self, rank: RankId, request_id: int, request: Arrive | Vote, now: float
    ) -> Group | None:
        """Keep a request until it is answered; None where the rank has no business asking."""
        group, state = self._group(rank), self._rank(rank)
        if group is None or state is None or self._phase == "failed":
            why = "its life is over: the group was lost, or left"
            refusal = Rejection(reason="fenced", message=why)
            is_failed = self._phase == "failed"
            self._tell(rank, request_id, self._failed_refusal() if is_failed else refusal)
            return None
        state.request, state.request_id = request, request_id
        self._watch.hear(rank, now)
        return group

    def on_disconnect(self, rank: RankId, now: float) -> list[Effect]:
        """The connection of a rank is closed, which ends its group."""
        group, state = self._group(rank), self._rank(rank)
        if group and state:
            message = f"rank {rank.rank} on {state.hello.host} ended: its connection was closed"
            self._lose(group, "connection", message, now)
            self._advance(now)
        return self._flush()

    def on_farewell(self, rank: RankId) -> None:
        """The connection of a rank is closed where that is somebody else's business."""
        self._watch.forget_rank(rank)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it several times per heartbeat time-out."""
        slept_s = self._watch.wake(now)
        self._deadlines = {number: at + slept_s for number, at in self._deadlines.items()}
        for rank in self._watch.silent(now):
            message = f"rank {rank.rank} was silent for {self._policy.heartbeat_timeout_s} s"
            self._lose_rank(rank, "silent", message, now)
        self._end_hangs(now)
        self._find_stragglers(now)
        self._advance(now)
        self._tell_metrics_if_due(now)
        return self._flush()

    # --- wishes

    def expect(self, groups: Collection[int], now: float) -> list[Effect]:
        """The job starts, or starts over, once these groups have arrived."""
        self._expected = set(groups)
        self._advance(now)
        return self._flush()

    def retire(self, group: int, cause: str, now: float) -> list[Effect]:
        """Let a group go at the next commit, for one of the causes of `GroupLeft`.

        The last current group stays until another one is.
        """
        leaving = self._groups.get(group)
        if leaving and not leaving.is_complete:
            self._dismiss(leaving, f"asked to leave: {cause}")
            self._release(leaving, cause, now)
            self._advance(now)
        elif leaving:
            leaving.leave_cause = cause
        return self._flush()

    def drop(
        self, group: int, reason: str, now: float, incarnation: int | None = None
    ) -> list[Effect]:
        """A group is known to be lost; only that life of it, if named."""
        lost = self._groups.get(group)
        if lost and incarnation in (None, lost.incarnation):
            self._lose(lost, reason, f"reported as lost: {reason}", now)
            self._advance(now)
        return self._flush()

    # --- losing groups

    def _lose(self, group: Group, reason: str, message: str, now: float) -> None:
        super()._lose(group, reason, message, now)
        if self._recovery:
            self._recovery.lost.add(group.group)

    def _lose_rank(self, rank: RankId, reason: str, message: str, now: float) -> None:
        group = self._group(rank)
        if group:
            self._lose(group, reason, message, now)

    def _end_hangs(self, now: float) -> None:
        if self._is_over:
            return
        for hang in self._watch.hangs(now, rank_ids(self._present, waiting=True)):
            self._lose_hung(hang.rank, hang.phase, hang.idle_s, now)
        for rank in rank_ids(self._present, waiting=False):
            state = self._rank(rank)
            if state and state.round and self._deadlines.get(state.round, math.inf) < now:
                self._lose_hung(rank, "sync", self._policy.vote_timeout_s, now)

    def _lose_hung(self, rank: RankId, phase: str, idle_s: float, now: float) -> None:
        state = self._rank(rank)
        if state is None:
            return
        host = state.hello.host
        found = events.HangFound(
            time=now, group=rank.group, rank=rank.rank, host=host, phase=phase, idle_s=idle_s
        )
        self._announce(found)
        self._chronicle.goodput.spend(rank.group, "hang", idle_s)
        message = f"rank {rank.rank} on {host} got nothing done for {idle_s:.1f} s in {phase!r}"
        self._lose_rank(rank, "hang", message, now)

    def _find_stragglers(self, now: float) -> None:
        current = self._current
        hosts = {g.rank_id(rank): g.hosts[rank] for g in current for rank in range(g.num_ranks)}
        for found in self._watch.stragglers(hosts, now):
            replace = self._policy.replace_stragglers and len(current) > 1
            if replace:
                self._groups[found.rank.group].leave_cause = "straggler"
            event = events.StragglerFound(
                time=now,
                group=found.rank.group,
                rank=found.rank.rank,
                host=found.host,
                slowdown=found.slowdown,
                action="replace" if replace else "none",
            )
            self._announce(event)

    def _tell_metrics_if_due(self, now: float) -> None:
        if self._metrics_due is None:
            self._metrics_due = now + self._policy.metrics_every_s
        if now >= self._metrics_due and not self._is_over:
            self._metrics_due = now + self._policy.metrics_every_s
            self._tell_metrics(now)

    # --- going on

    @property
    def _knows_run(self) -> bool:
        """Whether this coordinator knows how far the run has come."""
        return self._has_settled or self._has_opened

    def _advance(self, now: float) -> None:
        """Do what has become possible."""
        if self._recovery and self._recovery.is_over(self._groups, now):
            self._settle(now)
        if self._recovery or self._round or self._phase == "failed":
            return
        try:
            self._open_if_ready(now)
        except LeaseError as error:
            self._fail("data_error", str(error), now)

    def _settle(self, now: float) -> None:
        """This coordinator was restarted: take the run over as the groups tell it."""
        self._recovery, self._has_settled = None, True
        for group in self._present:
            if not group.is_complete and is_veteran(group):
                self._lose(group, "connection", "not all of its ranks came back", now)
        trained = [group for group in self._present if was_current(group)]
        self._phase = "running" if trained else "starting"
        if trained:
            self._take_over(trained, now)
        self._welcome_all(veterans_only=False)
        for group in self._present:
            for rank, state in list(group.ranks.items()):
                if isinstance(state.request, Vote) and group is self._groups.get(group.group):
                    self._judge(group, rank, state.request, now)

    def _take_over(self, trained: list[Group], now: float) -> None:
        self._ledger = newest_ledger(self._present)
        self._book.restore(self._ledger)
        self._chronicle.trouble("the coordinator was restarted", now)
        self._chronicle.remember(self._ledger)
        for group in trained:
            group.standing, group.is_pristine = "current", False
            self._chronicle.goodput.train(group.group, now)
            self._book.adopt(leases_of(group), group.group)
        for group in self._current:
            if contradicts(group, self._ledger):
                self._lose(group, "stale", "it holds another sync of the same number", now)
        for group in self._present:
            if not group.is_current and (is_veteran(group) or not group.is_pristine):
                group.demote()
        self._tell_membership(now)
