"""The coordinator's state machine: who trains, and which syncs count.

`Membership` takes a message, a request of the driver or the time, and returns the effects. `now` is
Unix time in seconds that never runs backwards. It decides who may join, who is lost and when a
round opens: once every current group is ready for it. `GroupRegistry` knows the groups,
`SyncRounds` what becomes of a round.

Nothing about the run is stored: every group keeps the newest ledger, its leases and the members of
its last round, and sends them in its `Hello`. A coordinator that was restarted waits for the groups
of the last round and takes over the newest ledger among them. A sync counts if any group received
its result; the others receive it when they repeat their vote.

A *speaker* is the first rank that a connection speaks for: in the domain `job` each worker speaks
for itself alone, and says no more than that it lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from trainer.coordination.client import finding_s
from trainer.coordination.detection import RankId, Suspect
from trainer.coordination.messages import (
    Arrive,
    GroupEnded,
    Heartbeat,
    Hello,
    Rejection,
    Vote,
    Welcome,
)
from trainer.elastic.coordinator.goodput import RunMetrics
from trainer.elastic.coordinator.groups import Group, GroupRegistry, choose_start, fenced
from trainer.elastic.coordinator.interface import (
    CoordinatorStatus,
    Effect,
    MembershipPolicy,
    Reply,
)
from trainer.elastic.coordinator.leases import LeaseBook, LeaseError
from trainer.elastic.coordinator.rounds import SyncRounds
from trainer.failures import EndReason
from trainer.protocol import events

_METRICS_EVERY_S = 10.0
_NUM_STRAGGLERS = 20
_MOST_NAMED = 4  # ranks, or hosts, in a message


class Membership:
    """The state of one run, rebuilt from what the groups say where it is lost."""

    def __init__(self, policy: MembershipPolicy, book: LeaseBook) -> None:
        """`book` is that of a fresh run."""
        self._policy = policy
        self._effects: list[Effect] = []
        self._groups = GroupRegistry(policy)
        self._metrics = RunMetrics(policy.rows_per_step)
        self._rounds = SyncRounds(policy, book, self._groups, self._metrics, self._effects)
        self._expected = set(range(policy.num_groups))
        self._stragglers: deque[events.StragglerFound] = deque(maxlen=_NUM_STRAGGLERS)
        self._start_since: float | None = None
        self._recovering_since: float | None = None
        self._knows_run = False  # how far it has come
        # Whether these (group, incarnation) of the last rounds have yet to come back.
        self._returning: dict[tuple[int, int], bool] = {}
        self._unwelcomed: list[tuple[RankId, int]] = []
        self._metrics_due: float | None = None

    @property
    def _is_recovering(self) -> bool:
        return self._recovering_since is not None

    def status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            has_finished=self._rounds.has_finished,
            groups=tuple(group.status() for group in self._groups.present),
            departures=tuple(self._groups.departures),
            stragglers=tuple(self._stragglers),
            failure=self._rounds.failure,
        )

    def _take_effects(self) -> list[Effect]:
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # --- messages

    def on_hello(self, hello: Hello, request_id: int, now: float) -> list[Effect]:
        """A group joins, for the first time or again after its connection broke."""
        speaker = RankId(hello.group, hello.incarnation, hello.ranks[0].rank)
        rejection = self._rejection_of(hello)
        if rejection:
            self._effects.append(Reply(speaker, request_id, rejection))
            return self._take_effects()
        known = self._groups.get(hello.group)
        is_newer = known is not None and known.incarnation < hello.incarnation
        if known and is_newer:
            message = f"incarnation {hello.incarnation} of the group has begun"
            self._rounds.lose(known, "replaced", message, now)
        if hello.members and not self._knows_run:
            self._recovering_since = self._recovering_since or now
            self._returning = dict.fromkeys(hello.members, True) | self._returning
        self._returning[hello.group, hello.incarnation] = False
        self._rounds.remember(hello.round, hello.generation)
        if self._groups.get(hello.group) is None and hello.standing != "spare":
            self._metrics.goodput.start(hello.group, now)
        self._groups.enter(hello, now)
        self._unwelcomed.append((speaker, request_id))
        if is_newer or self._is_recovering:  # otherwise a hello makes no round possible
            self._advance(now)
        self._welcome()
        return self._take_effects()

    def _rejection_of(self, hello: Hello) -> Rejection | None:
        """Why this group may not join; None if it may."""
        if self._rounds.failure:
            return Rejection(reason="failed", message=self._rounds.failure.message)
        number, oldest = hello.group, self._groups.first_incarnation(hello.group)
        if hello.incarnation < oldest:
            return fenced(
                f"incarnation {hello.incarnation} of group {number} is over: it was lost or left, "
                f"and from incarnation {oldest} on it may join again"
            )
        if hello.members and self._knows_run and self._groups.get(number) is None:
            return fenced(f"group {number} came back when the others had gone on without it")
        return None

    def _welcome(self) -> None:
        """Welcome the groups that wait for it; in a recovery only those in a round before it.

        The others ask by it whether there is somebody to copy from, which is not known yet.
        """
        waiting, self._unwelcomed = self._unwelcomed, []
        welcome = Welcome(has_current=bool(self._groups.current))
        for speaker, request_id in waiting:
            group = self._groups.find(speaker)
            if group and self._is_recovering and not group.was_in_round:
                self._unwelcomed.append((speaker, request_id))
            elif group:
                self._effects.append(Reply(speaker, request_id, welcome))

    def on_heartbeats(
        self, speaker: RankId, heartbeats: Sequence[Heartbeat], now: float
    ) -> list[Effect]:
        group = self._groups.find(speaker)
        if group:
            for each in heartbeats:
                rank = RankId(group.group, group.incarnation, each.rank)
                self._groups.monitor.beat(rank, each, now)
                if each.rank == 0:
                    self._metrics.record_heartbeat(group.group, each, now)
        return self._take_effects()

    def on_arrive(
        self, speaker: RankId, request_id: int, arrive: Arrive, now: float
    ) -> list[Effect]:
        group = self._accept(speaker, request_id, arrive)
        if group is None or self._rounds.repeat(group):
            return self._take_effects()
        if not self._is_recovering:
            self._rounds.inspect(group, now)
            if self._rounds.is_over or not self._groups.is_waited_for():
                self._advance(now)
        return self._take_effects()

    def on_vote(self, speaker: RankId, request_id: int, vote: Vote, now: float) -> list[Effect]:
        """A group holds the averages of a round, or could not form them."""
        group = self._accept(speaker, request_id, vote)
        if group and not self._is_recovering:
            self._rounds.vote(group, vote, now)
            self._advance(now)
        return self._take_effects()

    def _accept(self, speaker: RankId, request_id: int, request: Arrive | Vote) -> Group | None:
        """Keep a request until it is answered; reject that of an incarnation which is over."""
        group, failure = self._groups.find(speaker), self._rounds.failure
        if failure or group is None:
            message = "this incarnation of the group is over: it was lost, or left"
            over = Rejection(reason="failed", message=failure.message) if failure else None
            self._effects.append(Reply(speaker, request_id, over or fenced(message)))
            return None
        group.keep(request, request_id)
        return group

    def on_ended(self, speaker: RankId, ended: GroupEnded, now: float) -> list[Effect]:
        group = self._groups.find(speaker)
        return self._lose(group, ended.reason, ended.message, now) if group else []

    def on_disconnect(self, speaker: RankId, now: float, is_broken: bool = False) -> list[Effect]:
        """The connection of a group is closed, which ends it.

        One that broke after silence says nothing: that is the network, and the group may come back.
        """
        group = self._groups.find(speaker)
        if group is None or (is_broken and self._groups.monitor.may_be_cut_off(speaker, now)):
            return []
        host = group.ranks[speaker.rank].host
        message = f"rank {speaker.rank} on {host} ended: its connection was closed"
        return self._lose(group, "connection", message, now)

    def _lose(self, group: Group, reason: str, message: str, now: float) -> list[Effect]:
        self._rounds.lose(group, reason, message, now)
        self._advance(now)
        return self._take_effects()

    def forget_rank(self, rank: RankId) -> None:
        """Stop monitoring a rank whose connection is closed, without losing its group."""
        self._groups.monitor.forget_rank(rank)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; call it several times per heartbeat time-out."""
        self._groups.wake(now)
        lost, notes = self._groups.judge(now, only_silence=self._rounds.is_over)
        self._effects += notes
        for suspect in lost:
            self._lose_suspect(suspect, now)
        self._rounds.end_if_agreed(now)
        self._find_stragglers(now)
        self._advance(now)
        if self._metrics_due is None:
            self._metrics_due = now + _METRICS_EVERY_S
        if now >= self._metrics_due and not self._rounds.is_over:
            self._metrics_due = now + _METRICS_EVERY_S
            event = self._metrics.as_event(self._rounds.ledger, self._rounds.generation, now)
            self._effects.append(event)
        return self._take_effects()

    def _lose_suspect(self, suspect: Suspect, now: float) -> None:
        rank, phase, idle_s = suspect.rank, suspect.phase, suspect.idle_s
        group = self._groups.find(rank)
        if group is None:
            return
        host = group.ranks[rank.rank].host
        ranks = sorted(each.rank for each in suspect.alike)
        hosts = {group.ranks[each].host: None for each in ranks}  # in the order of their ranks
        if suspect.reason == "silent":
            message = f"rank {rank.rank} on {host} was silent for {idle_s} s"
        else:
            message = (
                f"rank {_any_of(ranks)} on {_any_of(hosts)} got nothing done for {idle_s:.1f} s in "
                f"{phase!r}{', and one of them hangs' if len(ranks) > 1 else ''}"
            )
            self._metrics.goodput.spend(rank.group, "hang", idle_s)
            at: dict[str, Any] = {"host": host, "phase": phase, "idle_s": idle_s}
            found = events.HangFound(time=now, group=rank.group, rank=rank.rank, **at)
            self._effects.append(found)
        self._rounds.lose(group, suspect.reason, message, now, host if len(hosts) == 1 else "")

    def _find_stragglers(self, now: float) -> None:
        for rank, slowness in self._groups.stragglers(now).items():
            group = self._groups.find(rank)
            assert group, "a straggler is there"
            found = events.StragglerFound(
                time=now,
                group=rank.group,
                rank=rank.rank,
                host=group.ranks[rank.rank].host,
                slowdown=slowness.slowdown,
                own_s=slowness.own_s,
                median_s=slowness.median_s,
                action="none",
            )
            self._stragglers.append(found)

    # --- requests of the driver

    def want(
        self,
        groups: Collection[int],
        num_missing: int,
        leaving: Mapping[tuple[int, int], events.LeaveCause],
        num_saves: int,
        lost: Mapping[int, tuple[int, str, Sequence[str]]],
        now: float,
    ) -> list[Effect]:
        """The job has these groups, which may still start, and is to get `num_missing` more.

        A spare among them joins: from the next round on it copies from one that trains. `leaving`
        has why others are to go, by (group, incarnation). So far `num_saves` checkpoints were asked
        for, which the leader is to save soon. `lost` has the (incarnation, reason, hosts) that a
        group was lost with last, without a reason where a coordinator told it. It is told again and
        again, as one of another coordinator may not have been heard. A start, or start over, waits
        for no others.
        """
        self._rounds.num_saves = num_saves
        self._expected &= set(groups)
        self._metrics.goodput.want(groups, num_missing, now)
        for group in self._groups.present:
            if group.is_spare and group.group in groups:
                group.standing, group.joined_at = "listening", now
            if cause := leaving.get((group.group, group.incarnation)):
                self._retire(group, cause, now)
        for number, (incarnation, reason, hosts) in lost.items():
            self._drop(number, incarnation, reason or EndReason.WORKERS_LOST, now)
            if self._returning.get((number, incarnation)):
                self._returning[number, incarnation] = False
                if self._groups.get(number) is None:
                    self._metrics.goodput.lose(number, now)
                if not reason:  # an earlier coordinator has told it
                    continue
                message = f"reported as lost: {reason}"
                at: dict[str, Any] = {"group": number, "incarnation": incarnation, "hosts": hosts}
                told = events.GroupLost(
                    time=now, reason=reason, message=message, rows_returned=0, **at
                )
                self._effects.append(told)
        self._advance(now)
        return self._take_effects()

    def _retire(self, group: Group, cause: events.LeaveCause, now: float) -> None:
        """Let a group go at the next commit.

        The last current group stays until another one is. Who has not begun goes at once.
        """
        if group.has_begun and not group.is_spare:
            group.leave_cause = cause
            return
        if group.is_spare:
            self._rounds.dismiss_spare(group, f"asked to leave: {cause}")
        else:
            self._effects += group.dismiss(fenced(f"asked to leave: {cause}"))
        self._rounds.let_go(group, cause, now)

    def drop(self, group: int, incarnation: int, reason: str, now: float) -> list[Effect]:
        """The driver knows that this incarnation of a group is lost."""
        self._drop(group, incarnation, reason, now)
        self._advance(now)
        return self._take_effects()

    def _drop(self, group: int, incarnation: int, reason: str, now: float) -> None:
        lost = self._groups.get(group)
        if lost and lost.incarnation == incarnation:
            self._rounds.lose(lost, reason, f"reported as lost: {reason}", now)
        elif lost is None:
            # A restarted coordinator need not wait for it, and nobody shall come back as it.
            self._groups.fence(group, incarnation)

    # --- progress

    def _advance(self, now: float) -> None:
        """End the recovery and open the next round, where that has become possible."""
        try:
            if self._is_recovering:
                self._end_recovery(now)
            if self._is_recovering or self._rounds.is_open:
                return
            self._rounds.lose_guilty(now)
            if self._groups.current or self._rounds.has_finished:
                self._start_since = None
                self._rounds.open_next(now)
            else:
                self._start(now)
            self._knows_run |= self._rounds.is_open
        except LeaseError as error:
            self._rounds.fail(EndReason.DATA_ERROR, str(error), now)

    def _start(self, now: float) -> None:
        """Begin the run, at first or after all copies were lost, with whom has the newest state.

        Raises `LeaseError`.
        """
        ready = [g for g in self._groups.present if g.is_ready and not g.is_spare]
        for group in ready:
            if group.standing != "initial":
                message = "no group is left that it could copy from"
                self._rounds.lose(group, "no_donor", message, now)
        able = [group for group in ready if group.standing == "initial"]
        if not able:
            return
        if self._start_since is None:
            self._start_since = now
        is_late = now >= self._start_since + self._policy.recovery.start_grace_s
        if is_late or self._expected <= {group.group for group in able}:
            starts = choose_start(able)
            self._rounds.begin_from(starts[0].hello.ledger, starts[0].group)
            self._rounds.open(able, starts, now)

    # --- recovery

    def _end_recovery(self, now: float) -> None:
        """Take the run over as the groups describe it, once all are back or the time has passed.

        Raises `LeaseError`.
        """
        since = self._recovering_since
        assert since is not None, "it recovers"
        is_late = now >= since + finding_s(self._policy.recovery.heartbeat_timeout_s)
        if not is_late and not all(self._groups.is_back_or_over(*each) for each in self._returning):
            return
        self._recovering_since, self._knows_run = None, True
        trained = [each for each in self._groups.present if each.hello.standing == "current"]
        if trained:
            self._rounds.take_over(trained, since, now)
        self._welcome()
        for group in self._groups.present:
            if isinstance(group.request, Vote):
                self._rounds.vote(group, group.request, now)
            elif group.is_ready:
                self._rounds.inspect(group, now)


def _any_of(found: Iterable[object]) -> str:
    """`0 or 1`; of many the first."""
    names = [str(each) for each in found]
    if len(names) > _MOST_NAMED:
        names[1:] = [f"any of {len(names) - 1} others"]
    return " or ".join(names)
