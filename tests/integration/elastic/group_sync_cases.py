"""Groups that are worlds of their own, for the tests of what joins them: one rank's life in one."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.harness.ranks import run_ranks
from tests.harness.sessions import TOKEN
from tests.harness.wait import scaled
from tests.integration.ranks.sync_cases import (
    NUM_STEPS,
    SyncCase,
    Table,
    Training,
    clones,
    make_batch,
)
from trainer.coordination.client import Identity
from trainer.coordination.messages import Arrive, Ledger, RoundResult
from trainer.elastic.coordinator.interface import MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig
from trainer.elastic.group_session import connect
from trainer.elastic.group_sync import GroupSync
from trainer.parallel.sync import SyncReport
from trainer.protocol.events import GroupState
from trainer.spec.parallelism import SyncSpec
from trainer.spec.training import RecoverySpec

HOST = "127.0.0.1"
EXCHANGE_TIMEOUT_S = scaled(20)


@dataclass(frozen=True)
class Groups:
    """Groups of L = `num_ranks` ranks with the coordinator at `address`."""

    address: str
    num_ranks: int


def open_coordinator(num_groups: int, folder: Path, **policy: Any) -> Coordinator:
    """A coordinator that starts the run when `num_groups` groups have arrived.

    It is patient: the tests are about who is gone, not about who is slow on a busy machine.
    """
    times = RecoverySpec(heartbeat_timeout_s=scaled(20), exchange_timeout_s=scaled(15))
    book = LeaseBook(num_rows=10**9, epochs=1, rows_per_lease=8)
    return Coordinator(
        CoordinatorConfig(
            MembershipPolicy(num_groups, recovery=times, **policy), book, folder, TOKEN
        )
    )


def run_groups(
    task: Callable[..., Any],
    world_size: int,
    folder: Path,
    *args: Any,
    num_ranks: int = 1,
    timeout_s: float = 120,
    **policy: Any,
) -> list[Any]:
    """`run_ranks(task, world_size, groups, *args)`; the groups of `num_ranks` begin with two."""
    coordinator = open_coordinator(2, folder, **policy)
    groups = Groups(coordinator.address, num_ranks)
    try:
        return run_ranks(task, world_size, groups, *args, timeout_s=timeout_s, fresh=True)
    finally:
        coordinator.stop()


def case_of(num_ranks: int, **changes: Any) -> SyncCase:
    """A model with a row-wise, a table-wise and a data-parallel table, over one group."""
    tables = (Table(60, num_features=2), Table(37, "table_wise"), Table(5, "data_parallel"))
    values = {"tables": tables, "seed": 3} | changes
    return SyncCase(num_ranks, num_ranks, placement="inter_host", **values)


class Life:
    """One life of this rank in a group: model, member, sync."""

    def __init__(self, groups: Groups, group: int, incarnation: int = 0, **changes: Any) -> None:
        sync, check = changes.pop("sync", {}), changes.pop("check", None)
        self.groups, self.group, self.incarnation = groups, group, incarnation
        rank = _enter_world(groups, group, incarnation)
        self.training = Training(case_of(groups.num_ranks, **changes))
        identity = Identity(group, incarnation, rank, groups.num_ranks, HOST)
        self._connection = connect(identity, lambda: groups.address, scaled(2.0), TOKEN)
        self.member = self._connection.__enter__()
        self.sync = GroupSync(
            self.training.model,
            SyncSpec(**sync),
            lambda: self.training.optimizers.synced_whole(dense=True),
            self.member,
            RecoverySpec(exchange_timeout_s=EXCHANGE_TIMEOUT_S),
            self.training.warnings.append,
            check,
        )
        self.ledger = Ledger()
        self.standing: GroupState = "initial"
        self.leases: list[Any] = []
        self.hashes: dict[int, str] = {}

    def join(self) -> None:
        """Say hello as one that holds what the seed made."""
        self.member.join("initial", "seed", self.ledger, self.sync.donor)

    def join_late(self) -> None:
        """Say hello as one that copies, once there is somebody to copy from."""
        self.standing = "listening"
        while not self.member.join("listening", "", self.ledger, self.sync.donor).has_current:
            time.sleep(0.02)

    def train(self, num_steps: int = 1) -> None:
        """Take some steps on rows that no other rank of any group has."""
        training, rank = self.training, self.training.groups.rank
        for _ in range(num_steps):
            training.step += 1
            training.optimizers.begin_step(min(training.step, NUM_STEPS), NUM_STEPS)
            number = self.group * self.groups.num_ranks + rank
            batch = make_batch(training.case, training.step, number, self.group)
            loss, _ = training.model(batch)
            loss.backward()
            training.optimizers.step()

    def exchange(self, num_rows: int = 8, **arrival: Any) -> tuple[RoundResult, SyncReport]:
        """A committed sync after an interval, if any, of `num_rows` rows."""
        self.begin(num_rows, **arrival)
        return self.finish()

    def begin(self, num_rows: int = 8, num_leases: int = 1, **arrival: Any) -> bool:
        """Begin a sync after an interval, if any, of `num_rows` rows; whether it overlaps."""
        has_trained = self.standing == "current" and self.leases and num_rows > 0
        leases = tuple(lease.id for lease in self.leases[:num_leases]) if has_trained else ()
        self._make_arrival = lambda: Arrive(
            commit=self.ledger.commit,
            leases=leases,
            num_rows=num_rows if has_trained else 0,
            **arrival,
        )
        return self.sync.begin(self._make_arrival)

    def finish(self) -> tuple[RoundResult, SyncReport]:
        verdict, report = self.sync.end(self._make_arrival)
        self.ledger, self.standing = verdict.ledger, verdict.standing
        self.leases = list(verdict.leases)
        if self.standing == "current":
            self.hashes[self.ledger.commit] = self.hash()
        return verdict, report

    def interval(self) -> SyncReport:
        """Train, if there is something to train, and sync."""
        if self.standing == "current" and self.leases:
            self.train()
        return self.exchange()[1]

    def standing_of(self, group: int, incarnation: int) -> GroupState | None:
        """How a group stood in the newest round, if it was in."""
        standings = {(each.group, each.incarnation): each.standing for each in self.sync.members}
        return standings.get((group, incarnation))

    def tensors(self) -> list[torch.Tensor]:
        """Everything that must be equal on all groups once a sync was exact, live."""
        weights, states = self.training.optimizers.synced_whole(dense=True)
        shards = self.training.model.table_shards()
        rows = [tensor for s in shards for tensor in (s.weight, *s.states.values())]
        return [*rows, *weights, *states]

    @property
    def are_states(self) -> list[bool]:
        """Which of the tensors are optimizer state."""
        weights, states = self.training.optimizers.synced_whole(dense=True)
        shards = self.training.model.table_shards()
        rows = [is_state for s in shards for is_state in (False, *(True for _ in s.states))]
        return [*rows, *(False for _ in weights), *(True for _ in states)]

    def state(self) -> list[torch.Tensor]:
        """The same, as it is now."""
        return clones(self.tensors())

    def hash(self) -> str:
        """Of what the last sync made equal."""
        digest = hashlib.sha256()
        has_states = self.sync.is_exact or self.sync._spec.optimizer_state == "every"
        for tensor, is_state in zip(self.tensors(), self.are_states, strict=True):
            if is_state and not has_states:
                continue
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def spoil(self) -> None:
        """Make it what no group can use: NaN wherever it is to be copied."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(torch.nan)

    def end(self) -> None:
        """Be gone, as a process that died is for the others."""
        self.sync.close()
        self._connection.__exit__(None, None, None)


def _enter_world(groups: Groups, group: int, incarnation: int) -> int:
    """Leave the world that the rank was started in for its group's own; its rank there."""
    rank = dist.get_rank() % groups.num_ranks
    # Ports that were free when the test began may be taken by now.
    store = dist.PrefixStore(f"group{group}/{incarnation}", _get_default_store())
    dist.destroy_process_group()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=groups.num_ranks,
        timeout=timedelta(seconds=scaled(60)),
    )
    return rank


def assert_all_equal(lives: Sequence[dict[int, str]], num_ranks: int) -> None:
    """`hashes` of lives, ordered by group, then rank: equal after each commit, rank by rank."""
    for shard in range(num_ranks):
        copies = lives[shard::num_ranks]
        commits = set().union(*copies)
        for commit in commits:
            found = {hashes[commit] for hashes in copies if commit in hashes}
            assert len(found) == 1, f"commit {commit}, shard {shard}"
