"""Sync rounds: how they open, end and count."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from trainer import failures
from trainer.coordination.detection import (
    DivergentShard,
    FaultRecord,
    RankId,
    differing_copies,
)
from trainer.coordination.messages import (
    GroupState,
    Lease,
    Ledger,
    Report,
    Round,
    RoundMember,
    RoundResult,
    Vote,
)
from trainer.elastic.coordinator.groups import (
    Group,
    GroupRegistry,
    choose_donor,
    choose_start,
    disagreement,
    fenced,
)
from trainer.elastic.coordinator.interface import MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.protocol import events

_DEADLINES_KEPT = 16
_LEASES_HELD = 2
# A listener that makes so many rounds fail is lost.
_MAX_SUSPENSIONS = 3
_LISTENER_GRACE_S = 1.0  # so long a commit waits for the votes of listeners
# While groups are waited for, rounds only serve those that copy.
_WAITING_ROUND_S = 1.0
# After so many skipped intervals in a row of one group its data is not to blame.
_MAX_SKIPS_IN_A_ROW = 3


@dataclass
class OpenRound:
    """A round that its members were told of.

    `weight` sums up the rows that its members trained since the last sync, by weight, and `leases`
    are these; `means` are over the ranks that count. `starts` and `promoted` are the groups that
    become current when it commits: those that begin the run, and those whose copy is then exact.
    It is exact (`Round.is_exact`) while somebody copies, and where a group asks for it.
    `overlapping` are the groups that train on meanwhile: none where it is exact. `listeners` hear
    it and count for nothing: it commits `_LISTENER_GRACE_S` after `agreed_at`, when all others held
    the averages; `undecided` are those that do not yet. `told` are the messages about it, of which
    all ranks but listeners get the same.
    """

    number: int
    generation: int
    commit: int
    members: tuple[RoundMember, ...]
    weight: float
    is_idle: bool
    is_exact: bool
    voters: frozenset[RankId]
    leases: Sequence[int]
    means: dict[str, float]
    starts: frozenset[int]
    promoted: frozenset[int]
    overlapping: frozenset[int]
    votes: dict[RankId, Vote] = field(default_factory=dict)
    agreed_at: float | None = None
    undecided: set[RankId] = field(init=False)
    told: dict[tuple[bool, str | None], Round] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listeners = self.listeners
        self.undecided = {voter for voter in self.voters if voter.group not in listeners}

    @property
    def listeners(self) -> frozenset[int]:
        return frozenset(each.group for each in self.members if each.standing == "listening")

    @property
    def missing(self) -> frozenset[int]:
        """Groups of which a rank does not hold the averages, as far as is known."""
        ready = {voter for voter, vote in self.votes.items() if vote.ok}
        return frozenset(voter.group for voter in self.voters - ready)

    @property
    def groups(self) -> frozenset[int]:
        return frozenset(member.group for member in self.members)


def form_round(
    number: int, generation: int, commit: int, groups: Sequence[Group], starts: Collection[int]
) -> OpenRound:
    """A round of `groups`, which are all ready, in the order of their numbers."""
    current = [group for group in groups if group.is_current]
    members = tuple(group.as_member() for group in groups)
    weight = sum(member.weight for member in members)
    is_asked = any(arrival.needs_exact for group in current for arrival in group.arrivals)
    has_listeners = 0 < len(current) < len(groups)
    is_exact = is_asked or len(current) < len(groups)
    sums: dict[str, float] = defaultdict(float)
    for group in current:
        for arrival in group.arrivals:
            for name, value in arrival.sums.items():
                sums[name] += value
    return OpenRound(
        number=number,
        generation=generation,
        commit=commit,
        members=members,
        weight=weight,
        is_idle=not (weight or is_asked or has_listeners),
        is_exact=is_exact,
        voters=frozenset(group.rank_id(rank) for group in groups for rank in group.ranks),
        leases=[lease for group in current for lease in group.arrivals[0].leases],
        means={name: total / weight for name, total in sums.items()} if weight else {},
        starts=frozenset(starts),
        promoted=frozenset(group.group for group in groups if group.has_exact_copy),
        overlapping=frozenset(group.group for group in groups if group.may_overlap)
        if weight and not is_exact
        else frozenset(),
    )


class SyncRounds(GroupRegistry):
    """Opens rounds, collects their votes, and commits."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook) -> None:
        super().__init__(policy, book)
        self._num_skips: Counter[int] = Counter()  # in a row, by group
        self._start_since: float | None = None
        self._round: OpenRound | None = None
        self._number = 0
        self._has_opened = False
        self._opened_at = 0.0
        self._formed: tuple[tuple[int, int], ...] | None = None
        self._deadlines: dict[int, dict[int, float]] = {}  # by round and shard
        self._faults = FaultRecord()
        self._suspended: frozenset[int] = frozenset()  # listeners, until the next commit
        self._report = Report()
        self._skipped: list[Lease] = []

    def _lose(self, group: Group, reason: str, message: str, now: float) -> None:
        """A group is lost, and the round that it was in with it."""
        super()._lose(group, reason, message, now)
        if self._round and group.group in self._round.groups:
            self._end_round(f"group {group.group} was lost", now)

    # --- opening

    def _open_if_ready(self, now: float) -> None:
        """Open the next round if all required groups wait for it. Raises `LeaseError`."""
        for group in self._present:
            if group.is_ready and not group.is_inspected and self._phase != "failed":
                group.is_inspected = True
                self._inspect(group, now)
        if self._phase == "running" and not self._current:
            self._phase, self._start_since = "starting", None
        if self._phase != "failed":
            self._lose_guilty(now)
            groups, starts = self._quorum(now)
            if groups:
                self._open_round(groups, starts, now)

    def _lose_guilty(self, now: float) -> None:
        """Give up the group that makes rounds fail, once those who were in the last are back."""
        able = [group for group in self._present if group.standing != "listening"]
        if not all(group.is_ready for group in able):
            return
        guilty = self._faults.judge({group.group: group.joined_at for group in able})
        if guilty:
            message = (
                f"its exchanges fail again and again ({guilty.num_accusers} other groups cannot "
                f"reach it): {guilty.error}"
            )
            self._lose(self._groups[guilty.group], "exchange", message, now)

    def _inspect(self, group: Group, now: float) -> None:
        """Check what a ready group arrived with."""
        if not group.is_current:
            return
        arrival = group.arrivals[0]
        held = {lease.id for lease in self._book.held(group.group)}
        problem = disagreement(group)
        if arrival.commit != self._ledger.commit:
            problem = f"it holds commit {arrival.commit}, the others {self._ledger.commit}"
        elif not held.issuperset(arrival.leases):
            problem = f"it trained leases {arrival.leases}, but holds {sorted(held)}"
        if problem:
            self._lose(group, "stale", problem, now)
        elif any(each.is_poisoned for each in group.arrivals):
            self._skip(group, now)

    def _skip(self, group: Group, now: float) -> None:
        """A group's loss became NaN: leave out the rows that it trained, and discard its state."""
        self._num_skips[group.group] += 1
        num_skips = self._num_skips[group.group]
        is_too_often = num_skips > _MAX_SKIPS_IN_A_ROW
        others = [each for each in self._current if each is not group]
        again = f" in {num_skips} intervals in a row" if num_skips > 1 else ""
        message = f"group {group.group}: the training loss became nan{again}"
        if is_too_often and not all(self._num_skips[each.group] for each in others):
            del self._num_skips[group.group]
            self._lose(group, "non_finite", f"{message}, and that of others did not", now)
            return
        if is_too_often or self._policy.on_non_finite == "fail":
            advice = "lower the learning rate, or look for outliers in the rows that it trained"
            self._fail("non_finite", f"{message}; {advice}", now)
            return
        for lease_id in group.arrivals[0].leases:
            lease = self._book.skip(lease_id)
            self._skipped.append(lease)
            self._emit(
                events.RowsSkipped(
                    time=now,
                    epoch=lease.epoch,
                    start=min(start for start, _ in lease.spans),
                    stop=max(stop for _, stop in lease.spans),
                    num_rows=lease.num_rows,
                    reason="the training loss became NaN or infinite on them",
                )
            )
        self._ledger = self._book.entered_in(self._ledger)
        self._book.give_back(group.group)
        group.demote()
        if not self._current:
            message = "its loss became NaN and no other group holds the state"
            self._dismiss(group, fenced(message))
            self._release(group, "poisoned", now)

    def _quorum(self, now: float) -> tuple[list[Group], list[Group]]:
        """The groups of the next round and those of them that begin the run; none if too early."""
        suspended = self._suspended if self._current else frozenset()
        ready = [g for g in self._present if g.is_ready and g.group not in suspended]
        if self._phase == "starting":
            return self._starters(ready, now)
        if self._phase == "finished":
            return ready, []
        holds_rows = any(self._book.held(group.group) for group in self._current)
        if self._is_short and not holds_rows and now < self._opened_at + _WAITING_ROUND_S:
            return [], []
        return (ready, []) if all(group.is_ready for group in self._current) else ([], [])

    def _starters(self, ready: list[Group], now: float) -> tuple[list[Group], list[Group]]:
        for group in [group for group in ready if not group.is_pristine]:
            self._lose(group, "no_donor", "no group is left that it could copy from", now)
        able = [group for group in ready if group.is_pristine]
        if not able:
            return [], []
        if self._start_since is None:
            self._start_since = now
        is_late = now >= self._start_since + self._policy.start_grace_s
        if not is_late and not self._expected <= {group.group for group in able}:
            return [], []
        starts = choose_start(able)
        self._begin_from(starts[0].ranks[0].hello.ledger, starts[0].group)
        return able, starts

    def _begin_from(self, ledger: Ledger, group: int) -> None:
        """Continue from the ledger of a checkpoint; rows skipped before stay skipped.

        Raises `LeaseError`.
        """
        self._report = Report()  # the last one was about a state that is gone
        self._book.restore(ledger)
        self._number = max(self._number, ledger.round)
        for lease in self._book.adopt(self._skipped, group):
            self._book.skip(lease.id)
        self._ledger = self._book.entered_in(ledger)
        self._run_metrics.remember(self._ledger)

    def _open_round(self, groups: list[Group], starts: list[Group], now: float) -> None:
        donors = starts or [group for group in groups if group.is_current]
        listeners = [g for g in groups if not g.is_current and g not in starts]
        for group in listeners:
            group.standing, group.is_pristine = "listening", False
            if donors:
                group.donor = choose_donor(group, donors, self._groups).group
        formed = tuple((group.group, group.incarnation) for group in groups)
        if formed != self._formed:
            self._formed = formed
            self._generation += 1
        self._number += 1
        self._has_opened, self._opened_at = True, now
        opened = form_round(
            self._number,
            self._generation,
            self._ledger.commit + 1,
            groups,
            [group.group for group in starts],
        )
        for group in listeners:
            group.has_begun = not group.must_restart
            group.copied_bytes = sum(arrival.copied_bytes for arrival in group.arrivals)
        self._round = opened
        self._run_metrics.start_round()
        for group in groups:
            for rank in sorted(group.ranks):
                self._answer(group, rank, self._round_for(opened, group, rank))
                group.ranks[rank].round = opened.number
        self._emit_membership(now)

    def _round_for(self, opened: OpenRound, group: Group, rank: int) -> Round:
        """The message about a round for one rank."""
        donor = self._groups.get(group.donor) if group.donor is not None else None
        address = donor.ranks[rank].hello.donor if donor and rank in donor.ranks else None
        own = group.group in opened.overlapping, address
        if own not in opened.told:
            opened.told[own] = Round(
                round=opened.number,
                generation=opened.generation,
                members=opened.members,
                commit=opened.commit,
                is_idle=opened.is_idle,
                is_exact=opened.is_exact,
                overlaps=own[0],
                donor=address,
            )
        return opened.told[own]

    # --- votes

    def _count_vote(self, group: Group, rank: int, vote: Vote, now: float) -> None:
        state = group.ranks[rank]
        if state.round == vote.round:
            state.round = None
        opened = self._round
        if opened is None or vote.round != opened.number:
            self._note_complaint(group, vote)
            self._answer_late(group, rank, vote, now)
            return
        self._set_deadlines(vote.round, [rank], now)
        opened.votes[group.rank_id(rank)] = vote
        if vote.ok or group.standing == "listening":
            opened.undecided.discard(group.rank_id(rank))
            self._end_if_agreed(now)
            return
        self._note_complaint(group, vote)
        self._end_round(f"group {group.group} rank {rank} refused: {vote.error}", now)
        if set(opened.groups) - opened.listeners:
            self._suspend(opened.listeners, now)

    def _note_complaint(self, group: Group, vote: Vote) -> None:
        if not (vote.ok or vote.gave_up or group.standing == "listening"):
            self._faults.complain(vote.round, group.group, vote.suspects, vote.error)

    def _suspend(self, listeners: Collection[int], now: float) -> None:
        """An exchange with these listeners failed: they are not in the next one, nor for ever."""
        self._suspended = frozenset(listeners) & self._groups.keys()
        for number in sorted(self._suspended):
            group = self._groups[number]
            group.num_suspended += 1
            if group.num_suspended >= _MAX_SUSPENSIONS:
                message = f"exchanges with it failed {_MAX_SUSPENSIONS} times while it copied"
                self._lose(group, "exchange", message, now)

    def _end_if_agreed(self, now: float) -> None:
        """Commit the round, or find that copies differ, once all hold the averages that must."""
        opened = self._round
        if opened is None or opened.undecided:
            return
        if opened.agreed_at is None:
            opened.agreed_at = now
        is_over = opened.votes.keys() == opened.voters
        if not is_over and now < opened.agreed_at + _LISTENER_GRACE_S:
            return
        found = self._differing(opened)
        if found:
            self._end_divergence(found, now)
        else:
            self._commit(opened, now)

    def _differing(self, opened: OpenRound) -> list[DivergentShard]:
        """What some copies hold unlike most, by the checksums in their ranks' votes."""
        current = [self._groups[m.group] for m in opened.members if m.standing == "current"]
        found: dict[tuple[str, int], set[int]] = defaultdict(set)
        for rank in range(current[0].num_ranks if current else 0):
            votes = [opened.votes[group.rank_id(rank)].checksums for group in current]
            for copies in zip(*votes, strict=True):
                names, checksums = zip(*copies, strict=True)
                for place in differing_copies(checksums):
                    group = current[place]
                    found[names[0], rank].add(group.group * group.num_ranks + rank)
        return [DivergentShard(*at, tuple(sorted(ranks))) for at, ranks in sorted(found.items())]

    def _end_divergence(self, found: Sequence[DivergentShard], now: float) -> None:
        """Copies differ, so the round does not commit: fail, or let those groups copy anew."""
        action, step = self._policy.on_divergence, self._run_metrics.step(self._ledger)
        for each in found:
            self._emit(
                events.Divergence(
                    time=now,
                    step=step,
                    table=each.table,
                    shard=each.shard,
                    ranks=list(each.ranks),
                    action=action,
                )
            )
        differing = [
            group
            for group in self._current
            if any(rank // group.num_ranks == group.group for each in found for rank in each.ranks)
        ]
        if action == "fail" or len(differing) == len(self._current):
            self._fail(failures.DIVERGED, str(failures.DivergenceError(found)), now)
            return
        for group in differing:
            self._book.give_back(group.group)
            group.demote()
        self._end_round("copies of a shard differed", now)

    def _set_deadlines(self, number: int, shards: Iterable[int], now: float) -> None:
        """Ranks that hold one of `shards` must vote in time: a copy of it has, or the round ended.

        Shards are unequal, and who averages a small one says nothing of the others.
        """
        deadlines = self._deadlines.setdefault(number, {})
        for shard in shards:
            deadlines.setdefault(shard, now + self._policy.vote_timeout_s)
        self._deadlines.pop(number - _DEADLINES_KEPT, None)

    def _answer_late(self, group: Group, rank: int, vote: Vote, now: float) -> None:
        """Answer a vote on a round that is over, perhaps since before a restart."""
        newest = self._ledger
        is_newest = (vote.round, vote.commit) == (newest.round, newest.commit)
        is_newest &= group.missed_round != vote.round
        if group.is_current and not is_newest and vote.commit <= newest.commit:
            message = f"the others have committed sync {newest.commit} without it"
            self._lose(group, "stale", message, now)
            return
        self._answer(group, rank, self._result(group, vote.round, committed=is_newest))

    def _end_round(self, why: str, now: float) -> None:
        """A round has failed: answer who voted, and notify who may still wait for its peers."""
        ended, self._round, self._formed = self._round, None, None
        assert ended, "a round is open"
        self._set_deadlines(ended.number, {voter.rank for voter in ended.voters}, now)
        self._run_metrics.record_incident(why, now)
        for member in ended.members:
            group = self._groups.get(member.group)
            if group and group.incarnation == member.incarnation:
                self._end_round_of(group, ended.number)

    def _end_round_of(self, group: Group, number: int) -> None:
        """Tell a group that a round was not committed with it."""
        result = self._result(group, number, committed=False)
        for rank, state in group.ranks.items():
            if isinstance(state.request, Vote):
                self._answer(group, rank, result)
            elif state.round == number:
                self._reply(group.rank_id(rank), 0, result)

    # --- commits

    def _commit(self, ended: OpenRound, now: float) -> None:
        """Every rank that counts holds the averages: the sync counts."""
        self._round, self._suspended = None, frozenset()
        self._faults.clear()
        missing = ended.missing
        voters = [self._groups[group] for group in sorted(ended.groups - missing)]
        for group in voters:
            group.num_suspended = 0
        self._book.commit(ended.leases)
        for member in ended.members:
            if member.weight:
                del self._num_skips[member.group]
        self._ledger = self._book.entered_in(self._next_ledger(ended))
        standings = {group.group: self._standing_after(group, ended, now) for group in voters}
        for group in self._present:
            if group not in voters:
                group.must_restart |= group.has_begun
        for number in missing:
            self._groups[number].missed_round = ended.number
        has_finished = self._report.has_finished or self._phase == "finished"
        self._phase = "finished" if has_finished else "running"
        self._report = Report()
        # What an overlapping group has trained since would be lost.
        able = [group for group in voters if group.group not in ended.overlapping]
        leavers = [group for group in able if self._may_leave(group)]
        for group in leavers:
            self._release(group, group.leave_cause or "resize", now)
        self._hand_out()
        for group in voters:
            result = self._result(group, ended.number, committed=True)
            update = {"standing": standings[group.group], "should_leave": group in leavers}
            result = result.model_copy(update=update)
            for rank in group.ranks:
                self._answer(group, rank, result)
        for late in (self._groups[number] for number in sorted(missing)):
            self._end_round_of(late, ended.number)
        recovered = self._run_metrics.commit(self._generation, self._ledger.commit, now)
        self._run_metrics.remember(self._ledger)
        self._emit_membership(now)
        if recovered:
            self._emit(recovered)
        if self._phase == "finished":
            self._emit_metrics(now)

    def _next_ledger(self, ended: OpenRound) -> Ledger:
        known, report = self._ledger, self._report
        durable = report.checkpoint_commit
        update = {
            "commit": ended.commit,
            "round": ended.number,
            "best": known.best if report.best is None else report.best,
            "plateau": report.plateau or known.plateau,
            "metrics": known.metrics | report.metrics | ended.means,
            "checkpoint_commit": known.checkpoint_commit if durable is None else durable,
            "led": report.led or known.led,
        }
        return known.model_copy(update=update)

    def _standing_after(self, group: Group, ended: OpenRound, now: float) -> GroupState:
        """The standing of a group after a committed round that it was in."""
        if group.group in ended.starts:
            self._become_current(group, "start", now)
        elif group.group in ended.promoted:
            self._become_current(group, "peer_copy", now)
        elif group.must_restart:
            group.must_restart = group.has_begun = False
            return "initial"
        return group.standing

    def _may_leave(self, group: Group) -> bool:
        if group.leave_cause is None or not group.is_current:
            return group.leave_cause is not None
        return any(each is not group and not each.leave_cause for each in self._current)

    def _hand_out(self) -> None:
        """Lease rows to the groups that are current: to each its first before any its second.

        To none while there are too few of them.
        """
        if self._is_short:
            return
        for num_held in range(_LEASES_HELD):
            for group in self._current:
                if len(self._book.held(group.group)) <= num_held:
                    self._book.lease(group.group)

    def _result(self, group: Group, number: int, committed: bool) -> RoundResult:
        """The message about a round that has ended, for one group."""
        return RoundResult(
            committed=committed,
            round=number,
            ledger=self._ledger,
            leases=self._book.held(group.group),
            leader=self._choose_leader() or 0,
            standing="initial" if group.must_restart else group.standing,
            has_finished=committed and self._phase == "finished",
        )
