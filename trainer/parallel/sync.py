"""Sync: averaging the copies of every shard over its replica group, by the policy of the spec.

Collectives, all on the *replica group* of the rank; nothing runs on the sharding group or on the
global group:

    touched_rows   1. all-gather: how many rows each copy touched
                   2. all-gather: which ones (places, or all bits where that is shorter)
                   3. all-to-all and all-gather: means of the union's rows, with their moments
    full           all-to-all and all-gather: means of every row, with their moments

What is always averaged whole (`extra`) goes along with the rows. Means are formed in fp32 and in a
fixed order (`trainer.parallel.averaging`), so afterwards all copies are bitwise equal, and
touched_rows gives what full gives: bitwise for M a power of two; otherwise full lets rows that
nobody touched drift by a rounding, which touched_rows does not.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from trainer.parallel.averaging import Block, ReplicaCollectives
from trainer.parallel.touched_rows import RowNumbers, TouchedRows, unite
from trainer.parallel.two_d import TableShard, TwoDParallel
from trainer.spec import JobSpec, SparseOptimizerSpec, SyncSpec

logger = logging.getLogger(__name__)

Mode = Literal["full", "touched_rows"]
Extra = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]


@dataclass(frozen=True)
class SyncReport:
    """Price of one sync on this rank.

    `num_bytes` is what the rank sent (an all-reduce of n bytes would send 2 (M - 1) / M n);
    `density` is the share of this rank's rows that were averaged, 1 in mode full.
    """

    time_s: float
    num_bytes: int
    density: float = 1.0
    mode: Mode = "full"


def is_sync_step(step: int, spec: SyncSpec) -> bool:
    """Whether the copies are averaged after `step` (counted from 1)."""
    return step % spec.every_steps == 0


def mode_for(sync: SyncSpec, optimizer: SparseOptimizerSpec) -> tuple[Mode, str | None]:
    """The mode that is exact for `optimizer`, and a warning when it is not the one asked for."""
    if sync.mode == "touched_rows" and optimizer.changes_untouched_rows:
        return "full", (
            "parallelism.sync.mode touched_rows is off: optimizer.sparse.weight_decay "
            f"({optimizer.weight_decay:g}) changes every row at each step, so every sync averages "
            "all rows; set it to 0 to sync touched rows only"
        )
    return sync.mode, None


class Sync(ABC):
    """Keeps the copies of a rank's shards together. Every method is for all ranks alike."""

    @abstractmethod
    def __call__(self) -> SyncReport:
        """One sync by the policy. Collective over the replica group."""

    @abstractmethod
    def finish(self) -> SyncReport | None:
        """Wait for what still overlaps and apply it; None when nothing does.

        Comes at the end of the step after a sync, and before validation and the end.
        """

    @abstractmethod
    def flush(self) -> SyncReport:
        """Make all copies equal, moments included, in full precision. Before a save. Collective."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew from copies that are equal: after a load, before training."""

    @abstractmethod
    def close(self) -> None:
        """Remove the hooks and stop the thread, if any."""


def build_sync(
    model: TwoDParallel,
    spec: JobSpec,
    *,
    extra: Extra | None = None,
    warn: Callable[[str], None] = logger.warning,
) -> Sync:
    """The sync that `spec` asks for, over equal copies. Collective over all ranks.

    `extra` gives (weights, optimizer states) that are averaged whole at each sync, contiguous and
    shaped alike on all copies. `warn` hears when a sync falls back to something else.
    """
    if model.groups.layout.num_replicas == 1:
        return NoSync()
    mode, warning = mode_for(spec.parallelism.sync, spec.optimizer.sparse)
    if warning:
        warn(warning)
    sync = spec.parallelism.sync.model_copy(update={"mode": mode})
    return ReplicaSync(model, sync, extra or _nothing)


def _nothing() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [], []


