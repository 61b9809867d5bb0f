"""A job's groups and coordinator as plain objects whose messages a test delivers one by one.

Groups behave as workers do, all ranks of one alike: train a lease, arrive, vote, apply. What they
would compute is stood for by the syncs that they applied, as {commit: round}: two copies are equal
if those are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.coordination.client import remembering
from trainer.coordination.detection import RankId
from trainer.coordination.messages import (
    Answer,
    Arrive,
    Heartbeat,
    Hello,
    Lease,
    Ledger,
    Numbered,
    RankProcess,
    Rejection,
    Report,
    Round,
    RoundResult,
    Share,
    Vote,
    Welcome,
)
from trainer.coordination.sync_tuner import Observation
from trainer.elastic.coordinator.interface import CoordinatorStatus, Effect, MembershipPolicy, Reply
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.membership import Membership
from trainer.protocol.events import Event, GroupState, RowsSkipped
from trainer.spec.training import RecoverySpec

NUM_RANKS = 2
COPIED_BYTES = 1000
ROWS, EPOCHS, ROWS_PER_LEASE = 40, 2, 4
BAD_ROWS = range(5, 9)


@dataclass
class Checkpoint:
    """A ledger, and the syncs that the saved state has applied."""

    ledger: Ledger = field(default_factory=Ledger)
    applied: dict[int, int] = field(default_factory=dict)


@dataclass
class Copy:
    """A listener's copy: the commit that its donor held at the start, and those heard since."""

    base: int
    heard: list[int] = field(default_factory=list)
    has_applied: bool = False  # averages, in which there is all that no copy serves
    is_done: bool = False


