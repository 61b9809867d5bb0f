"""The coordinator's state machine: who trains, and which syncs count.

`Membership` takes a message, a request of the driver or the time, and returns the effects. `now` is
Unix time in seconds that never runs backwards.

Nothing about the run is stored: every rank keeps the newest ledger, its group's leases and the
members of its last round, and sends them in its `Hello`. A coordinator that was restarted waits for
the groups of the last round (`Recovery`) and takes over the newest ledger among them. A sync counts
if any rank received its result; the others receive it when they repeat their vote.

Nobody waits for ever: a round opens once every current group is ready for it. It ends with the
first refusal, with the loss of any of its groups, or when all ranks agreed, and every rank that
voted is answered then; one that neither votes nor moves is lost after a time. A listener is in the
rounds that it has arrived for, delays none for long, and ends none: without its vote a round
commits all the same, and where one with it has failed the next is without it.

Closed connections and what the driver knows (`drop`) are facts, which count at once. Silence and
hangs are suspicions, which never take most of the copies at once (`SuspicionFilter`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.coordination.client import remembering
from trainer.coordination.detection import RankId, Suspect, SuspicionFilter
from trainer.coordination.messages import (
    Arrive,
    Heartbeat,
    Hello,
    Rejection,
    Round,
    RoundMember,
    Vote,
    Welcome,
)
from trainer.elastic.coordinator.groups import Group, fenced, waiting_ranks
from trainer.elastic.coordinator.interface import Effect, MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook, LeaseError
from trainer.elastic.coordinator.rounds import SyncRounds
from trainer.protocol import events

_METRICS_EVERY_S = 10.0
# Who is half way to being lost may well be so for the same cause.
_DOUBTFUL_SHARE = 0.5


@dataclass
class Recovery:
    """Waits until `deadline` for the (group, incarnation) pairs of the last rounds."""

    deadline: float
    expected: set[tuple[int, int]] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    def is_over(self, groups: Mapping[int, Group], now: float) -> bool:
        """Whether all expected groups came back, or the time for it has passed."""

        def is_back(number: int, incarnation: int) -> bool:
            group = groups.get(number)
            return group is not None and group.is_complete and group.incarnation >= incarnation

        return now >= self.deadline or all(
            group in self.lost or is_back(group, incarnation)
            for group, incarnation in self.expected
        )


class Membership(SyncRounds):
    """The state of one run, rebuilt from what the groups say where it is lost."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook, store: str = "") -> None:
        """`book` is that of a fresh run; `store` (host:port) is named in every `Welcome`."""
        super().__init__(policy, book)
        self._store = store
        self._recovery: Recovery | None = None
        self._unwelcomed: list[tuple[RankId, int]] = []
        self._has_settled = False
        self._late: Group | None = None
        self._metrics_due: float | None = None
        self._suspicions = SuspicionFilter(policy.min_hang_s)

    # --- messages

    def on_hello(self, hello: Hello, request_id: int, now: float) -> list[Effect]:
        """A rank joins, for the first time or again after its connection broke."""
        rank = RankId(hello.group, hello.incarnation, hello.rank)
        rejection = self._rejection_of(hello)
        if rejection:
            self._reply(rank, request_id, rejection)
            return self._take_effects()
        known = self._groups.get(hello.group)
        is_newer = known is not None and known.incarnation < hello.incarnation
        if known and is_newer:
            message = f"incarnation {hello.incarnation} of the group has begun"
            self._lose(known, "replaced", message, now)
        if hello.members and not self._knows_run and not self._recovery:
            self._recovery = Recovery(now + self._policy.recovery_grace_s)
            self._phase = "recovering"
        if self._recovery:
            self._recovery.expected |= set(hello.members)
        self._number = max(self._number, hello.round)
        self._generation = max(self._generation, hello.generation)
        group = self._groups.get(hello.group) or self._enter(hello, now)
        group.add_rank(hello)
        self._monitor.hear(rank, now)
        self._unwelcomed.append((rank, request_id))
        if is_newer or self._recovery:  # otherwise a hello makes no round possible
            self._advance(now)
        self._welcome_all(veterans_only=self._recovery is not None)
        return self._take_effects()

    def _rejection_of(self, hello: Hello) -> Rejection | None:
        """Why this rank may not join; None if it may."""
        if self._failure:
            return Rejection(reason="failed", message=self._failure.message)
        number = hello.group
        known = self._groups.get(number)
        oldest = max(self._fences.get(number, 0), known.incarnation if known else 0)
        if hello.incarnation < oldest:
            return fenced(
                f"incarnation {hello.incarnation} of group {number} is over: it was lost or left, "
                f"and from incarnation {oldest} on it may join again"
            )
        if hello.members and self._knows_run and known is None:
            return fenced(f"group {number} came back when the others had gone on without it")
        return None

    def _welcome_all(self, veterans_only: bool) -> None:
        """Welcome the ranks that wait for it.

        While a recovery has not shown who is current, only those that were in a round before: the
        others ask by it whether there is somebody to copy from.
        """
        waiting, self._unwelcomed = self._unwelcomed, []
        welcome = Welcome(store=self._store, has_current=bool(self._current))
        for rank, request_id in waiting:
            state = self._rank(rank)
            if state is None:
                continue
            if veterans_only and not state.hello.members:
                self._unwelcomed.append((rank, request_id))
            else:
                self._reply(rank, request_id, welcome)

    def on_heartbeat(self, rank: RankId, heartbeat: Heartbeat, now: float) -> list[Effect]:
        if self._rank(rank):
            self._monitor.beat(rank, heartbeat, now)
            if rank.rank == 0:
                self._run_metrics.record_heartbeat(rank.group, heartbeat, now)
        return self._take_effects()

    def on_arrive(self, rank: RankId, request_id: int, arrive: Arrive, now: float) -> list[Effect]:
        """A rank is ready for the next round."""
        group = self._accept(rank, request_id, arrive, now)
        if group is None:
            return self._take_effects()
        state, opened = group.ranks[rank.rank], self._round
        if opened and state.round == opened.number:
            self._answer(group, rank.rank, self._round_for(opened, group, rank.rank))
            return self._take_effects()
        state.round = None
        if not self._recovery and self._tell_missed_round(group, rank.rank):
            return self._take_effects()
        if arrive.report and group.is_current and group.group == self._choose_leader():
            self._report = arrive.report
        if group.is_ready and (self._is_over or not self._is_held_up()):
            self._advance(now)
        return self._take_effects()

    def _is_held_up(self) -> bool:
        """Whether a current group has still to arrive; looks for one only when the last one has."""
        late = self._late
        is_late = late and self._groups.get(late.group) is late and late.is_current
        if not is_late or (late and late.is_ready):
            newest_first = reversed(self._groups.values())
            unready = (each for each in newest_first if each.is_current and not each.is_ready)
            self._late = next(unready, None)
        return self._late is not None

    def on_vote(self, rank: RankId, request_id: int, vote: Vote, now: float) -> list[Effect]:
        """A rank holds the averages of a round, or could not form them."""
        group = self._accept(rank, request_id, vote, now)
        if group and not self._recovery:
            self._count_vote(group, rank.rank, vote, now)
            self._advance(now)
        return self._take_effects()

    def _accept(
        self, rank: RankId, request_id: int, request: Arrive | Vote, now: float
    ) -> Group | None:
        """Keep a request until it is answered; reject that of an incarnation which is over."""
        group, state = self._group(rank), self._rank(rank)
        if self._failure:
            rejection = Rejection(reason="failed", message=self._failure.message)
            self._reply(rank, request_id, rejection)
            return None
        if group is None or state is None:
            message = "this incarnation of the group is over: it was lost, or left"
            self._reply(rank, request_id, fenced(message))
            return None
        group.keep(rank.rank, request, request_id)
        self._monitor.hear(rank, now)
        return group

    def on_disconnect(self, rank: RankId, now: float, is_broken: bool = False) -> list[Effect]:
        """The connection of a rank is closed, which ends its group.

        One that broke after silence says nothing: that is the network, and the rank may come back.
        """
        group, state = self._group(rank), self._rank(rank)
        if is_broken and self._monitor.is_silent(rank, now, _DOUBTFUL_SHARE):
            return []
        if group and state:
            message = f"rank {rank.rank} on {state.hello.host} ended: its connection was closed"
            self._lose(group, "connection", message, now)
            self._advance(now)
        return self._take_effects()

    def forget_rank(self, rank: RankId) -> None:
        """Stop monitoring a rank whose connection is closed, without losing its group."""
        self._monitor.forget_rank(rank)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it several times per heartbeat time-out."""
        slept_s = self._monitor.wake(now)
        if slept_s:
            self._deadlines = {
                number: {shard: at + slept_s for shard, at in deadlines.items()}
                for number, deadlines in self._deadlines.items()
            }
        self._judge_suspects(now)
        self._end_if_agreed(now)
        self._find_stragglers(now)
        self._advance(now)
        if self._metrics_due is None:
            self._metrics_due = now + _METRICS_EVERY_S
        if now >= self._metrics_due and not self._is_over:
            self._metrics_due = now + _METRICS_EVERY_S
            self._emit_metrics(now)
        return self._take_effects()

    # --- requests of the driver

    def expect(self, groups: Collection[int], now: float) -> list[Effect]:
        """The job starts, or starts over, once these groups have arrived."""
        self._expected = set(groups)
        self._advance(now)
        return self._take_effects()

    def retire(self, group: int, cause: str, now: float) -> list[Effect]:
        """Let a group go at the next commit, for one of the causes of `GroupLeft`.

        The last current group stays until another one is.
        """
        leaving = self._groups.get(group)
        if leaving and not leaving.is_complete:
            self._dismiss(leaving, fenced(f"asked to leave: {cause}"))
            self._release(leaving, cause, now)
            self._advance(now)
        elif leaving:
            leaving.leave_cause = cause
        return self._take_effects()

    def drop(self, group: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        """The driver knows that this incarnation of a group is lost."""
        lost = self._groups.get(group)
        if lost and lost.incarnation == incarnation:
            self._lose(lost, reason, f"reported as lost: {reason}", now)
        elif lost is None:
            # A restarted coordinator need not wait for it, and nobody shall come back as it.
            self._fences[group] = max(self._fences.get(group, 0), incarnation + 1)
            if self._recovery:
                self._recovery.lost.add(group)
        self._advance(now)
        return self._take_effects()

    # --- losing groups

    def _lose(self, group: Group, reason: str, message: str, now: float) -> None:
        super()._lose(group, reason, message, now)
        if self._recovery:
            self._recovery.lost.add(group.group)

    def _judge_suspects(self, now: float) -> None:
        """Lose the groups that are silent or hang, but not most of the copies at once."""
        suspects = self._suspects(now)
        if not self._policy.holds_suspicions:
            for suspect in suspects.values():
                self._lose_suspect(suspect, now)
            return
        doubtful = self._suspects(now, _DOUBTFUL_SHARE) if suspects else {}
        copies = [group.group for group in self._current or self._present]
        judgement = self._suspicions.judge(suspects, doubtful, copies, now)
        if judgement.held:
            self._note_held([suspects[group] for group in sorted(judgement.held)], len(copies), now)
        back = sorted(judgement.cleared & self._groups.keys())
        if back:
            message = f"groups {', '.join(map(str, back))} are fine: they get on again"
            self._emit(events.Note(time=now, message=message))
        for group in sorted(judgement.lost):
            self._lose_suspect(suspects[group], now)

    def _suspects(self, now: float, share: float = 1.0) -> dict[int, Suspect]:
        """By group a rank that is silent, hangs, or does not vote, for a `share` of what it may."""
        policy = self._policy
        found: dict[int, Suspect] = {}
        for rank in self._monitor.silent(now, share):
            silence_s = policy.heartbeat_timeout_s
            found[rank.group] = Suspect(rank, "silent", "", silence_s, 2 * silence_s)
        if self._is_over:
            return found
        for hang in self._monitor.hangs(now, waiting_ranks(self._present), share):
            suspect = Suspect(hang.rank, "hang", hang.phase, hang.idle_s, policy.min_hang_s)
            found.setdefault(hang.rank.group, suspect)
        late_s = policy.vote_timeout_s
        for group in self._present:
            for shard, state in group.ranks.items():
                if state.round is None or state.request is not None:
                    continue
                deadline = self._deadlines.get(state.round, {}).get(shard, math.inf)
                if deadline - (1 - share) * late_s < now:
                    suspect = Suspect(group.rank_id(shard), "hang", "sync", late_s, late_s)
                    found.setdefault(group.group, suspect)
        return found

    def _note_held(self, held: Sequence[Suspect], num_copies: int, now: float) -> None:
        groups = ", ".join(f"{each.rank.group} ({each.reason})" for each in held)
        message = (
            f"groups {groups} seem lost, and too few of {num_copies} copies are beyond doubt: "
            "nobody is given up yet. The network of the coordinator's host, or storage that all "
            "wait for, is the likelier cause"
        )
        self._emit(events.Note(time=now, level="warning", message=message))

    def _lose_suspect(self, suspect: Suspect, now: float) -> None:
        rank, phase, idle_s = suspect.rank, suspect.phase, suspect.idle_s
        group, state = self._group(rank), self._rank(rank)
        if group is None or state is None:
            return
        if suspect.reason == "silent":
            message = f"rank {rank.rank} was silent for {idle_s} s"
            self._lose(group, "silent", message, now)
            return
        host = state.hello.host
        self._emit(
            events.HangFound(
                time=now, group=rank.group, rank=rank.rank, host=host, phase=phase, idle_s=idle_s
            )
        )
        self._run_metrics.goodput.spend(rank.group, "hang", idle_s)
        message = f"rank {rank.rank} on {host} got nothing done for {idle_s:.1f} s in {phase!r}"
        self._lose(group, "hang", message, now)

    def _find_stragglers(self, now: float) -> None:
        current = self._current
        ranks = {group.rank_id(rank) for group in current for rank in group.ranks}
        for rank, slowdown in self._monitor.stragglers(ranks, now).items():
            replace = self._policy.replace_stragglers and len(current) > 1
            if replace:
                self._groups[rank.group].leave_cause = "straggler"
            self._emit(
                events.StragglerFound(
                    time=now,
                    group=rank.group,
                    rank=rank.rank,
                    host=self._groups[rank.group].hosts[rank.rank],
                    slowdown=slowdown,
                    action="replace" if replace else "none",
                )
            )

    # --- progress

    @property
    def _knows_run(self) -> bool:
        """Whether this coordinator knows how far the run has come."""
        return self._has_settled or self._has_opened

    def _advance(self, now: float) -> None:
        """End the recovery and open the next round, where that has become possible."""
        if self._recovery and self._recovery.is_over(self._groups, now):
            self._settle(now)
        if self._recovery or self._round or self._failure:
            return
        try:
            self._open_if_ready(now)
        except LeaseError as error:
            self._fail("data_error", str(error), now)

    def _settle(self, now: float) -> None:
        """The recovery is over: take the run over as the groups describe it."""
        self._recovery, self._has_settled = None, True
        for group in self._present:
            if not group.is_complete and _was_in_round(group):
                self._lose(group, "connection", "not all of its ranks came back", now)
        # What one of its ranks received, all of them will.
        trained = [
            group
            for group in self._present
            if any(hello.standing == "current" for hello in group.hellos)
        ]
        self._phase = "running" if trained else "starting"
        if trained:
            self._take_over(trained, now)
        self._welcome_all(veterans_only=False)
        for group in self._present:
            for rank, state in list(group.ranks.items()):
                if isinstance(state.request, Vote) and group is self._groups.get(group.group):
                    self._count_vote(group, rank, state.request, now)
                elif isinstance(state.request, Arrive):
                    self._tell_missed_round(group, rank)

    def _tell_missed_round(self, group: Group, rank: int) -> bool:
        """Tell a rank of a round that the last coordinator told only others of its group.

        They train on in it and wait for this rank; it cannot be committed any more.
        """
        state = group.ranks[rank]
        told = max(group.hellos, key=lambda hello: hello.round)
        if not told.overlaps or state.hello.round >= told.round:
            return False
        members = [
            RoundMember(group=number, incarnation=incarnation, weight=0, standing="current")
            for number, incarnation in told.members
        ]
        missed = Round(
            round=told.round,
            generation=told.generation,
            members=tuple(members),
            commit=told.ledger.commit + 1,
            is_idle=True,
            overlaps=True,
        )
        self._answer(group, rank, missed)
        state.hello = remembering(state.hello, missed)
        return True

    def _take_over(self, trained: list[Group], now: float) -> None:
        """Continue from the ledger with the most commits that a current rank holds."""
        ledgers = [
            hello.ledger
            for group in trained
            for hello in group.hellos
            if hello.standing == "current"
        ]
        self._ledger = max(ledgers, key=lambda each: (each.commit, each.rows_done))
        self._book.restore(self._ledger)
        self._run_metrics.record_incident("the coordinator was restarted", now)
        self._run_metrics.remember(self._ledger)
        for group in trained:
            group.standing, group.is_pristine = "current", False
            self._run_metrics.goodput.train(group.group, now)
            newest = max(group.hellos, key=lambda hello: hello.ledger.commit)
            self._book.adopt(newest.leases, group.group)
        own = self._ledger
        for group in self._current:
            held = [hello.ledger for hello in group.hellos]
            if any(each.commit == own.commit and each.round != own.round for each in held):
                self._lose(group, "stale", "it holds another sync of the same number", now)
        for group in self._present:
            if not group.is_current and (_was_in_round(group) or not group.is_pristine):
                group.demote()
        self._emit_membership(now)


def _was_in_round(group: Group) -> bool:
    return any(hello.members for hello in group.hellos)