class NoSync(Sync):
    """With M = 1 there is one copy and nothing to do."""

    def __call__(self) -> SyncReport:
        return SyncReport(0.0, 0)

    def finish(self) -> None:
        return None

    def flush(self) -> SyncReport:
        return SyncReport(0.0, 0)

    def reset(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class ReplicaSync(Sync):
    """Averages the rows that need it over the replica group."""

    def __init__(self, model: TwoDParallel, spec: SyncSpec, extra: Extra) -> None:
        device = model.groups.device
        self._spec = spec
        self._extra = extra
        self._replicas = ReplicaCollectives(model.groups.replica_group, device)
        self._numbers = RowNumbers(model.table_shards(), device)
        self._touched = TouchedRows(self._numbers) if spec.mode == "touched_rows" else None
        # Rows whose moments differ between the copies since they were last averaged.
        self._stale_moments = torch.zeros_like(self._touched.bits) if self._touched else None

    @torch.no_grad()
    def __call__(self) -> SyncReport:
        started = time.perf_counter()
        include_moments = self._spec.optimizer_state == "every"
        rows = self._union()
        moment_rows = self._moment_rows(rows, include_moments)
        self._average(rows, moment_rows, include_moments)
        return self._report(started, rows)

    def finish(self) -> SyncReport | None:
        return None

    @torch.no_grad()
    def flush(self) -> SyncReport:
        started = time.perf_counter()
        rows = self._union()
        self._average(rows, self._moment_rows(rows, True), True)
        return self._report(started, rows)

    def reset(self) -> None:
        if self._touched:
            self._touched.clear()

    def close(self) -> None:
        if self._touched:
            self._touched.close()

    def _union(self) -> torch.Tensor | None:
        """Numbers of the rows to average, None for all; whatever is marked becomes unmarked."""
        if self._touched is None:
            return None
        unite(self._touched.bits, self._replicas)
        rows = self._touched.bits.nonzero().view(-1)
        if self._stale_moments is not None:
            self._stale_moments |= self._touched.bits
        self._touched.clear()
        share = rows.numel() / max(1, self._numbers.num_rows)
        return None if share > self._spec.full_above else rows

    def _moment_rows(self, rows: torch.Tensor | None, included: bool) -> torch.Tensor | None:
        """Numbers of the rows whose moments to average when they are `included`, None for all."""
        if self._stale_moments is None or not included:
            return rows
        stale = self._stale_moments.nonzero().view(-1)
        self._stale_moments.zero_()
        return None if rows is None else stale

    def _average(
        self, rows: torch.Tensor | None, moment_rows: torch.Tensor | None, include_moments: bool
    ) -> None:
        weights, states = self._extra()
        blocks = [*self._blocks(rows, _weight), *map(Block, weights)]
        if include_moments:
            blocks += [*self._blocks(moment_rows, _moments), *map(Block, states)]
        self._replicas.average_in_place(blocks)

    def _blocks(
        self,
        rows: torch.Tensor | None,
        tensors_of: Callable[[TableShard], Iterable[torch.Tensor]],
    ) -> Iterator[Block]:
        """Blocks of the tensors of every shard, in shard order: at `rows`, or all rows."""
        if rows is None:
            for shard in self._numbers.shards:
                yield from (Block(tensor) for tensor in tensors_of(shard))
            return
        for shard, local_rows in self._numbers.by_shard(rows):
            yield from (Block(tensor, local_rows) for tensor in tensors_of(shard))

    def _report(self, started: float, rows: torch.Tensor | None) -> SyncReport:
        if self._replicas.device.type == "cuda":
            torch.cuda.synchronize(self._replicas.device)
        num_bytes, self._replicas.num_bytes = self._replicas.num_bytes, 0
        elapsed_s = time.perf_counter() - started
        if rows is None:
            return SyncReport(elapsed_s, num_bytes)
        density = rows.numel() / max(1, self._numbers.num_rows)
        return SyncReport(elapsed_s, num_bytes, density, "touched_rows")


def _weight(shard: TableShard) -> list[torch.Tensor]:
    return [shard.weight]


def _moments(shard: TableShard) -> list[torch.Tensor]:
    return list(shard.states.values())
