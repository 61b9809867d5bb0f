"""What may befall an elastic job, one thing after another, and how to tell that it got over it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.harness.elastic import ElasticHarness, Record
from tests.harness.elastic_checks import check_copies, check_rows
from tests.harness.sessions import make_config
from tests.harness.wait import scaled
from trainer.data.reader import open_source
from trainer.fault_injection import KINDS, PHASES, Fault, Kind, Phase
from trainer.protocol.worker_config import WorkerConfig

FATAL: tuple[Kind, ...] = ("exit", "sigkill", "sigstop")
COMMITS_AFTER = 3
TIMEOUT_S = 90.0
PACE_S = 0.04
SLOW_PACE_S = 0.3


def elastic_config(
    data: Path, run_dir: Path, num_groups: int, num_ranks: int, *overrides: str
) -> WorkerConfig:
    """The demo job on small data, in groups that are failure domains."""
    return make_config(
        data,
        run_dir,
        f"parallelism.workers={num_groups * num_ranks}",
        f"parallelism.shard_group_size={num_ranks}",
        "parallelism.placement=inter_host",
        "parallelism.sync.every_steps=2",
        "parallelism.dense=auto",
        "data.batch_size=16",
        "training.validate_every_steps=null",
        "training.on_non_finite=skip",
        "checkpoint.every_steps=25",
        "checkpoint.keep_best=false",
        f"recovery.start_grace_s={scaled(30)}",
        # Patient: on a machine that does other things too, nobody must be taken for dead.
        f"recovery.heartbeat_timeout_s={scaled(4)}",
        f"recovery.exchange_timeout_s={scaled(4)}",
        "training.epochs=2",
        *overrides,
    )


def num_train_rows(config: WorkerConfig) -> int:
    """Rows of one epoch."""
    data = config.spec.data
    return open_source(config.spec, Path(data.path) / data.split.train).num_rows


@dataclass
class Campaign:
    """Strikes a harness, and waits each time until it is whole again.

    Leases take `pace_s` longer while it lasts, and if it `stretches` the job even more in the
    second half of the rows, so that it fits in.
    """

    harness: ElasticHarness
    random: Random
    pace_s: float = PACE_S
    stretches: bool = True
    struck: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Wait until every group trains."""
        self.harness.set_pace(self.pace_s)
        self.harness.wait_for(self._is_whole, TIMEOUT_S, "all groups are current")

    def strike(self, kind: Kind, phase: Phase, arg: float = 0.0) -> None:
        """Let one rank of some group be struck; at a checkpoint, of the group that saves it."""
        groups = self.harness.groups
        aimed_at = groups if phase == "checkpoint" else [self.random.choice(groups)]
        rank = self.random.randrange(self.harness.num_ranks)
        self.struck.append(f"{kind} at {phase} of rank {rank} of a group of {aimed_at}")
        num_before = len(self.harness.of("struck"))
        self.harness.inject(
            *itertools.chain(*(self._faults(kind, phase, g, rank, arg) for g in aimed_at))
        )
        self._wait(lambda: self._hits(num_before, kind, phase))
        self.harness.inject()
        hit = self._hits(num_before, kind, phase)[0]
        if kind in FATAL:
            self._wait(lambda: self.harness.life(hit["group"]).incarnation > hit["incarnation"])
        self.wait_until_over()

    def _faults(
        self, kind: Kind, phase: Phase, group: int, rank: int, arg: float
    ) -> Iterator[Fault]:
        """For the group's life and some to come: it may die of something else before."""
        first = self.harness.life(group).incarnation
        site = {"group": group, "rank": rank, "step": 0}
        if phase == "join":
            # It has to die to join again.
            yield Fault(kind="sigkill", phase="lookup", incarnation=first, **site)
            first += 1
        for incarnation in range(first, first + 3):
            yield Fault(kind=kind, phase=phase, incarnation=incarnation, arg=arg, **site)

    def _hits(self, num_before: int, kind: Kind, phase: Phase) -> list[Record]:
        later = self.harness.of("struck")[num_before:]
        return [hit for hit in later if (hit["kind"], hit["phase"]) == (kind, phase)]

    def kill_coordinator(self, down_s: float = 0.0) -> None:
        """SIGKILL of the coordinator; it comes back after a while, and no group dies of it."""
        self.struck.append(f"coordinator down for {down_s:.2f} s")
        self.harness.kill_coordinator(down_s)
        self.wait_until_over()

    def cut_off(self, group: int) -> None:
        """Cut the link of a group's host for as long as it takes to give the group up."""
        network = self.harness.network
        assert network, "the harness has no network that could be cut"
        self.struck.append(f"link of group {group} cut")
        incarnation = self.harness.life(group).incarnation
        network.cut(group + 1)
        self._wait(lambda: self.harness.life(group).incarnation > incarnation)
        network.mend(group + 1)
        self.wait_until_over()

    def strike_at_random(self) -> None:
        """Any kind at any phase, or the coordinator, or a link where there are any."""
        others = ["coordinator", "link"] if self.harness.network else ["coordinator"]
        kind = self.random.choice([*KINDS, *others])
        phase = self.random.choice(PHASES)
        if kind == "coordinator":
            self.kill_coordinator(self.random.uniform(0, 0.5))
        elif kind == "link":
            self.cut_off(self.random.choice(self.harness.groups))
        elif kind == "nan":
            self.strike("nan", "backward")
        elif kind == "storage_error":
            self.strike("storage_error", "checkpoint")
        else:
            self.strike(kind, phase, arg=self.random.uniform(0.2, 1.5) if kind == "slow" else 0)

    def wait_until_over(self) -> None:
        """Wait until some more syncs were committed and all groups are current."""
        commit = self.harness.commit
        self._wait(lambda: self.harness.commit >= commit + COMMITS_AFTER and self._is_whole())

    def finish(self, config: WorkerConfig) -> dict[str, Any]:
        """Let the job end, and check all that must hold; its newest ledger."""
        self.harness.inject()
        self.harness.set_pace(0)
        self.harness.wait_to_end(TIMEOUT_S)
        records = self.harness.records()
        assert check_copies(records) > 0
        whole = num_train_rows(config), config.spec.training.epochs
        return dict(check_rows(records, *whole))

    def _is_whole(self) -> bool:
        return all(self.harness.standing(group) == "current" for group in self.harness.groups)

    def _wait(self, is_there: Any) -> None:
        if self.stretches:
            self._stretch()
        self.harness.wait_for(is_there, TIMEOUT_S, f"the job is whole again after {self.struck}")

    def _stretch(self) -> None:
        """Slow down before the rows are used up."""
        newest = self.harness.of("committed")
        num_rows = self.harness.config.spec.training.epochs * num_train_rows(self.harness.config)
        if newest and newest[-1]["rows_trained"] > num_rows / 2:
            self.harness.set_pace(SLOW_PACE_S)
