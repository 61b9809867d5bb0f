"""Sync rounds: how they open, fail and count, and what becomes of rows and copies then.

A round ends with the first refusal, with the loss of any of its groups, or when all groups agreed,
and every group that voted is answered then. A listener is in the rounds that it has arrived for,
and delays none for long: what all others hold commits without its vote, and where a round with it
has failed the next is without it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from trainer import failures
from trainer.coordination.detection import DivergentShard, FaultRecord, differing_copies
from trainer.coordination.messages import (
    Lease,
    Ledger,
    Rejection,
    Report,
    Round,
    RoundMember,
    RoundResult,
    Share,
    Vote,
    host_of,
)
from trainer.coordination.sync_tuner import Observation, SyncTuner
from trainer.elastic.coordinator.goodput import RunMetrics
from trainer.elastic.coordinator.groups import (
    Group,
    GroupRegistry,
    choose_donor,
    copies_alive,
    fenced,
)
from trainer.elastic.coordinator.interface import Effect, MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook, lease_lengths
from trainer.failures import EndReason, Failure
from trainer.protocol import events

_LEASES_HELD = 2
# A listener that makes so many rounds fail is lost.
_MAX_MISSED = 3
_LISTENER_GRACE_S = 1.0  # so long a commit waits for the votes of listeners
# While groups are waited for, rounds only serve those that copy.
_WAITING_ROUND_S = 1.0
# After so many skipped intervals in a row of one group its data is not to blame.
_MAX_SKIPS_IN_A_ROW = 3


def is_whole(shares: Collection[Share | None]) -> bool:
    """Whether groups with these shares have measured each validation row, and each once."""
    size = len(shares)
    return size > 0 and set(shares) == {(place, size) for place in range(size)}


class OpenRound:
    """A round that `groups` were told of; none of them changes its standing before it ends.

    `leases` are those that they trained since the last sync, of which `num_quarantined` rows were
    left out, and `means` are over the groups that count. `synced` is what the last sync took the
    group that waited for no other. `joining` become current when it commits, as they begin the run
    or their copy is then exact; `overlapping` train on meanwhile. Listeners hear it and count for
    nothing: it commits `_LISTENER_GRACE_S` after `agreed_at`, when all others held the averages;
    `undecided` are those that do not yet.
    """

    def __init__(
        self,
        number: int,
        generation: int,
        commit: int,
        groups: Sequence[Group],
        joining: Collection[Group],
    ) -> None:
        """`groups` are all ready, in the order of their numbers."""
        self.number, self.commit, self.groups, self.joining = number, commit, groups, joining
        current = [group for group in groups if group.is_current]
        arrivals = [group.arrival for group in current]
        members = tuple(RoundMember(standing=g.standing, **g.identity) for g in groups)
        weights = [each.arrival.copy_weight if each.is_current else 0.0 for each in groups]
        weight = sum(weights)
        is_asked = any(arrival.needs_exact for arrival in arrivals)
        has_listeners = 0 < len(current) < len(groups)
        self._message = Round(
            round=number,
            generation=generation,
            members=members,
            weights=tuple(weights),
            commit=commit,
            is_idle=not (weight or is_asked or has_listeners),
            is_exact=is_asked or len(current) < len(groups),
            joins_validation=is_whole([each.measured for each in arrivals]),
            stores=groups[host_of(members)].donors,
        )
        self._told: dict[tuple[bool, Group | None], Round] = {}
        may_overlap = weight and not self._message.is_exact
        self.overlapping = {group for group in groups if may_overlap and group.may_overlap}
        self.counting = [each for each, weight in zip(groups, weights, strict=True) if weight]
        self.leases = [lease for arrival in arrivals for lease in arrival.leases]
        self.num_quarantined = sum(arrival.num_quarantined for arrival in arrivals)
        synced = [arrival.synced for arrival in arrivals if arrival.synced]
        self.synced = min(synced, key=lambda each: each.sync_s, default=None)
        self.speeds = {
            group: group.arrival.num_rows / group.arrival.train_s
            for group in current
            if group.arrival.train_s
        }
        self.undecided = {group for group in groups if group.standing != "listening"}
        self.votes: dict[Group, Vote] = {}
        self.agreed_at: float | None = None

    def message_for(self, group: Group) -> Round:
        """The message for one group: the same object for all that are told the same."""
        own = group in self.overlapping, group.donor
        if own not in self._told:
            donors = group.donor.donors if group.donor else ()
            update = {"overlaps": own[0], "donors": donors}
            self._told[own] = self._message.model_copy(update=update)
        return self._told[own]

    def missing(self) -> list[Group]:
        """Groups that do not hold the averages, as far as is known."""
        return [each for each in self.groups if each not in self.votes or not self.votes[each].ok]

    def differing(self) -> list[DivergentShard]:
        """What some copies hold unlike most, by the checksums in the groups' votes."""
        current = [group for group in self.groups if group.is_current]
        found: dict[tuple[str, int], set[int]] = defaultdict(set)
        votes = (self.votes[group].checksums for group in current)
        for rank, shards in enumerate(zip(*votes, strict=True)):
            for copies in zip(*shards, strict=True):
                names, checksums = zip(*copies, strict=True)
                for place in differing_copies(checksums):
                    group = current[place]
                    found[names[0], rank].add(group.group * len(group.ranks) + rank)
        return [DivergentShard(*at, tuple(sorted(ranks))) for at, ranks in sorted(found.items())]