class SimGroup:
    """One life of a group: what it knows, what it asked, what was sent to it."""

    def __init__(
        self,
        world: World,
        speaker: RankId,
        checkpoint: Checkpoint,
        standing: GroupState = "initial",
    ) -> None:
        self.world, self.id = world, speaker
        self.inbox: deque[tuple[int, Answer]] = deque()
        self.outbox: deque[Numbered] = deque()
        self.hello = Hello(
            group=speaker.group,
            incarnation=speaker.incarnation,
            ranks=tuple(
                RankProcess(
                    rank=rank,
                    host=f"host-{speaker.group}" + (f"-{rank}" if world.spreads else ""),
                    pid=1,
                    donor=f"donor-{rank}",
                )
                for rank in range(NUM_RANKS)
            ),
            origin=f"commit-{checkpoint.ledger.commit}",
            standing=standing,
            ledger=checkpoint.ledger,
        )
        self.applied = dict(checkpoint.applied)
        self.standing = standing
        self.ledger = checkpoint.ledger
        self.copy: Copy | None = None
        self.interval: tuple[Lease, ...] = ()
        self.ahead: tuple[Lease, ...] = ()  # trained since it arrived, where the round overlaps
        self.measured: Share | None = None
        self.is_poisoned = False
        self.will_refuse = self.has_refused = False
        self.is_through = False
        self.is_fenced = False
        self.is_dismissed = False
        self.round: Round | None = None
        self.request: Numbered | None = None
        self._next_id = 1
        self.connect()

    def connect(self) -> None:
        """Say hello, and again what is unanswered."""
        self.inbox.clear()
        self.outbox.clear()
        self.outbox.append(Numbered(id=0 if self.request else 1, body=self.hello))
        if self.request:
            self.outbox.append(self.request)

    def ask(self, body: Arrive | Vote) -> None:
        self._next_id += 1
        self.request = Numbered(id=self._next_id, body=body)
        self.outbox.append(self.request)

    def hear(self) -> None:
        request_id, body = self.inbox.popleft()
        if isinstance(body, Rejection):
            self.is_dismissed |= body.reason == "dismissed" and not self.is_fenced
            self.is_fenced = not self.is_dismissed
        elif isinstance(body, Welcome):
            if self.request is None and not self.is_through:
                self.arrive()
        elif request_id and self.request and request_id == self.request.id:
            self.request = None
            self.hello = remembering(self.hello, body)
            if isinstance(body, Round):
                self.hear_round(body)
            else:
                assert isinstance(body, RoundResult)
                self.hear_verdict(body)

    @property
    def next_leases(self) -> tuple[Lease, ...]:
        """The lease to train next, if it holds one."""
        held = (lease for lease in self.hello.leases if lease not in self.interval)
        return tuple(held)[:1] if self.standing == "current" else ()

    @property
    def num_rows(self) -> int:
        return sum(lease.num_rows for lease in self.interval)

    @property
    def num_bad(self) -> int:
        """Rows that it left out, as they cannot be used."""
        spans = (span for lease in self.interval for span in lease.spans)
        return sum(row in BAD_ROWS for span in spans for row in range(*span))

    @property
    def may_overlap(self) -> bool:
        return self.world.overlaps and not self.must_measure and bool(self.next_leases)

    @property
    def must_measure(self) -> bool:
        """Whether a validation is due on what it holds, as all groups know."""
        return self.world.validation_due

    def arrive(self) -> None:
        is_done = self.copy is not None and self.copy.is_done
        has_finished = self.ledger.epoch == EPOCHS
        self.ask(
            Arrive(
                commit=self.ledger.commit,
                leases=tuple(lease.id for lease in self.interval),
                num_rows=self.num_rows,
                train_s=self.num_rows / self.world.speeds.get(self.id.group, 1.0),
                measured=self.measured,
                synced=self.world.synced,
                num_quarantined=self.num_bad,
                has_copied=is_done and self.copy.has_applied,
                copied_bytes=COPIED_BYTES if is_done else 0,
                is_poisoned=self.is_poisoned,
                may_overlap=self.may_overlap,
                needs_exact=self.id.group in self.world.needing_exact,
                report=Report(
                    metrics={f"of group {self.id.group}": 1.0},
                    has_finished=has_finished,
                    validation_error=self.world.validation_error,
                ),
            )
        )

    def hear_round(self, round_: Round) -> None:
        self.round = round_
        own = next(m for m in round_.members if m.group == self.id.group)
        assert own.incarnation == self.id.incarnation
        if own.standing == "listening":
            assert round_.weights[round_.members.index(own)] == 0
            assert round_.donors or self.world.status.has_finished
            self.copy = self.copy or Copy(round_.commit - 1)
        if round_.overlaps:
            assert all(member.standing == "current" for member in round_.members)
            self.ahead = self.next_leases
        suspects = self.unreachable_in(round_)
        results = (body for _, body in self.inbox if isinstance(body, RoundResult))
        gave_up = any(each.round == round_.round for each in results)  # it has failed meanwhile
        ok, self.will_refuse = not (self.will_refuse or suspects or gave_up), False
        self.has_refused = not ok
        spoilt = [(self.id.group, rank) in self.world.spoilt for rank in range(NUM_RANKS)]
        checksums = tuple(
            (("users", is_spoilt * (1 + self.id.group)), ("averages", 7)) for is_spoilt in spoilt
        )
        self.ask(
            Vote(
                round=round_.round,
                commit=round_.commit,
                ok=ok,
                error="" if ok else "refused",
                suspects=suspects,
                gave_up=gave_up,
                checksums=checksums,
            )
        )

    def unreachable_in(self, round_: Round) -> tuple[int, ...]:
        """Groups that it cannot exchange data with: those that are cut off, or else all others."""
        others = {member.group for member in round_.members} - {self.id.group}
        is_cut_off = self.id.group in self.world.cut_off
        return tuple(sorted(others if is_cut_off else others & self.world.cut_off))

    def hear_verdict(self, verdict: RoundResult) -> None:
        voted = self.round
        assert voted and verdict.round == voted.round
        if verdict.committed:
            assert not self.has_refused
            assert (verdict.ledger.commit, verdict.ledger.round) == (voted.commit, voted.round)
            self.apply(voted)
        self.measured = None
        if verdict.standing == "current" and self.standing != "current":
            self.become_current(verdict)
        if verdict.standing != "current":
            self.standing, self.interval, self.is_poisoned = "listening", (), False
            self.ahead = ()
        if verdict.standing == "initial":
            self.copy = None
        self.ledger = verdict.ledger
        if verdict.committed and verdict.standing == "current":
            self.interval = self.ahead
            if self.must_measure and not self.ahead:
                self.measured = verdict.share
            else:
                self.train(() if self.ahead else verdict.leases[:1])
        elif self.ahead:
            self.train(self.ahead)
        self.ahead = ()
        self.is_through = verdict.has_finished or verdict.should_leave
        if verdict.has_finished and self.standing == "current":
            self.world.end = self.world.end or Checkpoint(verdict.ledger, dict(self.applied))
        if not self.is_through:
            self.arrive()

    def apply(self, voted: Round) -> None:
        if self.copy:
            self.copy.heard.append(voted.commit)
            self.copy.has_applied |= not voted.is_idle
        else:
            self.applied[voted.commit] = voted.round

    def become_current(self, verdict: RoundResult) -> None:
        if self.copy:
            newest = verdict.ledger.commit
            assert self.copy.is_done, "a group became current before its copy was complete"
            assert self.copy.heard == list(range(self.copy.base + 1, newest + 1))
            self.applied = dict(self.world.history[newest, verdict.round])
            self.world.spoilt -= {(self.id.group, rank) for rank in range(NUM_RANKS)}
        self.copy, self.standing = None, "current"

    def train(self, leases: tuple[Lease, ...]) -> None:
        self.interval += leases
        self.is_poisoned |= any(self.world.is_poison(lease) for lease in self.interval)
        self.is_poisoned |= bool(self.interval) and self.id.group in self.world.poisoned_groups


