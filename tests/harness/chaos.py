"""What may befall an elastic job, one thing after another, and how to tell that it got over it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from tests.harness.elastic import ElasticHarness, Record
from tests.harness.elastic_checks import check_copies, check_rows
from tests.harness.emulated import EmulatedHosts
from tests.harness.sessions import make_config
from tests.harness.wait import scaled
from trainer.data.reader import open_source
from trainer.fault_injection import KINDS, PHASES, Fault, Kind, Phase
from trainer.protocol.worker_config import WorkerConfig

FATAL: tuple[Kind, ...] = ("exit", "sigkill", "sigstop")
GroupLink = Literal["link", "control link", "data link"]
"""Of a group's host: to all, to the coordinator, to the other groups."""
LINKS: tuple[GroupLink, ...] = get_args(GroupLink)
NETWORK_FAULTS = (*LINKS, "coordinator's link", "store's link")
COORDINATOR_HOST, STORE_HOST = 0, 4
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
        self.harness.set_pace(self.pace_s)
        self.harness.wait_for(self._is_whole, TIMEOUT_S, "all groups are current")

    def strike(self, kind: Kind, phase: Phase, arg: float = 0.0) -> None:
        """Let one rank of some group be struck; at a checkpoint, of the group that saves it."""
        groups = self.harness.groups
        aimed_at = groups if phase == "checkpoint" else [self.random.choice(groups)]
        rank = self.random.randrange(self.harness.num_ranks)
        self._note(f"{kind} at {phase} of rank {rank} of a group of {aimed_at}")
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
        self._note(f"coordinator down for {down_s:.2f} s")
        self.harness.kill_coordinator(down_s)
        self.wait_until_over()

    def cut_off(self, group: int, link: GroupLink) -> None:
        """Cut a link of a group's host for as long as it takes to give the group up.

        No other group is. Where there are two, either may have the dead data link.
        """
        others = [each + 1 for each in self.harness.groups if each != group]
        far: dict[GroupLink, list[int]]
        far = {"link": [], "control link": [COORDINATOR_HOST], "data link": others}
        doomed = [group] if len(others) > 1 or link != "data link" else self.harness.groups
        self._note(f"{link} of group {group} cut")
        before = self._incarnations()
        self._network.cut(group + 1, *far[link])
        self._wait(lambda: any(self._incarnations()[each] > before[each] for each in doomed))
        self._network.mend(group + 1, *far[link])
        self.wait_until_over()
        lost = [each for each, life in self._incarnations().items() if life > before[each]]
        departures = self.harness.coordinator.call("status").departures
        self._note(f"group {lost} given up: {departures[-1].reason}")
        assert len(lost) == 1 and lost[0] in doomed, f"another group was given up: {self.struck}"

    def cut_off_coordinator(self, down_s: float) -> None:
        """Cut the link of the coordinator's host for a while: nobody is given up for that."""
        self._note(f"link of the coordinator's host cut for {down_s:.1f} s")
        with self._costs_no_group():
            self._network.cut(COORDINATOR_HOST)
            time.sleep(down_s)
            self._network.mend(COORDINATOR_HOST)

    def stop_store(self) -> None:
        """Cut the link of the store's host until a save is overdue: the groups train on."""
        self._note("link of the store's host cut")
        every = self.harness.config.spec.checkpoint.every_steps
        num_rows = every * self.harness.config.spec.parallelism.world_size
        num_rows *= self.harness.config.spec.data.batch_size
        with self._costs_no_group():
            self._network.cut(STORE_HOST)
            rows = self._rows()
            self._wait(lambda: self._rows() > rows + num_rows)
            self._network.mend(STORE_HOST)

    @contextmanager
    def _costs_no_group(self) -> Iterator[None]:
        """Wait until the job is whole again after the block; no group is started again for it."""
        before = self._incarnations()
        yield
        self.wait_until_over()
        assert self._incarnations() == before, f"groups were given up: {self.struck}"

    def strike_at_random(self) -> None:
        """Any kind at any phase, or the coordinator, or a link where there are any."""
        others = ["coordinator", *(NETWORK_FAULTS if self.harness.network else ())]
        kind = self.random.choice([*KINDS, *others])
        phase = self.random.choice(PHASES)
        if kind == "coordinator":
            self.kill_coordinator(self.random.uniform(0, 0.5))
        elif kind in LINKS:
            self.cut_off(self.random.choice(self.harness.groups), kind)
        elif kind == "coordinator's link":
            timeout_s = self.harness.config.spec.recovery.heartbeat_timeout_s
            self.cut_off_coordinator(self.random.uniform(0.5, 4) * timeout_s)
        elif kind == "store's link":
            self.stop_store()
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

    def _note(self, what: str) -> None:
        print(what, flush=True)
        self.struck.append(what)

    @property
    def _network(self) -> EmulatedHosts:
        assert self.harness.network, "the harness has no network that could be cut"
        return self.harness.network

    def _incarnations(self) -> dict[int, int]:
        return {group: self.harness.life(group).incarnation for group in self.harness.groups}

    def _rows(self) -> int:
        return max((each["rows_trained"] for each in self.harness.of("committed")), default=0)

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
