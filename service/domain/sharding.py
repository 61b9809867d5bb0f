"""Summaries of a job's sync policy and sharding plan, for the dashboard and the CLI. Pure.

`policy_facts` says in words how replicas are kept in sync; `loads_of` and `imbalance` compute from
the reported plan what each position of a sharding group holds, in bytes; `table_uses` and
`memory_peaks` read what the workers measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.domain.models import TimelineEvent
from trainer.layout.workload import synced_row_bytes, synced_rows
from trainer.protocol.events import TablePlan, WorkersStarted
from trainer.spec.job import JobSpec
from trainer.spec.training import OPTIMIZERS


def policy_facts(spec: JobSpec) -> list[tuple[str, str]]:
    """(subject, policy in words), in reading order; a single copy has no replica policies."""
    facts = [("Failure domain", _domain_text(spec)), ("Sync", sync_text(spec))]
    if not spec.parallelism.is_single_copy:
        facts += [
            ("Optimizer state", _state_text(spec)),
            ("Dense part", _dense_text(spec)),
            ("Divergence check", _check_text(spec)),
        ]
    both = spec.parallelism.all_to_all
    exchanged = f"{both.forward} forward, {both.backward} backward"
    if both.forward == both.backward:
        exchanged = both.forward
    return [*facts, ("All-to-all", exchanged), ("Learning rates", _lr_text(spec))]


def sync_text(spec: JobSpec) -> str:
    """When replicas are averaged, and what is sent: rows in fp32, else their changes."""
    if spec.parallelism.is_single_copy:
        return "none: there is one copy of the tables"
    sync = spec.parallelism.sync
    sent = "" if sync.dtype == "fp32" else "the changes of "
    if spec.syncs_every_row:
        sent += "every row"
    else:
        sent += "the rows touched since the last sync"
        # Changes are never sent of all rows: their bases exist for the touched ones only.
        if sync.dtype == "fp32" and sync.full_above < 1:
            sent += f" (all rows above {sync.full_above:.0%})"
    steps = "step" if sync.overlap_steps == 1 else f"{sync.overlap_steps} steps"
    overlap = f", overlapped with the next {steps}" if sync.overlap else ""
    every = _every(sync.intervals[0], "step")
    if sync.is_tuned:
        shortest, longest = sync.intervals[0], sync.intervals[-1]
        share = f"as {sync.tuner.time_share:.0%} of the time allows"
        every = f"every {shortest:,} to {longest:,} steps, {share}"
    return f"{every}: {sent}, in {sync.dtype}{overlap}"


def _every(number: int, what: str) -> str:
    return f"every {what}" if number == 1 else f"every {number:,} {what}s"


def _state_text(spec: JobSpec) -> str:
    if not spec.optimizer.sparse.has_state:
        return f"none ({OPTIMIZERS[spec.optimizer.sparse.name].label})"
    averaged = {
        "every": "averaged at each sync",
        "delayed": "averaged, one sync behind the weights",
        "never": "left to each replica",
    }[spec.parallelism.sync.optimizer_state]
    is_open = spec.parallelism.shard_group_size == "auto"
    scale = "M" if is_open and spec.parallelism.moment_scale == "auto" else f"{spec.moment_scale:g}"
    return f"{averaged}, moments scaled by {scale}"


def _dense_text(spec: JobSpec) -> str:
    averaged = {
        "at_sync": "averaged at syncs, with the tables",
        "every_step": "gradients averaged over all ranks at every step",
    }
    domain = failure_domain_of(spec)
    if spec.parallelism.dense == "auto" and domain is None:
        return "at every step, or at syncs if each group is a failure domain"
    return averaged[spec.parallelism.dense_policy]


def failure_domain_of(spec: JobSpec) -> str | None:
    """`job` or `replica_group`; None while a choice of the layout decides it."""
    try:
        return spec.parallelism.failure_domain
    except ValueError:
        return None


def _domain_text(spec: JobSpec) -> str:
    survive = spec.parallelism.survive
    lost = "one is"
    if survive is not None:
        lost = "any host is" if survive.hosts == 1 else f"any {survive.hosts} hosts are"
    return {
        "job": "the job: a lost host restarts all workers from the newest checkpoint",
        "replica_group": f"a sharding group: the others train on when {lost} lost",
        None: "decided with the layout",
    }[failure_domain_of(spec)]


def _check_text(spec: JobSpec) -> str:
    check = spec.parallelism.divergence_check
    if check is None:
        return "off"
    follows = {
        "fail": "a mismatch fails the attempt",
        "rebroadcast": "a mismatch is repaired from the copy that most ranks hold",
    }[check.action]
    return f"{_every(check.every_syncs, 'sync')}; {follows}"


def _lr_text(spec: JobSpec) -> str:
    sparse, dense = spec.optimizer.sparse, spec.optimizer.dense
    rates = (
        f"tables {sparse.lr:g} ({OPTIMIZERS[sparse.name].label}), "
        f"dense {dense.lr:g} ({OPTIMIZERS[dense.name].label})"
    )
    schedule = spec.optimizer.schedule
    if schedule is None:
        return rates
    warmup = f"warm-up over {schedule.warmup_steps:,} steps, then " if schedule.warmup_steps else ""
    floor = "" if schedule.decay == "constant" else f" to {schedule.min_ratio:.0%}"
    return f"{rates}; {warmup}{schedule.decay}{floor}"


# Kinds of timeline events.
STARTED, DIVERGENCE = "workers_started", "divergence"
DATA_PARALLEL = "data_parallel"
_WORKERS_FIELDS = frozenset(WorkersStarted.model_fields)


def newest_workers(timeline: Sequence[TimelineEvent]) -> WorkersStarted | None:
    """The newest worker group run of a timeline; None before the first one."""
    for event in reversed(timeline):
        if event.kind == STARTED:
            known = {name: value for name, value in event.data.items() if name in _WORKERS_FIELDS}
            return WorkersStarted.model_validate({**known, "time": event.time})
    return None


def loads_of(tables: Iterable[TablePlan], shard_group_size: int) -> list[dict[str, float]]:
    """Bytes of each table, with its optimizer state, at each position of a sharding group.

    A shard's bytes are its part of the table's cells. A data-parallel table is whole on every
    position, whatever its shards say.
    """
    loads: list[dict[str, float]] = [{} for _ in range(shard_group_size)]
    for table in tables:
        if table.sharding_type == DATA_PARALLEL:
            for held in loads:
                held[table.name] = float(table.size_bytes)
            continue
        for shard in table.shards:
            held, part = loads[shard.position], shard_fraction(table, shard)
            held[table.name] = held.get(table.name, 0.0) + part * table.size_bytes
    return loads


@dataclass(frozen=True)
class TableUse:
    """What a table was last seen to do: over all ranks that report together.

    `lookups` of a step, and the share of them that go to the hottest hundredth of the rows that a
    rank looks up in it. Shares of the table's rows, and bytes of one copy, that a sync averages: as
    measured, and as the spec predicts if no id comes twice. None where that was not reported.
    """

    name: str
    lookups: float
    hottest_share: float
    synced_share: float | None
    synced_bytes: float | None
    predicted_share: float
    predicted_bytes: float


def table_uses(
    spec: JobSpec, tables: Iterable[TablePlan], metrics: Mapping[str, float]
) -> list[TableUse]:
    """Of each planned table that the newest metrics tell of, most lookups first."""
    specs, found = {table.name: table for table in spec.embedding_tables}, []
    for plan in tables:
        lookups = metrics.get(f"table/{plan.name}/lookups", 0.0)
        hottest = metrics.get(f"table/{plan.name}/hottest", 0.0)
        if plan.name not in specs or not plan.num_embeddings or not 0 < lookups < math.inf:
            continue
        row_bytes = synced_row_bytes(spec, specs[plan.name])
        num_predicted = synced_rows(spec, specs[plan.name], plan.num_embeddings)
        share = metrics.get(f"table/{plan.name}/synced")
        found.append(
            TableUse(
                plan.name,
                lookups,
                hottest,
                share,
                None if share is None else share * plan.num_embeddings * row_bytes,
                num_predicted / plan.num_embeddings,
                num_predicted * row_bytes,
            )
        )
    return sorted(found, key=lambda use: -use.lookups)


@dataclass(frozen=True)
class MemoryPeak:
    """The most bytes that a rank at some position has taken; `tensors` are those on its GPU."""

    host_bytes: float
    tensors_bytes: float | None

    @property
    def with_tables_bytes(self) -> float:
        """Of the memory that tables are in."""
        return self.host_bytes if self.tensors_bytes is None else self.tensors_bytes


def memory_peaks(metrics: Mapping[str, float], shard_group_size: int) -> list[MemoryPeak]:
    """By position of a sharding group; empty where not all are reported."""
    found = []
    for position in range(shard_group_size):
        host = metrics.get(f"memory/peak_rss_bytes/{position}", math.nan)
        tensors = metrics.get(f"memory/peak_allocated_bytes/{position}")
        if not 0 <= host < math.inf or not 0 <= (tensors or 0) < math.inf:
            return []
        found.append(MemoryPeak(host, tensors))
    return found


def shard_fraction(table: TablePlan, shard: TablePlan.Shard) -> float:
    """Part of the table's cells that a shard has, in [0, 1]."""
    num_cells = table.num_embeddings * table.embedding_dim
    return shard.num_rows * shard.num_columns / num_cells if num_cells else 0.0


def imbalance(loads: Sequence[Mapping[str, float]]) -> float | None:
    """The largest of the loads of positions over the mean (1 is perfect); None where all are 0."""
    sizes = [sum(load.values()) for load in loads]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else None


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
