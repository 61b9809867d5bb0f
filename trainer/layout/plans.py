"""Layouts of a spec on a cluster side by side: what each costs, which to take, what to change.

Pure arithmetic, no torch. `Comparer` lists layouts that survive what they must, each with
several sync intervals and both modes. Where TorchRec has planned a sharding group (`GroupPlan`) its
tables lie as planned there; else the cost model lays them out itself (`trainer.layout.workload`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from trainer.layout.choice import Choice, candidates, choose, need_of, size_text
from trainer.layout.cost import (
    DELAYS,
    NUM_BATCHES,
    RATES,
    Cluster,
    ClusterError,
    Cost,
    MemoryUse,
    StepTime,
    cost_of,
)
from trainer.layout.hosts import Site, described
from trainer.layout.layout import Layout, LayoutError
from trainer.layout.scaling import fastest_of, ways_of
from trainer.layout.workload import (
    GroupPlan,
    GroupTopology,
    SyncSums,
    Workload,
    planned,
    ranks_per_host_anywhere,
    whole_loads,
    with_sync,
)
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import ParallelismSpec, SyncSpec
from trainer.spec.parse import set_values
from trainer.spec.validation import check_accumulation, check_dynamic_layout, check_overlap

# Sync intervals to compare, beside the spec's own.
_SYNC_INTERVALS = (1, 4, 16, 64)
_MODES = ("touched_rows", "full")
# An estimate must promise so much more than what `auto` takes to be recommended in its place.
_WORTH_IT = 1.1
_MAX_CHANGES = 3
# Of a layout; of memory the cost tells.
_CHECKS = (check_accumulation, check_dynamic_layout, check_overlap)
# Of a host whose memory is not known.
_ENOUGH_BYTES = 1 << 60


@dataclass(frozen=True)
class PlanSite:
    """A cluster with room for so many workers on each host, each as the cluster describes it.

    `host_memory_bytes` is the least that a worker has of its host, enough where that is not known.
    """

    cluster: Cluster
    room: tuple[int, ...]
    host_memory_bytes: int = _ENOUGH_BYTES

    @classmethod
    def of_profile(cls, cluster: Cluster, spec: JobSpec) -> PlanSite:
        """Hosts of a described cluster, all of them, or as many as the spec's workers take."""
        world_size = spec.parallelism.world_size
        num_hosts = cluster.num_hosts or cluster.hosts_for(world_size)
        room = min(world_size, cluster.gpus_per_host)
        return cls(cluster, (room,) * min(num_hosts, world_size))

    @classmethod
    def of_site(cls, site: Site) -> PlanSite:
        """The hosts that Ray tells of; raises `ClusterError` where too little is known of them."""
        return cls(described(site), site.room, site.host_bytes or _ENOUGH_BYTES)

    def grown_for(self, spec: JobSpec) -> PlanSite:
        """The same hosts, or as many more as the spec's workers take of a cluster without end."""
        if self.cluster.num_hosts is not None:
            return self
        return PlanSite.of_profile(self.cluster, spec)


@dataclass(frozen=True)
class Candidate:
    """A layout with a sync interval and mode, and what it is worth.

    `rows_at_risk` are the most that a lost host undoes: of one group since a sync where groups are
    failure domains, else of all workers since a checkpoint. `is_planned` where TorchRec placed the
    tables, `is_chosen` what the spec and `auto` take, `is_on_front` what no other beats in speed,
    memory and survivability at once.
    """

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    sync_every_steps: int
    sync_mode: str
    failure_domain: str
    num_hosts_survived: int
    num_hosts_per_shard: int
    rows_at_risk: int
    memory_overhead_bytes: int
    sync_latency_s: float
    fits: bool
    obstacle: str
    samples_per_s: float
    memory_share: float
    lookup_imbalance: float
    step: StepTime
    peak: MemoryUse
    mean: MemoryUse
    is_planned: bool = False
    is_chosen: bool = False
    is_recommended: bool = False
    is_on_front: bool = False

    def is_beaten_by(self, other: Candidate) -> bool:
        """Whether another is at least as good in everything and better in something."""
        mine, its = self._merits, other._merits
        return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    @property
    def _merits(self) -> tuple[float, ...]:
        survived = (self.num_hosts_survived, -self.rows_at_risk)
        # No estimate is better than to three digits.
        return (float(f"{self.samples_per_s:.3g}"), -round(self.memory_share, 3), *survived)