class SyncRounds:
    """Opens rounds of the groups that are there, collects their votes, and commits to the ledger.

    `report` is the leader's, of the newest round, and `num_saves` how many checkpoints the driver
    has asked for. With `failure` the run cannot go on.
    """

    def __init__(
        self,
        policy: MembershipPolicy,
        book: LeaseBook,
        groups: GroupRegistry,
        metrics: RunMetrics,
        effects: list[Effect],
    ) -> None:
        """What is to be done is appended to `effects`."""
        self.ledger, self.report = Ledger(), Report()
        self.failure: Failure | None = None
        self.has_finished = False
        self.generation = self.num_saves = 0
        self._policy, self._book, self._groups = policy, book, groups
        self._metrics, self._effects = metrics, effects
        # Leases that are held already are of the interval before.
        self._tuner = SyncTuner(policy.sync, num_mixed=_LEASES_HELD)
        self._round: OpenRound | None = None
        self._number = 0
        self._opened_at = 0.0
        self._formed: Sequence[Group] | None = None  # with the process groups of this generation
        self._faults = FaultRecord()
        self._suspended: Sequence[Group] = ()  # listeners, until the next commit
        self._num_skips: Counter[int] = Counter()  # in a row, by group
        self._skipped: list[Lease] = []
        self._was_short = False
        self._emitted_members: list[events.GroupMember] | None = None

    @property
    def is_open(self) -> bool:
        return self._round is not None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.has_finished or self.failure is not None

    @property
    def _is_short(self) -> bool:
        """Whether too few groups hold the state for training to go on."""
        return len(self._groups.current) < self._policy.min_groups

    # --- groups and the run

    def remember(self, number: int, generation: int) -> None:
        """There was a round of this number and generation; new ones have higher ones."""
        self._number = max(self._number, number)
        self.generation = max(self.generation, generation)

    def begin_from(self, ledger: Ledger, group: int) -> None:
        """Continue from the ledger of a checkpoint; rows skipped before stay skipped.

        Raises `LeaseError`.
        """
        self._book.restore(ledger)
        self._tuner.resume(ledger.tuning)
        self._number = max(self._number, ledger.round)
        for lease in self._book.adopt(self._skipped, group):
            self._book.skip(lease.id)
        self.ledger = self._book.entered_in(ledger)

    def take_over(self, trained: Sequence[Group], since: float, now: float) -> None:
        """Continue from the ledger with the most commits that a current group holds; groups have
        come back `since` then.

        Raises `LeaseError`.
        """
        ledgers = (group.hello.ledger for group in trained)
        self.ledger = max(ledgers, key=lambda each: (each.commit, each.rows_done))
        self._book.restore(self.ledger)
        self._tuner.resume(self.ledger.tuning)
        self._metrics.record_incident("the coordinator was restarted", since)
        # Others may hold by now what one that was lost, and not told so, says that it holds.
        for group in sorted(trained, key=lambda each: -each.hello.ledger.commit):
            group.make_current()
            self._metrics.goodput.train(group.group, now)
            self._book.adopt(group.hello.leases, group.group)
        own = self.ledger
        for group in self._groups.current:
            held = group.hello.ledger
            if held.commit == own.commit and held.round != own.round:
                self.lose(group, "stale", "it holds another sync of the same number", now)
        for group in self._groups.present:
            if group.was_in_round and not group.is_current:
                group.demote()
        self._emit_membership(now)

    def lose(self, group: Group, reason: str, message: str, now: float, host: str = "") -> None:
        """A group is lost: its leases return, it is told to end, its round has failed.

        `host` is that of the rank that hangs or is silent, if it is known. After the end of the run
        that is how groups go: who still cleans up is left alone.
        """
        self._effects += group.dismiss(fenced(message), only_waiting=self.has_finished)
        self._groups.remove(group, reason, message, is_lost=not self.is_over, host=host)
        num_rows = self._book.give_back(group.group)
        if not self.is_over:
            if group.is_current:
                self._metrics.record_incident(reason, now, syncs_lost=int(num_rows > 0))
            if not group.is_spare:
                self._metrics.goodput.lose(group.group, now)
            self._effects.append(
                events.GroupLost(
                    time=now,
                    reason=reason,
                    message=message,
                    rows_returned=num_rows,
                    is_spare=group.is_spare,
                    **group.identity,
                )
            )
            self._emit_membership(now)
        if self._round and group in self._round.groups:
            self._end_round(f"group {group.group} was lost", now)

    def let_go(self, group: Group, cause: events.LeaveCause, now: float) -> None:
        """A group leaves as asked; no work is lost."""
        self._groups.remove(group, cause, f"left: {cause}", is_lost=False)
        self._book.give_back(group.group)
        self._metrics.goodput.leave(group.group, now)
        self._effects.append(events.GroupLeft(time=now, cause=cause, **group.identity))

    def dismiss_spare(self, spare: Group, message: str, only_waiting: bool = False) -> None:
        """Tell the ranks of a spare to end; nothing is lost with them."""
        self._effects += spare.dismiss(Rejection(reason="dismissed", message=message), only_waiting)

    def fail(self, reason: EndReason, message: str, now: float) -> None:
        """The run cannot go on: every group is told so."""
        self.failure, self._round = Failure(reason, message), None
        self._effects.append(events.Note(time=now, level="error", message=message))
        for group in self._groups.present:
            self._effects += group.dismiss(Rejection(reason="failed", message=message))

    def _emit_membership(self, now: float) -> None:
        """Emit who is there, where that changed."""
        present = [group for group in self._groups.present if group.has_begun]
        members = [
            events.GroupMember(standing=each.standing, donor=each.donor_group, **each.identity)
            for each in present
        ]
        if members == self._emitted_members:
            return
        self._emitted_members = members
        num_copies, num_hosts = copies_alive(present)
        changed = events.MembershipChanged(
            time=now,
            generation=self.generation,
            commit=self.ledger.commit,
            groups=members,
            copies_alive=num_copies,
            host_copies_alive=num_hosts,
        )
        self._effects.append(changed)
        least, is_short = self._policy.min_groups, self._is_short
        if num_copies and not self.is_over and is_short != self._was_short:
            self._was_short = is_short
            have = f"{num_copies} group(s) hold the state, parallelism.min_groups is {least}"
            message = f"training {'waits for more' if is_short else 'goes on'}: {have}"
            level: Literal["warning", "info"] = "warning" if is_short else "info"
            self._effects.append(events.Note(time=now, level=level, message=message))

    # --- opening

    def inspect(self, group: Group, now: float) -> None:
        """Check what a group arrived with that waits for the next round."""
        if not group.is_current:
            return
        arrival, problem = group.arrival, ""
        held = {lease.id for lease in self._book.held(group.group)}
        if arrival.commit != self.ledger.commit:
            problem = f"it holds commit {arrival.commit}, the others {self.ledger.commit}"
        elif not held.issuperset(arrival.leases):
            problem = f"it trained leases {arrival.leases}, but holds {sorted(held)}"
        if problem:
            self.lose(group, "stale", problem, now)
        elif arrival.is_poisoned:
            self._skip(group, now)

    def _skip(self, group: Group, now: float) -> None:
        """A group's loss or a gradient became NaN: leave out the rows that it trained, and discard
        its state.
        """
        self._num_skips[group.group] += 1
        num_skips = self._num_skips[group.group]
        is_too_often = num_skips > _MAX_SKIPS_IN_A_ROW
        others = [each for each in self._groups.current if each is not group]
        again = f" in {num_skips} intervals in a row" if num_skips > 1 else ""
        message = f"group {group.group}: the training loss or a gradient became nan{again}"
        if is_too_often and not all(self._num_skips[each.group] for each in others):
            del self._num_skips[group.group]
            self.lose(group, "non_finite", f"{message}, and that of others did not", now)
            return
        if is_too_often or self._policy.on_non_finite == "fail":
            advice = "lower the learning rate, or look for outliers in the rows that it trained"
            self.fail(EndReason.NON_FINITE, f"{message}; {advice}", now)
            return
        for lease_id in group.arrival.leases:
            lease = self._book.skip(lease_id)
            self._skipped.append(lease)
            starts, stops = zip(*lease.spans, strict=True)
            reason = "the training loss or a gradient became NaN or infinite on them"
            skipped = events.RowsSkipped(
                time=now,
                epoch=lease.epoch,
                start=min(starts),
                stop=max(stops),
                num_rows=lease.num_rows,
                reason=reason,
            )
            self._effects.append(skipped)
        self.ledger = self._book.entered_in(self.ledger)
        self._demote(group, now)
        if others:
            return
        message = "a loss or a gradient became NaN and no other group holds the state"
        for listener in [each for each in self._groups.present if each.standing == "listening"]:
            self._effects += listener.dismiss(fenced(message))
            self.let_go(listener, "poisoned", now)

    def _demote(self, group: Group, now: float) -> None:
        """A current group's work since the last commit counts no more; its leases return."""
        self._book.give_back(group.group)
        self._metrics.goodput.demote(group.group, now)
        group.demote()

    def lose_guilty(self, now: float) -> None:
        """Give up the group that makes rounds fail, once those who were in the last are back."""
        able = [g for g in self._groups.present if g.standing in ("initial", "current")]
        if not all(group.is_ready for group in able):
            return
        guilty = self._faults.judge({group.group: group.joined_at for group in able})
        if guilty:
            number, num_accusers, error = guilty
            lost = next(group for group in able if group.group == number)
            message = (
                f"its exchanges fail again and again ({num_accusers} other groups cannot reach "
                f"it): {error}"
            )
            self.lose(lost, "exchange", message, now)

    def open_next(self, now: float) -> None:
        """Open the next round, of all groups that are ready, once the current ones are."""
        current = self._groups.current
        if not self.has_finished:
            is_waiting = self._is_short and now < self._opened_at + _WAITING_ROUND_S
            if is_waiting and not any(self._book.held(group.group) for group in current):
                return
            if not all(group.is_ready for group in current):
                return
        spares = [group for group in self._groups.present if group.is_spare]
        for spare in spares if self.has_finished else ():
            self.dismiss_spare(spare, "the training is complete", only_waiting=True)
        left_out = [*spares, *(self._suspended if current else ())]
        ready = [g for g in self._groups.present if g.is_ready and g not in left_out]
        if ready:
            self.open(ready, [], now)

    def open(self, groups: Sequence[Group], starts: Sequence[Group], now: float) -> None:
        """Open a round of groups that are ready, of which `starts` begin the run."""
        donors = starts or [g for g in groups if g.is_current]
        groups = self._planned_alike(groups, donors, now)
        # Whose copy is whole, and has missed no round, is exact once this one commits.
        joining = {g for g in groups if g in starts or (g.copy == "live" and g.arrival.has_copied)}
        present = self._groups.present
        listeners = [group for group in groups if not group.is_current and group not in starts]
        for group in listeners:
            group.standing = "listening"
            group.copied_bytes = group.arrival.copied_bytes
            if group.copy == "absent":
                group.copy = "live"
            if donors:
                group.donor = choose_donor(group, donors, present)
            elif group.donor not in present:
                group.donor = None
        if groups != self._formed:
            self._formed = groups
            self.generation += 1
        self._number, self._opened_at = self._number + 1, now
        commit = self.ledger.commit + 1
        leader = self._groups.choose_leader()
        told = (group.arrival.report for group in groups if group.group == leader)
        self.report = next(told, None) or Report()
        opened = OpenRound(self._number, self.generation, commit, groups, joining)
        self._round = opened
        self._metrics.start_round()
        for group in groups:
            self._effects.append(group.answer(opened.message_for(group)))
            group.round, group.vote_due_at = opened.number, math.inf
        self._emit_membership(now)

    def _planned_alike(
        self, groups: Sequence[Group], copies: Sequence[Group], now: float
    ) -> Sequence[Group]:
        """The groups whose ranks hold the same rows as the `copies`; the others are lost."""
        unlike = [g for g in groups if copies and g.hello.plan != copies[0].hello.plan]
        for group in unlike:
            message = (
                f"its tables are sharded otherwise than those of group {copies[0].group}, so that "
                "averages would mix their rows. Its GPUs or hosts may have other memory: set "
                "resources.memory_bytes_per_worker and, where tables may be cached, "
                "parallelism.planner.cache_load_factor"
            )
            self.lose(group, "other_plan", message, now)
        return [group for group in groups if group not in unlike] if unlike else groups

    def repeat(self, group: Group) -> bool:
        """Tell a group again of the open round, where it has not voted on it; whether it was so."""
        opened = self._round
        if opened is None or group.round != opened.number:
            return False
        self._effects.append(group.answer(opened.message_for(group)))
        return True

    # --- votes

    def vote(self, group: Group, vote: Vote, now: float) -> None:
        """A group holds the averages of a round, or could not form them."""
        opened = self._round
        if group.round == vote.round:
            group.round = None
        is_listener = group.standing == "listening"
        if not (vote.ok or vote.gave_up or is_listener):
            self._faults.complain(vote.round, group.group, vote.suspects, vote.error)
        if opened is None or vote.round != opened.number:
            self._answer_late(group, vote, now)
            return
        self._limit_votes(opened, now)
        opened.votes[group] = vote
        if vote.ok:
            opened.undecided.discard(group)
        # Without a listener that refuses the others may wait for it until their time is up.
        if vote.ok or not opened.undecided:
            self.end_if_agreed(now)
        else:
            self._end_round(f"group {group.group} refused: {vote.error}", now)
            listeners = [each for each in opened.groups if each.standing == "listening"]
            self._suspend(listeners, now)

    def _limit_votes(self, opened: OpenRound, now: float) -> None:
        """All must vote in time from here on: one group has on all its shards, or the round ended.

        Shards are unequal, but a group votes only once its slowest is averaged, as all others' is.
        """
        if opened.votes:
            return
        for group in opened.groups:
            group.vote_due_at = now + self._policy.vote_timeout_s

    def _suspend(self, listeners: Sequence[Group], now: float) -> None:
        """An exchange with these listeners failed: they are not in the next one, nor for ever."""
        self._suspended = listeners
        self._count_missed(listeners, now)

    def _count_missed(self, listeners: Sequence[Group], now: float) -> None:
        """They hold no round's averages: who does not several times in a row is lost."""
        for group in listeners:
            group.num_missed += 1
            if group.num_missed >= _MAX_MISSED:
                message = f"exchanges with it failed {_MAX_MISSED} times while it copied"
                self.lose(group, "exchange", message, now)

    def end_if_agreed(self, now: float) -> None:
        """Commit the round, or find that copies differ, once all hold the averages that must."""
        opened = self._round
        if opened is None or opened.undecided:
            return
        if opened.agreed_at is None:
            opened.agreed_at = now
        is_whole = len(opened.votes) == len(opened.groups)
        if not is_whole and now < opened.agreed_at + _LISTENER_GRACE_S:
            return
        found = opened.differing()
        if found:
            self._end_divergence(found, now)
        else:
            self._commit(opened, now)

    def _end_divergence(self, found: Sequence[DivergentShard], now: float) -> None:
        """Copies differ, so the round does not commit: fail, or let those groups copy anew."""
        action, step = self._policy.on_divergence, self._metrics.step(self.ledger)
        for each in found:
            told = events.Divergence(time=now, step=step, action=action, **vars(each))
            self._effects.append(told)
        current = self._groups.current
        ranks = {rank for each in found for rank in each.ranks}
        differing = [g for g in current if any(rank // len(g.ranks) == g.group for rank in ranks)]
        if action == "fail" or len(differing) == len(current):
            self.fail(EndReason.DIVERGED, str(failures.DivergenceError(found)), now)
            return
        for group in differing:
            self._demote(group, now)
        self._end_round("copies of a shard differed", now)

    def _answer_late(self, group: Group, vote: Vote, now: float) -> None:
        """Answer a vote on a round that is over, perhaps since before a restart."""
        newest = self.ledger
        is_newest = (vote.round, vote.commit) == (newest.round, newest.commit)
        # Else it was committed without this one.
        is_newest &= vote.ok and (group.is_current or group.copy == "live")
        if group.is_current and not is_newest and vote.commit <= newest.commit:
            message = f"the others have committed sync {newest.commit} without it"
            self.lose(group, "stale", message, now)
            return
        if not is_newest:
            self._formed = None  # it drops its process groups
        self._answer_vote(group, vote.round, committed=is_newest)

    def _answer_vote(
        self, group: Group, number: int, *, committed: bool, should_leave: bool = False
    ) -> None:
        result = self._result(group, number, committed, should_leave)
        self._effects.append(group.answer(result))
        if group.copy == "stale":
            group.copy = "absent"  # it was told to start over

    def _end_round(self, why: str, now: float) -> None:
        """A round has failed: answer who voted, and notify who may still wait for its peers."""
        ended, self._round, self._formed = self._round, None, None
        assert ended, "a round is open"
        self._limit_votes(ended, now)
        self._metrics.record_incident(why, now)
        for group in ended.groups:
            self._end_round_of(group, ended.number)

    def _end_round_of(self, group: Group, number: int) -> None:
        """Tell a group that a round was not committed with it."""
        if isinstance(group.request, Vote):
            self._answer_vote(group, number, committed=False)
        elif group.round == number:
            self._effects.append(group.answer(self._result(group, number, committed=False)))

    # --- commits

    def _commit(self, ended: OpenRound, now: float) -> None:
        """Every group that counts holds the averages: the sync counts."""
        self._round, self._suspended = None, ()
        self._faults = FaultRecord()
        ledger = self._next_ledger(ended)
        self._book.commit(ended.leases)
        self.ledger = self._book.entered_in(ledger)
        if self._policy.sync.is_tuned:
            self._tune(ended.synced, now)
        self.has_finished |= self.report.has_finished
        counting = {group.group for group in ended.counting}
        # Else who trained nothing had nothing to train.
        has_waited = self._is_short or self._metrics.incident
        gaining = counting if has_waited else {group.group for group in ended.groups}
        recovered = self._metrics.commit(gaining, self.generation, ended.commit, now)
        for number in counting:
            del self._num_skips[number]
        if missing := ended.missing():
            self._formed = None  # who missed the commit drops its process groups
        voters = [group for group in ended.groups if group not in missing]
        self._update_copies(ended, voters, now)
        # What an overlapping group has trained since would be lost.
        able = [group for group in voters if group not in ended.overlapping]
        leavers = [group for group in able if self._may_leave(group)]
        for group in leavers:
            self.let_go(group, group.leave_cause or "resize", now)
        for group, speed in ended.speeds.items():
            group.speeds.append(speed)
        self._hand_out()
        current = self._groups.current
        for place, group in enumerate(current):  # who hold this commit share the validation rows
            group.share = place, len(current)
        for group in voters:
            should_leave = group in leavers
            self._answer_vote(group, ended.number, committed=True, should_leave=should_leave)
        for group in missing:
            self._end_round_of(group, ended.number)
        self._count_missed(missing, now)
        self._emit_membership(now)
        if recovered:
            self._effects.append(recovered)
        if self.has_finished:
            self._effects.append(self._metrics.as_event(self.ledger, self.generation, now))

    def _next_ledger(self, ended: OpenRound) -> Ledger:
        known = Ledger.model_fields
        told = {name: each for name, each in self.report if name in known and each is not None}
        quarantined = self.ledger.quarantined
        if ended.leases:
            epoch, num_before = quarantined
            num_before = num_before if epoch == self._book.epoch else 0
            quarantined = self._book.epoch, num_before + ended.num_quarantined
        update = {
            "commit": ended.commit,
            "round": ended.number,
            "metrics": self.ledger.metrics | self.report.metrics,
            "quarantined": quarantined,
        }
        return self.ledger.model_copy(update=told | update)

    def _tune(self, synced: Observation | None, now: float) -> None:
        """Move the interval, of which the next leases are, where what was measured asks for it."""
        tuner, error = self._tuner, self.report.validation_error
        if synced:
            losses_per_s = self._metrics.goodput.losses_per_s(now)
            tuner.reported(replace(synced, losses_per_s=losses_per_s))
        if error is not None:
            tuner.validated(error)
        tuner.agree(tuner.wanted)
        if moved := tuner.take_effect(now, self._metrics.step(self.ledger)):
            self._effects.append(moved)
        self.ledger = self.ledger.model_copy(update={"tuning": tuner.state})

    def _update_copies(self, ended: OpenRound, voters: Sequence[Group], now: float) -> None:
        """Groups that join become current; copies that were not in the commit are stale."""
        heard = set(voters)
        for group in self._groups.present:
            if group not in heard and group.copy == "live":
                group.copy = "stale"
        for group in voters:
            group.num_missed = 0
            if group not in ended.joining:
                continue
            is_start, donor = group.standing == "initial", group.donor_group
            group.make_current()
            self._metrics.goodput.train(group.group, now)
            joined = events.GroupJoined(
                time=now,
                how="start" if is_start else "peer_copy",
                donor=donor,
                copied_bytes=group.copied_bytes,
                duration_s=now - group.joined_at,
                **group.identity,
            )
            self._effects.append(joined)

    def _may_leave(self, group: Group) -> bool:
        if group.leave_cause is None or not group.is_current:
            return group.leave_cause is not None
        return any(each is not group and not each.leave_cause for each in self._groups.current)

    def _hand_out(self) -> None:
        """Lease rows to the groups that are current: to each its first before any its second.

        To none while there are too few of them.
        """
        if self._is_short:
            return
        lengths = lease_lengths({group: group.speed for group in self._groups.current})
        scale = self._tuner.every_steps / self._policy.sync.intervals[0]
        for num_held in range(_LEASES_HELD):
            for group, length in lengths.items():
                if len(self._book.held(group.group)) <= num_held:
                    self._book.lease(group.group, scale * length)

    def _result(
        self, group: Group, number: int, committed: bool, should_leave: bool = False
    ) -> RoundResult:
        """The message about a round that has ended, for one group."""
        return RoundResult(
            committed=committed,
            round=number,
            ledger=self.ledger,
            leases=self._book.held(group.group),
            leader=self._groups.choose_leader() or 0,
            share=group.share,
            standing=group.standing if group.is_current or group.copy == "live" else "initial",
            should_leave=should_leave,
            has_finished=committed and self.has_finished,
            num_saves=self.num_saves,
        )
