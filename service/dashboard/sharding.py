"""View model of the sharding section, from the plan of the newest workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.dashboard import format
from service.dashboard.views import NUM_HOST_COLOURS
from service.domain.models import Job, TimelineEvent
from service.domain.sharding import (
    DATA_PARALLEL,
    DIVERGENCE,
    PositionLoad,
    Share,
    imbalance,
    loads_of,
    newest_workers,
    policy_facts,
    shard_text,
)
from trainer.protocol.events import TablePlan, WorkersStarted


@dataclass(frozen=True)
class ShardBox:
    """A shard as a rectangle of its table, all in percent of it; `text` says it in words."""

    position: int
    colour_index: int
    left: float
    top: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class TableLine:
    """One table of the plan; `is_whole` where every position holds all of it."""

    name: str
    sharding: str
    data_type: str
    shape: str
    size: str
    is_whole: bool
    boxes: tuple[ShardBox, ...]


@dataclass(frozen=True)
class Segment:
    """A table's part of a bar, `percent` of the longest bar."""

    percent: float
    title: str


@dataclass(frozen=True)
class Bar:
    """What the ranks of one position hold."""

    position: int
    colour_index: int
    ranks: str
    size: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class ShardingView:
    """The section: plan (`tables` and `bars` are empty where none was told), policy, alarms."""

    tables: tuple[TableLine, ...]
    bars: tuple[Bar, ...]
    imbalance: str
    facts: tuple[tuple[str, str], ...]
    divergences: tuple[str, ...]
    num_divergences: int


def sharding_view(job: Job, timeline: Sequence[TimelineEvent], max_alarms: int = 3) -> ShardingView:
    """The section of a job, with the newest `max_alarms` divergences, newest first."""
    workers = newest_workers(timeline)
    tables = workers.tables if workers else []
    loads = loads_of(tables, workers.shard_group_size) if workers else []
    alarms = [line.message for line in timeline if line.kind == DIVERGENCE]
    return ShardingView(
        tables=tuple(_table_line(table) for table in tables),
        bars=_bars(workers, loads) if workers and tables else (),
        imbalance=format.ratio(imbalance(loads)),
        facts=tuple(policy_facts(job.spec)),
        divergences=tuple(reversed(alarms[-max_alarms:])),
        num_divergences=len(alarms),
    )


def _table_line(table: TablePlan) -> TableLine:
    is_whole = table.sharding_type == DATA_PARALLEL
    shape = f"{format.grouped(table.num_embeddings)} {format.TIMES} {table.embedding_dim}"
    return TableLine(
        name=table.name,
        sharding=table.sharding_type.replace("_", "-"),
        data_type=table.data_type,
        shape=shape,
        size=format.size(table.size_bytes),
        is_whole=is_whole,
        boxes=() if is_whole else tuple(_box(table, shard) for shard in table.shards),
    )


def _box(table: TablePlan, shard: TablePlan.Shard) -> ShardBox:
    return ShardBox(
        position=shard.position,
        colour_index=shard.position % NUM_HOST_COLOURS,
        left=_percent(shard.column_offset, table.embedding_dim),
        top=_percent(shard.row_offset, table.num_embeddings),
        width=_percent(shard.num_columns, table.embedding_dim),
        height=_percent(shard.num_rows, table.num_embeddings),
        text=shard_text(table, shard),
    )


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0


def _bars(workers: WorkersStarted, loads: Sequence[PositionLoad]) -> tuple[Bar, ...]:
    longest_bytes = max(load.size_bytes for load in loads)
    return tuple(
        Bar(
            position=load.position,
            colour_index=load.position % NUM_HOST_COLOURS,
            ranks=_ranks_text(workers.replica_groups[load.position]),
            size=format.size(load.size_bytes),
            segments=tuple(_segment(share, longest_bytes) for share in load.shares),
        )
        for load in loads
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _segment(share: Share, longest_bytes: float) -> Segment:
    size = format.size(share.size_bytes)
    return Segment(_percent(share.size_bytes, longest_bytes), f"{share.table}: {size}")