@dataclass(frozen=True)
class Option:
    """A candidate with the layout behind it, and the group that TorchRec is asked to plan."""

    candidate: Candidate
    choice: Choice
    topology: GroupTopology
    spec: JobSpec


@dataclass(frozen=True)
class Comparison:
    """All candidates, those that fit first, by speed; and why one of them is recommended."""

    options: tuple[Option, ...]
    reason: str

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(option.candidate for option in self.options)

    @property
    def recommended(self) -> Option | None:
        """None where nothing fits."""
        return next((each for each in self.options if each.candidate.is_recommended), None)


class Comparer:
    """Layouts of the spec's T workers, or of as many as there is room for, side by side.

    L and the placement are free whatever the spec says. `check` is called for each layout and may
    raise, to end it. Raises `LayoutError` where the cluster has no room for the fewest workers, or
    no layout survives what it must, and `SpecError` where the spec refuses each.
    """

    def __init__(
        self,
        spec: JobSpec,
        site: PlanSite,
        *,
        only_own_sync: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._site, self._only_own_sync = spec, site, only_own_sync
        self._check = check
        cluster = site.cluster
        self._need = need = need_of(spec, site.room, cluster.hbm_bytes, cluster.host_links)
        # The cost says what has room in memory.
        free = replace(need, shard_group_size=None, placement=None, worker_table_bytes=None)
        self._chosen = choose(free)
        for own in (replace(need, worker_table_bytes=None), need):
            with suppress(LayoutError):
                self._chosen = choose(own)
        world_size = self._chosen.layout.world_size
        open_sizes = {"workers": world_size, "shard_group_size": "auto", "placement": "auto"}
        parallelism = spec.parallelism.model_copy(update=open_sizes)
        sized = spec.model_copy(update={"parallelism": parallelism})
        assert spec.table_bytes is not None, "a plan needs the sizes of the tables"
        self._whole = whole_loads(sized)
        self._sums: dict[tuple[Any, ...], SyncSums] = {}
        self._options: dict[Choice, list[Option]] = {}
        for choice in candidates(free):
            layout = choice.layout
            if layout.world_size != world_size or choice.num_hosts_survived < need.survive_hosts:
                continue
            with suppress(ValueError):  # of what the spec asks of a layout
                at_syncs = self._at_syncs(choice, _with_layout(sized, choice), None)
                self._options[choice] = _distinct(_settled(spec, at_syncs))
        if not self._options:
            layout = self._chosen.layout
            spec.with_layout(layout.shard_group_size, layout.placement)

    def add(self, topology: GroupTopology, plan: GroupPlan) -> None:
        """Cost the layouts with such groups anew, by TorchRec's plan."""
        for choice, options in self._options.items():
            if options[0].topology == topology:
                at_syncs = self._at_syncs(choice, options[0].spec, plan)
                self._options[choice] = _distinct(_settled(self._spec, at_syncs))

    def result(self) -> Comparison:
        found = [each for options in self._options.values() for each in options]
        return _judged(self._spec, self._chosen, found)

    def _at_syncs(self, choice: Choice, spec: JobSpec, plan: GroupPlan | None) -> Iterator[Option]:
        """A layout, which `spec` has, at several sync intervals and in both modes."""
        self._check()
        cluster, layout = self._site.cluster, choice.layout
        topology = topology_of(choice, self._site, spec)
        is_placed = plan is not None and bool(plan.tables)
        ways = (
            [planned(spec, layout, plan)]
            if plan and is_placed
            else ways_of(spec, layout, self._whole)
        )
        own, chosen = spec.parallelism.sync, self._chosen
        is_same = (choice.failure_domain, choice.group_hosts) == (
            chosen.failure_domain,
            chosen.group_hosts,
        )
        # Of one copy all placements are the same.
        is_same &= layout.num_replicas == 1 or layout.placement == chosen.layout.placement
        for sync in [own] if self._only_own_sync else _syncs(spec, choice):
            with_its_syncs = ways
            if layout.num_replicas > 1:
                at_sync = _with_sync(spec, sync)
                sums = self._sums_of(at_sync)
                with_its_syncs = [with_sync(each, at_sync, sums) for each in ways]
            workload, cost = fastest_of(with_its_syncs, layout, cluster)
            if plan and is_placed:
                cost = _with_ranks(cost, rank_memory(workload, plan, cluster), cluster)
            elif plan or not self._need.holds_tables(layout.shard_group_size):
                cost = replace(cost, fits=False)
            # A tuned sync is the spec's own with whatever interval it has come to.
            is_own = sync == own or (own.is_tuned and sync.mode == own.mode)
            candidate = replace(
                self._candidate(choice, sync, workload, cost),
                is_planned=plan is not None,
                obstacle=plan.obstacle if plan else "",
                is_chosen=is_same and (layout.num_replicas == 1 or is_own),
            )
            yield Option(candidate, choice, topology, spec)

    def _candidate(
        self, choice: Choice, sync: SyncSpec, workload: Workload, cost: Cost
    ) -> Candidate:
        layout, spec, cluster = choice.layout, self._spec, self._site.cluster
        batch = spec.data.batch_size
        rows_at_risk = spec.checkpoint.every_steps * layout.world_size * batch
        if choice.failure_domain == "replica_group":
            rows_at_risk = sync.intervals[0] * layout.shard_group_size * batch
        return Candidate(
            **vars(layout),
            num_replicas=layout.num_replicas,
            sync_every_steps=sync.intervals[0],
            sync_mode=sync.mode,
            failure_domain=choice.failure_domain,
            num_hosts_survived=choice.num_hosts_survived,
            num_hosts_per_shard=min(len(holders) for holders in choice.copies_by_host),
            rows_at_risk=rows_at_risk,
            memory_overhead_bytes=choice.memory_overhead_bytes or 0,
            sync_latency_s=choice.sync_latency_s or 0.0,
            fits=cost.fits,
            obstacle="",
            samples_per_s=cost.samples_per_s,
            memory_share=cost.peak.total_bytes / cluster.hbm_bytes,
            lookup_imbalance=workload.lookup_imbalance,
            step=cost.step,
            peak=cost.peak,
            mean=cost.mean,
        )

    def _sums_of(self, spec: JobSpec) -> SyncSums:
        sync, domain = spec.parallelism.sync, spec.parallelism.failure_domain
        key = (sync.intervals, sync.mode, domain)
        if key not in self._sums:
            self._sums[key] = SyncSums.of(spec)
        return self._sums[key]


def _settled(spec: JobSpec, options: Iterable[Option]) -> list[Option]:
    """Those at the interval that tuning would come to, if the spec asks for that; in each mode.

    `options` come in the order of their intervals.
    """
    sync, found = spec.parallelism.sync, dict[str, Option]()
    if not sync.is_tuned:
        return list(options)
    for option in options:
        mode = option.candidate.sync_mode
        if mode not in found or not _is_settled(sync, found[mode].candidate.step):
            found[mode] = option
    return list(found.values())


def _is_settled(sync: SyncSpec, step: StepTime) -> bool:
    """Whether tuning would leave the interval at that of such a step."""
    return not sync.is_tuned or step.sync_s <= sync.tuner.time_share * step.total_s


def _distinct(options: Iterable[Option]) -> list[Option]:
    """Without full syncs that are what a sync of touched rows comes to, unless they were chosen."""
    found: dict[tuple[Any, ...], Option] = {}
    for option in options:
        each = option.candidate
        key = (each.sync_every_steps, each.samples_per_s, each.peak)
        if key not in found or each.is_chosen:
            found[key] = option
    return list(found.values())


def _with_layout(spec: JobSpec, choice: Choice) -> JobSpec:
    """The spec with a layout, of which only what depends on it is checked: there may be thousands
    of tables. Raises ValueError."""
    layout = choice.layout
    resolved = spec.parallelism.resolved(layout.shard_group_size, layout.placement)
    context = {"stored": True, "laid_out": True}
    checked = ParallelismSpec.model_validate(resolved.model_dump(), context=context)
    if checked.moment_scale != "auto" and checked.moment_scale > checked.num_replicas:
        raise ValueError("moment_scale would be above M, which a new spec may not ask for")
    found = spec.model_copy(update={"parallelism": checked})
    for check in _CHECKS:
        check(found)
    return found


def _judged(spec: JobSpec, chosen: Choice, found: Sequence[Option]) -> Comparison:
    """The options sorted and marked."""
    fitting = [each.candidate for each in found if each.candidate.fits]
    best = _recommended(spec, fitting)
    marked = [
        replace(
            each,
            candidate=replace(
                each.candidate,
                is_on_front=each.candidate.fits
                and not any(map(each.candidate.is_beaten_by, fitting)),
                is_recommended=each.candidate is best,
            ),
        )
        for each in found
    ]
    order = sorted(
        marked, key=lambda each: (not each.candidate.fits, -each.candidate.samples_per_s)
    )
    return Comparison(tuple(order), _reason(chosen, best, [each.candidate for each in order]))


def _recommended(spec: JobSpec, fitting: Sequence[Candidate]) -> Candidate | None:
    """What the spec and `auto` take, unless another is much faster with the same sync interval."""
    every_steps = spec.parallelism.sync.every_steps
    own = [each for each in fitting if each.sync_every_steps == every_steps] or fitting
    fastest = max(own, key=lambda each: each.samples_per_s, default=None)
    chosen = next((each for each in own if each.is_chosen), None)
    if fastest is None or chosen is None:
        return fastest
    return fastest if fastest.samples_per_s > _WORTH_IT * chosen.samples_per_s else chosen


def _reason(
    chosen: Choice,
    best: Candidate | None,
    candidates: Sequence[Candidate],
) -> str:
    """Why that one is recommended, in a sentence."""
    if best is None:
        least = min(candidates, key=lambda each: each.peak.needed_bytes, default=None)
        if least is None:
            return "no layout has room"
        needed, share = size_text(int(least.peak.needed_bytes)), least.memory_share
        what = least.obstacle or f"it needs {needed} on a worker ({share:.0%} with the reserve)"
        return f"no layout fits in memory; the smallest is {_name(least)}: {what}"
    if best.is_chosen:
        rival = next((each for each in candidates if each.fits), best)
        more = rival.samples_per_s / best.samples_per_s - 1
        rest = f"; {_name(rival)} would be {more:.0%} faster" if more > 0.01 else ""
        return f"{chosen.reason}{rest}"
    own = next((each for each in candidates if each.is_chosen), None)
    if own is None:
        return f"{_name(best)} is the fastest that fits"
    if not own.fits:
        return f"{_name(best)} is the fastest that fits; {_name(own)}, which auto takes, does not"
    more = best.samples_per_s / own.samples_per_s - 1
    return (
        f"{_name(best)} is the fastest that fits, by {more:.0%} over {_name(own)}, which the spec "
        "and auto take"
    )


def _name(candidate: Candidate) -> str:
    return (
        f"{candidate.num_replicas} x {candidate.shard_group_size} {candidate.placement}, "
        f"{candidate.sync_mode} sync every {candidate.sync_every_steps}"
        if candidate.num_replicas > 1
        else f"one copy on {candidate.shard_group_size} workers"
    )


def topology_of(choice: Choice, site: PlanSite, spec: JobSpec) -> GroupTopology:
    """What TorchRec's planner is told of one sharding group of a layout."""
    cluster = site.cluster
    size = choice.layout.shard_group_size
    per_host = {num for hosts in choice.group_hosts for num in Counter(hosts).values()}
    ranks_per_host = per_host.pop() if len(per_host) == 1 else None
    free_bytes = max(0, int(cluster.hbm_bytes - cluster.process_bytes))
    if choice.failure_domain == "replica_group":  # each group plans for itself
        ranks_per_host = ranks_per_host_anywhere(size, cluster.gpus_per_host)
        if cluster.device == "cpu":  # with the memory by which the driver chooses
            free_bytes = cluster.hbm_bytes
    return GroupTopology(
        shard_group_size=size,
        ranks_per_host=ranks_per_host,
        device=cluster.device,
        memory_bytes=spec.resources.memory_bytes_per_worker or free_bytes,
        host_memory_bytes=site.host_memory_bytes,
        memory_bytes_per_s=cluster.hbm_bytes_per_s,
        intra_host_bytes_per_s=cluster.intra_host_bytes_per_s,
        inter_host_bytes_per_s=cluster.inter_host_bytes_per_s,
    )


def _syncs(spec: JobSpec, choice: Choice) -> list[SyncSpec]:
    sync = spec.parallelism.sync
    if choice.layout.num_replicas == 1 or (sync.overlap and not sync.is_tuned):  # for its interval
        return [sync]
    modes = [sync.mode] if spec.optimizer.sparse.changes_untouched_rows else _MODES
    at_sync = spec.parallelism.dense_policy == "at_sync"
    window = spec.training.accumulate_steps if at_sync else 1
    others = sorted({*sync.intervals, *(each * window for each in _SYNC_INTERVALS)})
    found = (
        _tuned_intervals(sync)
        if sync.is_tuned
        else [sync.model_copy(update={"every_steps": each}) for each in others]
    )
    return [each.model_copy(update={"mode": mode}) for each in found for mode in modes]


def _tuned_intervals(sync: SyncSpec) -> list[SyncSpec]:
    """A sync at each interval that it may have, shortest first; memory is that of the longest."""
    return [
        sync.model_copy(update={"tuner": sync.tuner.model_copy(update={"min_steps": each})})
        for each in sync.intervals
    ]


def _with_sync(spec: JobSpec, sync: SyncSpec) -> JobSpec:
    parallelism = spec.parallelism.model_copy(update={"sync": sync})
    return spec.model_copy(update={"parallelism": parallelism})


def rank_memory(workload: Workload, plan: GroupPlan, cluster: Cluster) -> tuple[MemoryUse, ...]:
    """Memory of each rank of a group that TorchRec has planned, by its position."""
    held = sum(rank.sync_bytes for rank in plan.ranks) or 1
    common = workload.batch_size * workload.dense_activation_bytes
    return tuple(
        MemoryUse(
            tables_bytes=rank.tables_bytes,
            optimizer_bytes=rank.optimizer_bytes,
            activations_bytes=common + 2 * rank.output_bytes,
            input_bytes=NUM_BATCHES * rank.input_bytes,
            dense_bytes=workload.dense_bytes,
            sync_buffers_bytes=workload.sync_buffer_bytes * rank.sync_bytes / held,
            process_bytes=cluster.process_bytes,
            reserve_bytes=cluster.reserve_bytes,
        )
        for rank in plan.ranks
    )


def _with_ranks(cost: Cost, ranks: Sequence[MemoryUse], cluster: Cluster) -> Cost:
    peak = max(ranks, key=lambda each: each.needed_bytes)
    names = vars(peak)
    mean = MemoryUse(
        **{name: sum(getattr(each, name) for each in ranks) / len(ranks) for name in names}
    )
    return replace(cost, peak=peak, mean=mean, fits=peak.needed_bytes <= cluster.hbm_bytes)


@dataclass(frozen=True)
class Prediction:
    """Speed of all ranks, seconds of a step, and memory of each position of a sharding group.

    A sync comes every `sync_every_steps`; where that is tuned it is what tuning would come to, and
    None where there is one copy.
    """

    sync_every_steps: int | None
    samples_per_s: float
    lookup_imbalance: float
    step: StepTime
    ranks: tuple[MemoryUse, ...]


def predict(spec: JobSpec, layout: Layout, plan: GroupPlan, cluster: Cluster) -> Prediction:
    """What a layout is worth whose groups are sharded by `plan`."""
    workload, every_steps = planned(spec, layout, plan), None
    cost = cost_of(workload, layout, cluster)
    if layout.num_replicas > 1:
        for sync in _tuned_intervals(spec.parallelism.sync):
            workload, every_steps = with_sync(workload, _with_sync(spec, sync)), sync.intervals[0]
            cost = cost_of(workload, layout, cluster)
            if _is_settled(sync, cost.step):
                break
    ranks = rank_memory(workload, plan, cluster)
    imbalance = workload.lookup_imbalance
    return Prediction(every_steps, cost.samples_per_s, imbalance, cost.step, ranks)


_MOST_TIMES = 4.0
_MOST_EXTRA_BYTES = 2.0**32
# Steps of what is measured, so that one more job does not make all plans anew.
_BYTES_STEP = 2**26


@dataclass(frozen=True)
class Calibration:
    """What jobs of a cluster measured against their predictions: medians of `num_jobs`.

    A step takes `step_ratio` times as long, between a quarter and four times, and a worker
    `extra_bytes` more memory, at most 4 GiB more or less: a job measures what it likes.
    """

    num_jobs: int
    step_ratio: float
    extra_bytes: int

    @classmethod
    def of(cls, step_ratios: Sequence[float], extra_bytes: Sequence[float]) -> Calibration | None:
        """Of what each job measured; None where there is none."""
        if not step_ratios:
            return None
        bounded = min(max(statistics.median(step_ratios), 1 / _MOST_TIMES), _MOST_TIMES)
        extra = statistics.median(extra_bytes) if extra_bytes else 0.0
        steps = round(min(max(extra, -_MOST_EXTRA_BYTES), _MOST_EXTRA_BYTES) / _BYTES_STEP)
        return cls(len(step_ratios), float(f"{bounded:.2g}"), steps * _BYTES_STEP)

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster as slow, and its processes as large, as measured."""
        slower = {name: getattr(cluster, name) / self.step_ratio for name in RATES}
        slower |= {name: getattr(cluster, name) * self.step_ratio for name in DELAYS}
        process_bytes = max(0.0, cluster.process_bytes + self.extra_bytes)
        return replace(cluster, process_bytes=process_bytes, **slower)


@dataclass(frozen=True)
class Change:
    """A change of the spec that would do, as `--set` takes it, and in words."""

    set: Mapping[str, Any]
    text: str


def does_fit(spec: JobSpec, site: PlanSite, check: Callable[[], None] = lambda: None) -> bool:
    """Whether a layout fits in memory by the estimate; raises as `Comparer` does."""
    found = Comparer(spec, site, only_own_sync=True, check=check).result()
    return any(each.fits for each in found.candidates)


def why_not_held(spec: JobSpec, worker_bytes: int | None) -> str | None:
    """Why workers of that memory hold the tables in no group that the spec allows, however many
    hosts there are; None where they do, which is the least that a job needs to start."""
    parallelism = spec.parallelism
    survived = parallelism.survive.hosts if parallelism.survive else 0
    num_workers = parallelism.world_size
    try:
        choose(need_of(spec, [num_workers] * (survived + num_workers), worker_bytes))
    except LayoutError as error:
        return str(error)
    return None


def smallest_changes(
    spec: JobSpec, fits: Callable[[JobSpec], bool], device: str
) -> tuple[Change, ...]:
    """Changes of which each alone lets the spec fit, those that cost least first; a few of them."""
    found: dict[frozenset[str], Change] = {}
    for change in _changes(spec, device):
        if frozenset(change.set) in found:
            continue
        with suppress(SpecError, LayoutError, ClusterError):
            document = set_values(spec.model_dump(mode="json"), change.set)
            if fits(JobSpec.checked(document)):
                found[frozenset(change.set)] = change
        if len(found) == _MAX_CHANGES:
            break
    return tuple(found.values())


def _changes(spec: JobSpec, device: str) -> Iterator[Change]:
    parallelism, tables = spec.parallelism, list(enumerate(spec.embedding_tables))
    whole = [(index, table) for index, table in tables if table.constraints.is_whole]
    if whole:
        index, table = max(whole, key=lambda pair: spec.size_bytes(pair[1]) or 0)
        types = [*table.constraints.sharding_types, "row_wise"]
        path = f"embedding_tables[{index}].constraints.sharding_types"
        yield Change({path: types}, f"let the rows of table '{table.name}' be split (row_wise)")
    if parallelism.shard_group_size != "auto":
        text = "let the planner take the group size (shard_group_size auto)"
        yield Change({"parallelism.shard_group_size": "auto"}, text)
    if any(table.data_type == "fp32" for _, table in tables):
        half = {f"embedding_tables[{index}].data_type": "fp16" for index, _ in tables}
        yield Change(half, "store the tables in fp16")
    if not spec.may_cache and device == "cuda":
        text = "keep tables in host memory as far as GPU memory does not hold them"
        yield Change({"parallelism.planner.compute_kernel": "auto"}, text)
    for factor in (2, 4, 8):
        if spec.data.batch_size >= factor:
            batch = spec.data.batch_size // factor
            yield Change({"data.batch_size": batch}, f"lower data.batch_size to {batch}")
    for factor in (2, 4, 8, 16, 32, 64):
        num_workers = parallelism.world_size * factor
        values = {"parallelism.workers": num_workers, "parallelism.shard_group_size": "auto"}
        yield Change(values, f"raise parallelism.workers to {num_workers}, in groups of any size")
