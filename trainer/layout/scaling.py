"""A spec's job at several sizes on a cluster, by the cost model: speed, memory, where memory ends.

Pure arithmetic, no torch: nothing is measured, and no table is placed by TorchRec. Of all tables
whole, the large ones split, and all split (`trainer.layout.workload`) the fastest that fits counts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.layout.choice import choose, need_of
from trainer.layout.cost import MAX_GPUS, Cluster, ClusterError, Cost, MemoryUse, StepTime, cost_of
from trainer.layout.layout import Layout, LayoutError
from trainer.layout.workload import (
    SyncSums,
    TableLoad,
    Workload,
    whole_loads,
    with_sync,
    workload_of,
)
from trainer.spec.job import JobSpec

# Up to which tables are whole, in turn.
_MOST_LOADS = (math.inf, 1.0, 0.0)


@dataclass(frozen=True)
class ScalingRow:
    """One size of a job: what it would do on T GPUs; `samples_per_s` is None out of memory.

    `scaling_factor` is over the smallest size of the same kind (one copy, or several) that fits.
    `memory_share` is the peak of HBM with what the allocator keeps in reserve, and may be above 1.
    """

    world_size: int
    shard_group_size: int
    num_replicas: int
    placement: str
    num_hosts: int
    fits: bool
    samples_per_s: float | None
    scaling_factor: float | None
    memory_share: float
    lookup_imbalance: float
    step: StepTime
    peak: MemoryUse
    mean: MemoryUse


def scaling_sizes(text: str) -> tuple[int, ...]:
    """Numbers of GPUs of `256..4096`, doubling; raises `ClusterError` with what is wrong."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    if found is None:
        raise ClusterError(f"{text!r} is no range of GPUs: write it as 256..4096")
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most <= MAX_GPUS:
        raise ClusterError(
            f"{text!r}: the first number must be at least 1 and at most the second, and that at "
            f"most {MAX_GPUS}"
        )
    doubled = (least << power for power in itertools.count())
    return tuple(itertools.takewhile(lambda size: size <= most, doubled))


def scaling_of(spec: JobSpec, cluster: Cluster, sizes: Sequence[int]) -> tuple[ScalingRow, ...]:
    """Full model parallelism at each size, then the layout of the spec, or that `auto` takes.

    Table sizes must be known. Raises `ClusterError` for sizes that the cluster does not have, and
    `SpecError` for those that the spec does not allow.
    """
    one_copy: list[tuple[Workload, Cost]] = []
    copies: list[tuple[Workload, Cost]] = []
    for size in sizes:
        num_hosts = cluster.hosts_for(size)
        one_copy.append(_fastest(spec, Layout(size, size, "intra_host"), cluster))
        sized = _at_size(spec, cluster, size, num_hosts)
        if sized is not None:
            copies.append(_fastest(*sized, cluster))
    return (*_rows(one_copy, cluster), *_rows(copies, cluster))


def _at_size(
    spec: JobSpec, cluster: Cluster, world_size: int, num_hosts: int
) -> tuple[JobSpec, Layout] | None:
    """The spec and its layout on T GPUs; None where there is one copy, or `auto` finds no room."""
    given = spec.parallelism.shard_group_size
    if given != "auto" and given >= world_size:
        return None
    sized = spec.with_workers(world_size)
    hosts = (min(world_size, cluster.gpus_per_host),) * num_hosts
    try:
        layout = choose(need_of(sized, hosts, cluster.hbm_bytes)).layout
    except LayoutError:
        if not sized.parallelism.is_resolved:
            return None
        layout = Layout(world_size, sized.parallelism.group_size, sized.parallelism.placement)
    if layout.num_replicas == 1:
        return None
    return sized.with_layout(layout.shard_group_size, layout.placement), layout


def _fastest(spec: JobSpec, layout: Layout, cluster: Cluster) -> tuple[Workload, Cost]:
    ways = ways_of(spec, layout, whole_loads(spec))
    if layout.num_replicas > 1:
        sums = SyncSums.of(spec)
        ways = [with_sync(each, spec, sums) for each in ways]
    return fastest_of(ways, layout, cluster)


def ways_of(spec: JobSpec, layout: Layout, whole: Sequence[TableLoad]) -> list[Workload]:
    """What there is to do beside syncs, with tables whole or split, cached where they may be."""
    return [
        workload_of(spec, layout, most_load=most_load, is_cached=is_cached, whole=whole)
        for is_cached in ((False, True) if spec.may_cache else (False,))
        for most_load in _MOST_LOADS
    ]


def fastest_of(ways: Sequence[Workload], layout: Layout, cluster: Cluster) -> tuple[Workload, Cost]:
    """The fastest way that fits; what needs least where none does."""
    tried = [(each, cost_of(each, layout, cluster)) for each in ways]
    fitting = [each for each in tried if each[1].fits]
    if fitting:
        return max(fitting, key=lambda each: each[1].samples_per_s)
    return min(tried, key=lambda each: each[1].peak.needed_bytes)


def _rows(found: Sequence[tuple[Workload, Cost]], cluster: Cluster) -> Iterator[ScalingRow]:
    first = next((cost.samples_per_s for _, cost in found if cost.fits), None)
    for workload, cost in found:
        layout = cost.layout
        yield ScalingRow(
            **vars(layout),
            num_replicas=layout.num_replicas,
            num_hosts=cluster.hosts_for(layout.world_size),
            fits=cost.fits,
            samples_per_s=cost.samples_per_s if cost.fits else None,
            scaling_factor=cost.samples_per_s / first if cost.fits and first else None,
            memory_share=cost.peak.total_bytes / cluster.hbm_bytes,
            lookup_imbalance=workload.lookup_imbalance,
            step=cost.step,
            peak=cost.peak,
            mean=cost.mean,
        )
