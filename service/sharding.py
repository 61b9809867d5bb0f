"""What a sharding plan means, for the dashboard and the command line: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.events import TablePlan, WorkersStarted

# Kinds of timeline lines.
STARTED, DIVERGENCE = "workers_started", "divergence"
DATA_PARALLEL = "data_parallel"
# Phases of a training step in the order in which they happen; the metric is `phase/NAME_s`.
PHASES = (
    "data_wait",
    "input_dist",
    "lookup",
    "output_dist",
    "dense",
    "backward",
    "optimizer",
    "sync",
    "other",
)
_WORKERS_FIELDS = frozenset(WorkersStarted.model_fields)


class Line(Protocol):
    """A line of a timeline, as the store and the client have it."""

    @property
    def kind(self) -> str:
        """Kind of the record."""

    @property
    def time(self) -> float:
        """Unix seconds."""

    @property
    def data(self) -> Mapping[str, object]:
        """The rest of the record."""


def newest_workers(timeline: Sequence[Line]) -> WorkersStarted | None:
    """The newest worker group run of a timeline; None before the first one."""
    for line in reversed(timeline):
        if line.kind == STARTED:
            known = {name: value for name, value in line.data.items() if name in _WORKERS_FIELDS}
            return WorkersStarted.model_validate({**known, "time": line.time})
    return None


@dataclass(frozen=True)
class Share:
    """What one position of a sharding group holds of one table."""

    table: str
    size_bytes: float


@dataclass(frozen=True)
class PositionLoad:
    """All that one position of every sharding group holds."""

    position: int
    shares: tuple[Share, ...]

    @property
    def size_bytes(self) -> float:
        """Weights and optimizer state."""
        return sum(share.size_bytes for share in self.shares)


def loads_of(tables: Iterable[TablePlan], shard_group_size: int) -> list[PositionLoad]:
    """What each position holds; a shard's bytes are its part of the table's cells.

    A data-parallel table is whole on every position, whatever its shards say.
    """
    shares: list[dict[str, float]] = [{} for _ in range(shard_group_size)]
    for table in tables:
        if table.sharding_type == DATA_PARALLEL:
            for held in shares:
                held[table.name] = float(table.size_bytes)
            continue
        for shard in table.shards:
            held, part = shares[shard.position], shard_fraction(table, shard)
            held[table.name] = held.get(table.name, 0.0) + part * table.size_bytes
    return [
        PositionLoad(position, tuple(Share(table, size) for table, size in held.items()))
        for position, held in enumerate(shares)
    ]


def shard_fraction(table: TablePlan, shard: TablePlan.Shard) -> float:
    """Part of the table's cells that a shard has, in [0, 1]."""
    num_cells = table.num_embeddings * table.embedding_dim
    return shard.num_rows * shard.num_columns / num_cells if num_cells else 0.0


def imbalance(loads: Sequence[PositionLoad]) -> float | None:
    """The largest load over the mean (1 is perfect); None where nothing is held."""
    total_bytes = sum(load.size_bytes for load in loads)
    if not total_bytes:
        return None
    return max(load.size_bytes for load in loads) * len(loads) / total_bytes


def shard_text(table: TablePlan, shard: TablePlan.Shard) -> str:
    """The rectangle in words, as in `rows 0-499, columns 0-31`; `all` where it is whole."""
    rows = _range("rows", shard.row_offset, shard.num_rows, table.num_embeddings)
    columns = _range("columns", shard.column_offset, shard.num_columns, table.embedding_dim)
    return ", ".join(part for part in (rows, columns) if part) or "all"


def _range(what: str, offset: int, count: int, whole: int) -> str:
    if count == whole:
        return ""
    if not count:
        return f"no {what}"
    return f"{what} {offset:,}-{offset + count - 1:,}"


def phase_shares(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(phase, seconds of a step), the longest first; without those that took no time."""
    found = [(phase, metrics.get(f"phase/{phase}_s", 0.0)) for phase in PHASES]
    return sorted((item for item in found if item[1] > 0), key=lambda item: -item[1])
