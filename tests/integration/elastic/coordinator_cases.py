"""Ranks that do all but train, against a real coordinator: what `test_coordinator` starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness.processes import die_with_parent
from tests.harness.wait import scaled
from trainer.coordination.client import CoordinatorClient, Fenced, Identity
from trainer.coordination.messages import Arrive, GroupState, Ledger, Report, RoundResult, Vote

EPOCHS, ROWS, ROWS_PER_LEASE = 2, 400, 5
FENCED = 3
LEASE_S = 0.01


class Life:
    """One life of a rank, which copies nothing and computes nothing, but says that it did."""

    def __init__(self, identity: Identity, locate: Callable[[], str], timeout_s: float) -> None:
        self.member = CoordinatorClient(identity, locate, timeout_s)
        self.identity = identity
        self.ledger = Ledger()
        self.standing: GroupState = "initial"
        self.verdict: RoundResult | None = None
        self.num_heard = 0

    def join(self) -> None:
        """As a listener where somebody is current, else from the start."""
        asked = self.member.join("listening", "", self.ledger, "")
        self.standing = "listening" if asked.has_current else "initial"
        self.member.join(self.standing, "seed-0", self.ledger, "")

    def run(self) -> RoundResult:
        """Until the run ends, or the group is to leave."""
        self.join()
        while self.verdict is None or not (self.verdict.has_finished or self.verdict.should_leave):
            self.sync()
        self.member.close()
        return self.verdict

    def sync(self) -> None:
        """Train a lease, if there is one, and sync until it counts."""
        leases = self.verdict.leases[:1] if self.verdict else ()
        time.sleep(LEASE_S if leases else 0)
        self.member.progress("train", self.ledger.commit, LEASE_S)
        while True:
            round_ = self.member.arrive(self.arrival(leases))
            vote = Vote(round=round_.round, commit=round_.commit, ok=True)
            self.verdict = self.member.vote(vote)
            self.ledger, self.standing = self.verdict.ledger, self.verdict.standing
            if self.verdict.committed:
                self.num_heard = 0 if self.standing == "initial" else self.num_heard + 1
                return

    def arrival(self, leases) -> Arrive:
        """What the rank comes with; its report says that the run is over once all rows are."""
        return Arrive(
            standing=self.standing,
            commit=self.ledger.commit,
            leases=tuple(lease.id for lease in leases),
            num_rows=sum(lease.num_rows for lease in leases),
            has_copied=self.num_heard > 1,
            report=Report(has_finished=self.ledger.epoch == EPOCHS),
        )


def live(identity: Identity, address: str, timeout_s: float) -> None:
    """A process that lives one life; ends with exit code FENCED when it is over before its time."""
    die_with_parent()
    life = Life(identity, lambda: address, timeout_s)
    life.member.on_refusal = lambda _: os._exit(FENCED)
    try:
        life.run()
    except Fenced:
        os._exit(FENCED)


def coordinate(port: int, timeout_s: float, num_groups: int, folder: Path, pipe: Connection):
    """A process that coordinates until it is killed."""
    die_with_parent()
    coordinator = start(port, timeout_s, num_groups, folder)
    pipe.send(coordinator.address)
    pipe.recv()


def start(port: int, timeout_s: float, num_groups: int, folder: Path):
    """A coordinator on a thread; its events go to `folder`."""
    from trainer.elastic.coordinator.interface import MembershipPolicy
    from trainer.elastic.coordinator.leases import LeaseBook
    from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig

    policy = MembershipPolicy(
        num_groups,
        heartbeat_timeout_s=timeout_s,
        start_grace_s=scaled(60),
        recovery_grace_s=scaled(20),
    )
    book = LeaseBook(ROWS, EPOCHS, ROWS_PER_LEASE)
    return Coordinator(CoordinatorConfig(policy, book, folder, port=port))


def has_every_row_once(ledger: Ledger) -> bool:
    """Whether all rows are in a committed sync, by their places and by their number."""
    return (ledger.epoch, ledger.rows_trained) == (EPOCHS, EPOCHS * ROWS)