class World:
    """The job. Time stands still but for `wait`."""

    def __init__(
        self, num_groups: int = 3, overlaps: bool = False, spreads: bool = False, **policy: Any
    ) -> None:
        """`policy` overrides fields of `MembershipPolicy`, and of its `recovery`.

        Where it `spreads`, each rank has a host of its own.
        """
        self.num_groups, self.spreads = num_groups, spreads
        self.overlaps = overlaps
        self.synced: Observation | None = None  # what syncs take all groups
        self.validation_error: float | None = None
        self.needing_exact: set[int] = set()
        self.speeds: dict[int, float] = {}  # rows per second of groups, 1 where it is not said
        self.validation_due = False
        self.joined: list[set[Share]] = []  # what was added up to each whole validation
        limits = {"start_grace_s": 30.0, "heartbeat_timeout_s": 1.0, "exchange_timeout_s": 2.5}
        limits |= {name: policy.pop(name) for name in RecoverySpec.model_fields if name in policy}
        self.policy = MembershipPolicy(
            **{"num_groups": num_groups, "on_non_finite": "skip"} | policy,
            recovery=RecoverySpec(**limits),
        )
        self.now = 1000.0
        self.checkpoint = Checkpoint()
        self.incarnations = dict.fromkeys(range(num_groups), 0)
        self.groups: dict[int, SimGroup] = {}
        self.rounds: dict[int, Round] = {}
        self.trained: dict[tuple[int, int], list[Lease]] = {}
        self.history: dict[tuple[int, int], dict[int, int]] = {}
        self.events: list[Event] = []
        self.poison: set[tuple[int, int]] = set()
        self.poisoned_groups: set[int] = set()  # whatever they train
        self.cut_off: set[int] = set()  # groups whose data link is dead
        self.hung: set[int] = set()
        self.spoilt: set[tuple[int, int]] = set()  # (group, rank) whose copy has a flipped bit
        self.end: Checkpoint | None = None
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """A new one that knows nothing; every group connects again."""
        self.membership = Membership(self.policy, LeaseBook(ROWS, EPOCHS, ROWS_PER_LEASE))
        self.greeted: dict[int, int] = {}
        for group in self.lives():
            if not (group.is_fenced or group.is_dismissed or group.is_through):
                group.connect()

    def start_group(self, group: int, standing: GroupState = "initial") -> None:
        """A life of a group, from a live donor or from the checkpoint."""
        speaker = RankId(group, self.incarnations.setdefault(group, 0), 0)
        self.groups[group] = SimGroup(self, speaker, self.checkpoint, standing)

    def kill(self, group: int) -> None:
        """A group ends; the next life is another one."""
        life = self.groups.pop(group)
        self.hung.discard(group)
        self.incarnations[group] += 1
        self.act(self.membership.on_disconnect(life.id, self.now))

    def deliver(self, group: SimGroup) -> None:
        """One line from a group reaches the coordinator."""
        line = group.outbox.popleft()
        body, membership = line.body, self.membership
        if isinstance(body, Hello):
            known = self.greeted.get(group.id.group, 0)
            self.greeted[group.id.group] = max(known, group.id.incarnation)
            self.act(membership.on_hello(body, line.id, self.now))
        elif isinstance(body, Arrive):
            self.act(membership.on_arrive(group.id, line.id, body, self.now))
        else:
            assert isinstance(body, Vote)
            self.act(membership.on_vote(group.id, line.id, body, self.now))

    def want(
        self, *groups: int, leaving: Mapping[int, str] = {}, reason: str = "host_lost"
    ) -> None:
        """The driver has these groups, others are to leave, and some were lost for `reason`."""
        lost = {g: (n - 1, reason, ["a"]) for g, n in self.incarnations.items() if n}
        lives = {(each, self.incarnations.get(each, 0)): leaving[each] for each in leaving}
        self.act(self.membership.want(groups, 0, lives, 0, lost, self.now))

    def wait(self, seconds: float) -> None:
        """Time passes; groups that do not hang beat."""
        self.now += seconds
        for group in self.lives():
            if group.id.group not in self.hung and not group.outbox:
                beats = [
                    Heartbeat(rank=rank, progress=0, phase="train") for rank in range(NUM_RANKS)
                ]
                self.act(self.membership.on_heartbeats(group.id, beats, self.now))
        self.act(self.membership.tick(self.now))

    def act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.send(effect)
            else:
                self.events.append(effect)

    def enter(self, result: RoundResult) -> None:
        """Note a commit's leases, and all that a copy which is current has applied by then."""
        sync = result.ledger.commit, result.ledger.round
        if sync in self.trained:
            return
        members = self.rounds[result.round].members
        knowing = [self.groups[m.group] for m in members if m.standing != "listening"]
        assert knowing or self.status.has_finished
        self.trained[sync] = [lease for group in knowing for lease in group.interval]
        if self.rounds[result.round].joins_validation:
            assert not self.trained[sync], "some group trained what others measured"
            self.joined.append({g.measured for g in knowing if g.measured})
            self.validation_due = False
        if knowing:
            self.history[sync] = knowing[0].applied | {sync[0]: sync[1]}

    def send(self, reply: Reply) -> None:
        if isinstance(reply.body, Round):
            number, before = reply.body.round, self.rounds.get(reply.body.round)
            now = reply.body.members, reply.body.weights
            if before and (before.members, before.weights) != now:
                # All who were in a round of this number are gone, and the coordinator forgot it.
                self.trained = {
                    sync: each for sync, each in self.trained.items() if sync[1] != number
                }
            self.rounds[number] = reply.body
            for member in reply.body.members:
                assert member.incarnation >= self.greeted[member.group], "a stale life in a round"
        elif isinstance(reply.body, RoundResult) and reply.body.committed:
            self.enter(reply.body)
        group = self.groups.get(reply.to.group)
        if group and group.id == reply.to:
            group.inbox.append((reply.id, reply.body))

    def save(self) -> None:
        """The leader's state becomes a durable checkpoint."""
        leader = self.leader
        if leader is not None and leader in self.groups:
            group = self.groups[leader]
            if group.standing == "current":
                self.checkpoint = Checkpoint(group.ledger, dict(group.applied))

    def is_poison(self, lease) -> bool:
        """Whether rows of this lease make the loss NaN."""
        return any(
            lease.epoch == epoch and start <= row < stop
            for epoch, row in self.poison
            for start, stop in lease.spans
        )

    def lives(self) -> list[SimGroup]:
        return [group for _, group in sorted(self.groups.items())]

    def current(self) -> list[SimGroup]:
        """The groups that the coordinator holds to be current."""
        status = self.status
        lives = {(g.group, g.incarnation) for g in status.groups if g.standing == "current"}
        groups = () if status.failure else self.lives()
        return [each for each in groups if each.id[:2] in lives and each.standing == "current"]

    @property
    def status(self) -> CoordinatorStatus:
        return self.membership.status()

    @property
    def ledger(self) -> Ledger:
        """What the newest commit says."""
        return self.membership._rounds.ledger

    @property
    def leader(self) -> int | None:
        return self.membership._groups.choose_leader()

    def told(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]

    def run_until(self, is_so: Callable[[], object]) -> None:
        for _ in range(2000):
            if is_so():
                return
            self.exchange(num_turns=1)
        raise AssertionError(f"it never came to that: {self.status}")

    def run_to_commit(self, commit: int) -> None:
        self.run_until(lambda: self.ledger.commit >= commit)

    def exchange(self, num_turns: int) -> None:
        """In each turn, every group hears a line or gets one through."""
        for _ in range(num_turns):
            for group in self.lives():
                if group.is_fenced or group.is_dismissed or group.id.group in self.hung:
                    continue
                if group.inbox:
                    group.hear()
                elif group.outbox:
                    self.deliver(group)

    def copy_all(self) -> None:
        for group in self.lives():
            if group.copy:
                group.copy.is_done = True

    def tend(self) -> None:
        """Start again what ended, as a supervisor does."""
        for group in range(self.num_groups):
            life = self.groups.get(group)
            if life and life.is_fenced:
                self.kill(group)
            if group not in self.groups:
                self.start_group(group)

    def run_to_end(self) -> None:
        """No more faults: the run must end, for every group of it."""
        self.hung.clear()
        for _ in range(300):
            if self.end is None:
                self.tend()
            elif all(g.is_through or g.is_fenced or g.is_dismissed for g in self.lives()):
                return
            self.exchange(num_turns=8)
            self.copy_all()
            self.wait(0.5)
        raise AssertionError(f"the run does not end: {self.status}")

    def check_rows(self) -> None:
        """Every row is in one committed sync of the final state's, or was skipped on purpose."""
        assert self.end, "the run has ended"
        ledger = self.end.ledger
        trained = [
            (lease.epoch, row)
            for sync in self.end.applied.items()
            for lease in self.trained[sync]
            for span in lease.spans
            for row in range(*span)
        ]
        assert len(trained) == len(set(trained)) == ledger.rows_trained
        skips = [event for event in self.events if isinstance(event, RowsSkipped)]
        skipped = {(s.epoch, row) for s in skips for row in range(s.start, s.stop)}
        missing = {(e, row) for e in range(EPOCHS) for row in range(ROWS)} - set(trained)
        assert missing <= skipped
        assert len(missing) == ledger.rows_skipped
