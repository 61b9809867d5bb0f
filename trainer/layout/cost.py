"""What a layout costs on a cluster: time of a step and memory of a rank, from a small model.

Pure arithmetic, no torch. T ranks form M sharding groups of L, each rank with b samples a step. The
phases of a step follow one another:

    input dist    3 a + b i / A                    ids, all-to-all in the sharding group
    lookup        b u I / HBM                      forward and backward, on the rank with most of it
    output dist   2 a + b o I / A                  vectors and their gradients, likewise
    dense         b f / FLOPS + (a + R(D, T)) / n  network, and the all-reduce of its gradients
    sync          (6 a + R(S, M)) / N              average of the copies of a shard, every N steps
    host          H                                Python, autograd, launches of kernels

i, u, o are bytes a sample and f its floating point operations, D the bytes of the dense gradients,
averaged every n steps, and S what a sync averages of one rank's shard. I is the imbalance: lookup
time of the slowest rank over the mean; it sends as much more. a is the latency of a collective,
and before it their number: lengths of what follows, lengths and ids; vectors forward, gradients
back; a reduce-scatter and an all-gather each of marks of touched rows, weights and optimizer state.
A GPU computes while its host launches what comes next, so there only what is left of H counts.

A rank exchanges with L - 1 others, those on its host over one link and the rest over another, both
at the same time; the slower one decides. R(x, m) is a ring all-reduce of x bytes over m members, k
on each of h = m / k hosts: inside the hosts first, then the k-th part of x across them,

    R(x, m) = 2 x (k - 1) / (k B_intra) + 2 x (h - 1) / (h k B_inter)

which is 2 S (M - 1) / (T B), the paper's latency of a full sync, where one link carries it all.
Where hosts are in several buildings, what leaves one goes over a third link too, and R inside the
buildings first, in the same way.

A rank holds the L-th part of tables and optimizer state, so other copies cost it S (M - 1) / T
(2D sparse parallelism, arXiv 2508.03854, section 5); lookups, which grow with I; ids of three
batches, those that are prefetched included; what the dense part keeps; and sync buffers. The
allocator holds on to `RESERVE_SHARE` of HBM, which it gives back before it runs out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.layout.layout import Layout

MAX_GPUS = 16_384
# TorchRec's default reservation of a planner; what an allocator keeps of freed blocks.
RESERVE_SHARE = 0.15
# Batches whose ids are on the device: in use, being exchanged, being copied there.
NUM_BATCHES = 3
# Collectives of a step, and of a sync.
_INPUT_COLLECTIVES, _OUTPUT_COLLECTIVES, _SYNC_COLLECTIVES = 3, 2, 6


class ClusterError(ValueError):
    """A description of a cluster that cannot be; the message says what to change."""


@dataclass(frozen=True)
class Cluster:
    """Hosts with `gpus_per_host` GPUs each; as many as are asked for where `num_hosts` is None.

    Bandwidths and operations are what one GPU attains, links in one direction. On CPUs a worker
    stands for a GPU, and its share of the host's memory for HBM. `process_bytes` is what a worker
    takes there before it has a model, `step_overhead_s` what a step takes of its
    host, and `collective_latency_s` what a collective takes that moves nothing. All hosts are in
    one building unless `hosts_per_building` says otherwise.
    """

    name: str
    gpus_per_host: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    intra_host_bytes_per_s: float
    inter_host_bytes_per_s: float
    fp32_flops_per_s: float
    tf32_flops_per_s: float
    bf16_flops_per_s: float
    process_bytes: float = 0.0
    step_overhead_s: float = 0.0
    collective_latency_s: float = 0.0
    hosts_per_building: int | None = None
    inter_building_bytes_per_s: float | None = None
    device: str = "cuda"
    num_hosts: int | None = None

    def __post_init__(self) -> None:
        for name in (*_QUANTITIES, *_BUILDINGS, *_EXTRAS):
            value = getattr(self, name)
            least, kind = (0, "not below 0") if name in _EXTRAS else (1, "above 0")
            if value is not None and not least <= value <= _MOST:
                raise ClusterError(
                    f"cluster {self.name}: {name} is {value:g}, but must be a finite number {kind} "
                    f"({least} to {_MOST:g}); correct it, or leave it to the profile"
                )
        if (self.hosts_per_building is None) != (self.inter_building_bytes_per_s is None):
            raise ClusterError(
                f"cluster {self.name}: {' and '.join(_BUILDINGS)} belong together; give both"
            )
        if self.num_hosts is not None and self.num_hosts < 1:
            raise ClusterError(f"cluster {self.name}: it needs at least one host")

    @property
    def host_links(self) -> tuple[float, float]:
        """Bytes a second inside a host and between hosts."""
        return self.intra_host_bytes_per_s, self.inter_host_bytes_per_s

    @property
    def links(self) -> tuple[tuple[int, float], ...]:
        """(neighbouring ranks, bytes a second between them) of hosts, of buildings if there are
        several, and of all that there is."""
        found = [(self.gpus_per_host, self.intra_host_bytes_per_s)]
        if self.hosts_per_building is None or self.inter_building_bytes_per_s is None:
            return (*found, (MAX_GPUS, self.inter_host_bytes_per_s))
        in_building = self.gpus_per_host * self.hosts_per_building
        found += [(in_building, self.inter_host_bytes_per_s)]
        return (*found, (MAX_GPUS, self.inter_building_bytes_per_s))

    @property
    def reserve_bytes(self) -> float:
        """What the allocator keeps of freed memory."""
        return RESERVE_SHARE * self.hbm_bytes

    @property
    def fingerprint(self) -> str:
        """Of the hardware, however many hosts there are and whatever memory a job's workers get."""
        quantities = [self.gpus_per_host, *(getattr(self, name) for name in (*RATES, *DELAYS))]
        return " ".join([self.device, *(f"{each:.3g}" for each in quantities)])

    def hosts_for(self, world_size: int) -> int:
        """How many whole hosts T ranks take; raises `ClusterError` where they do not fill them."""
        num_gpus = self.gpus_per_host
        if world_size < 1 or (world_size > num_gpus and world_size % num_gpus):
            below = max(num_gpus, world_size // num_gpus * num_gpus)
            raise ClusterError(
                f"{world_size} ranks do not fill hosts of {num_gpus} GPUs; nearest that do: "
                f"{below} or {below + num_gpus}"
            )
        if world_size > MAX_GPUS:
            raise ClusterError(f"{world_size} ranks are too many to estimate: at most {MAX_GPUS}")
        num_hosts = math.ceil(world_size / num_gpus)
        if self.num_hosts is not None and num_hosts > self.num_hosts:
            raise ClusterError(
                f"{world_size} ranks need {num_hosts} hosts, but cluster {self.name} has "
                f"{self.num_hosts}: ask for at most {self.num_hosts * num_gpus} ranks, or name a "
                "larger cluster"
            )
        return num_hosts


_COUNTS = ("gpus_per_host", "hbm_bytes")
RATES = (
    *("hbm_bytes_per_s", "intra_host_bytes_per_s", "inter_host_bytes_per_s"),
    *("fp32_flops_per_s", "tf32_flops_per_s", "bf16_flops_per_s"),
)
DELAYS = ("step_overhead_s", "collective_latency_s")
_QUANTITIES = (*_COUNTS, *RATES)
_EXTRAS = ("process_bytes", *DELAYS)
_BUILDINGS = ("hosts_per_building", "inter_building_bytes_per_s")
# What is computed from quantities up to here is finite.
_MOST = 1e18
CLUSTER_QUANTITIES = (*_QUANTITIES, *_EXTRAS, *_BUILDINGS)
_WHOLE = (*_COUNTS, "hosts_per_building")
_GIB = 2**30
# Share of a data sheet's rates that is attained.
_ATTAINED = 2 / 3
# GPU: HBM bytes; TB/s of HBM, of NVLink and of the network in one direction; TFLOP/s in fp32, tf32
# and bf16 without sparsity. Data sheets of the SXM parts; NICs as in DGX A100, H100 and H200.
_GPUS = {
    "A100-40GB": (40 * _GIB, (1.555, 0.3, 0.025, 19.5, 156.0, 312.0)),
    "A100-80GB": (80 * _GIB, (2.039, 0.3, 0.025, 19.5, 156.0, 312.0)),
    "H100-80GB": (80 * _GIB, (3.35, 0.45, 0.05, 67.0, 495.0, 989.0)),
    "H200-141GB": (141 * _GIB, (4.8, 0.45, 0.05, 67.0, 495.0, 989.0)),
}
GPU_NAMES = tuple(_GPUS)
# What a step of 26 tables took of an H200's host (benchmark `gpu_step`); NCCL's latency.
_GPU_DELAYS = {"step_overhead_s": 4e-3, "collective_latency_s": 5e-5}
# Ray's types of GPUs; one that comes in two sizes is taken to be the smaller.
_RAY_GPUS = {
    "A100": "A100-40GB",
    "A100-40G": "A100-40GB",
    "A100-80G": "A100-80GB",
    "H100": "H100-80GB",
    "H200": "H200-141GB",
}
# One core of a server, with gloo; bf16 and tf32 gain nothing there.
_CPU_RATES: dict[str, Any] = {
    "hbm_bytes_per_s": 8e9,
    "intra_host_bytes_per_s": 1e9,
    "fp32_flops_per_s": 3e10,
    "tf32_flops_per_s": 3e10,
    "bf16_flops_per_s": 3e10,
    "process_bytes": 0.65 * _GIB,
    "step_overhead_s": 1e-2,
    "collective_latency_s": 1e-3,
}
_HOST_LINK = 1.25e9 * _ATTAINED
_CPU = re.compile(r"CPU-(\d{1,6})GB")
_PROFILE = re.compile(r"(\d{1,9})\s*x\s*([A-Za-z][\w-]*?)(?:\s*x\s*(\d{1,9}))?")


def gpu_memory_bytes(ray_type: str) -> int:
    """Memory of a GPU by the type that Ray names; 0 of one that is not known here."""
    name = _RAY_GPUS.get(ray_type)
    return _GPUS[name][0] if name else 0


def cluster_of(text: str) -> Cluster:
    """The cluster of a profile, as in `8xH100-80GB x 128`: GPUs of a host, their type, hosts.

    Without hosts there are as many as needed. Quantities that differ follow after commas, as in
    `8xH100-80GB x 128, inter_host_bytes_per_s=25e9`. Raises `ClusterError`.
    """
    profile, *overrides = (part.strip() for part in text.split(","))
    found = _PROFILE.fullmatch(profile)
    if found is None or not (found[2] in _GPUS or _CPU.fullmatch(found[2])):
        raise ClusterError(
            f"{profile!r} is no cluster: name GPUs a host, their type and, if they are limited, "
            f"hosts, as in '8xH100-80GB x 128'; known types: {', '.join(_GPUS)}, and CPU-8GB for "
            "workers on CPUs with so much memory each"
        )
    hosts, per_host = int(found[3]) if found[3] else None, int(found[1])
    if on_cpu := _CPU.fullmatch(found[2]):
        base = cpu_cluster(per_host, int(on_cpu[1]) * _GIB)
    else:
        base = gpu_cluster(found[2], per_host)
    quantities: dict[str, Any] = {"num_hosts": hosts}
    quantities |= dict(_override(each) for each in overrides)
    return replace(base, name=text.strip(), **quantities)


def gpu_cluster(gpu: str, gpus_per_host: int) -> Cluster:
    """Hosts with GPUs of a type of `GPU_NAMES`."""
    hbm_bytes, tera = _GPUS[gpu]
    attained = (each * 1e12 * _ATTAINED for each in tera)
    rates: dict[str, Any] = dict(zip(RATES, attained, strict=True))
    rates |= _GPU_DELAYS
    return Cluster(name=gpu, gpus_per_host=gpus_per_host, hbm_bytes=hbm_bytes, **rates)


def gpu_cluster_of_ray(ray_type: str, gpus_per_host: int) -> Cluster:
    """Hosts with GPUs of a type that Ray names; raises `ClusterError` for one not known here."""
    if ray_type not in _RAY_GPUS:
        raise ClusterError(f"GPUs of type {ray_type} are not known here; describe the cluster")
    return gpu_cluster(_RAY_GPUS[ray_type], gpus_per_host)


def cpu_cluster(workers_per_host: int, memory_bytes: int) -> Cluster:
    """Hosts with workers that have one core and so much memory each, and share 10 Gbit/s."""
    return Cluster(
        name="CPU",
        device="cpu",
        gpus_per_host=workers_per_host,
        hbm_bytes=memory_bytes,
        inter_host_bytes_per_s=_HOST_LINK / max(1, workers_per_host),
        **_CPU_RATES,
    )


def _override(text: str) -> tuple[str, Any]:
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in CLUSTER_QUANTITIES:
        known = ", ".join(CLUSTER_QUANTITIES)
        raise ClusterError(f"a cluster has no {name!r}; what can be set: {known}")
    try:
        return name, int(float(value)) if name in _WHOLE else float(value)
    except (ValueError, OverflowError):
        raise ClusterError(f"{name} must be a finite number, but is {value!r}") from None


@dataclass(frozen=True)
class Workload:
    """What training asks of the ranks of one sharding group.

    Bytes and operations of `input`, `lookup`, `output`, `activation` and `dense_flops` are for one
    sample, those of `tables`, `optimizer`, `synced` and `sync_buffer` for one copy of the tables.
    `lookup_activation_bytes` is the part of a sample's activations that is with who looks up.
    """

    batch_size: int
    table_bytes: float
    optimizer_bytes: float
    synced_bytes: float
    lookup_bytes: float
    dense_flops: float
    precision: str = "fp32"
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    lookup_activation_bytes: float = 0.0
    dense_activation_bytes: float = 0.0
    dense_bytes: float = 0.0
    dense_gradient_bytes: float = 0.0
    dense_every_steps: int = 1
    sync_buffer_bytes: float = 0.0
    sync_every_steps: int = 1
    overlap_steps: int = 0
    lookup_imbalance: float = 1.0
    table_imbalance: float = 1.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by phase; `sync_s` is the share of a sync that training waits for,
    `host_s` what the host adds."""

    input_dist_s: float
    lookup_s: float
    output_dist_s: float
    dense_s: float
    sync_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryUse:
    """GPU memory of one rank in bytes, by what it holds."""

    tables_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    input_bytes: float
    dense_bytes: float
    sync_buffers_bytes: float
    process_bytes: float
    reserve_bytes: float

    @property
    def needed_bytes(self) -> float:
        """All but the reserve."""
        return self.total_bytes - self.reserve_bytes

    @property
    def total_bytes(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Cost:
    """A layout's step, and the memory of the rank that holds most (`peak`) and of the mean one.

    Where `fits` is False the job would run out of memory; the step is what it would take otherwise.
    """

    layout: Layout
    step: StepTime
    samples_per_s: float
    peak: MemoryUse
    mean: MemoryUse
    fits: bool


def cost_of(workload: Workload, layout: Layout, cluster: Cluster) -> Cost:
    """Time and memory of a layout on hosts that the cluster is known to have."""
    step = step_time(workload, layout, cluster)
    even = replace(workload, lookup_imbalance=1.0, table_imbalance=1.0)
    peak = memory_use(workload, layout, cluster)
    return Cost(
        layout=layout,
        step=step,
        samples_per_s=layout.world_size * workload.batch_size / step.total_s,
        peak=peak,
        mean=memory_use(even, layout, cluster),
        fits=peak.needed_bytes <= cluster.hbm_bytes,
    )


def step_time(workload: Workload, layout: Layout, cluster: Cluster) -> StepTime:
    """Seconds of a step of `batch_size` samples a rank, by phase."""
    batch, imbalance = workload.batch_size, workload.lookup_imbalance
    flops_per_s = getattr(cluster, f"{workload.precision}_flops_per_s")
    input_s = all_to_all_s(batch * workload.input_bytes, layout, cluster, _INPUT_COLLECTIVES)
    lookup_s = batch * workload.lookup_bytes * imbalance / cluster.hbm_bytes_per_s
    output_bytes = batch * workload.output_bytes * imbalance
    output_s = all_to_all_s(output_bytes, layout, cluster, _OUTPUT_COLLECTIVES)
    gradients_s = all_reduce_s(
        workload.dense_gradient_bytes,
        [min(layout.world_size, num_ranks) for num_ranks, _ in cluster.links],
        cluster,
    )
    dense_s = batch * workload.dense_flops / flops_per_s + gradients_s / workload.dense_every_steps
    device_s = input_s + lookup_s + output_s + dense_s
    overhead_s, is_hidden = cluster.step_overhead_s, cluster.device == "cuda"
    host_s = max(0.0, overhead_s - device_s) if is_hidden else overhead_s
    sync_s = all_reduce_s(
        workload.synced_bytes / layout.shard_group_size,
        [copies_within(layout, num_ranks) for num_ranks, _ in cluster.links],
        cluster,
        _SYNC_COLLECTIVES,
    )
    hidden_s = workload.overlap_steps * (device_s + host_s)
    waited_s = max(0.0, sync_s - hidden_s) / workload.sync_every_steps
    return StepTime(input_s, lookup_s, output_s, dense_s, waited_s, host_s)


def memory_use(workload: Workload, layout: Layout, cluster: Cluster) -> MemoryUse:
    """Bytes of the rank with most lookups and table bytes, taken to be one and the same."""
    size, batch = layout.shard_group_size, workload.batch_size
    looked_up = workload.lookup_activation_bytes * workload.lookup_imbalance
    is_synced = layout.num_replicas > 1
    return MemoryUse(
        tables_bytes=workload.table_bytes * workload.table_imbalance / size,
        optimizer_bytes=workload.optimizer_bytes * workload.table_imbalance / size,
        activations_bytes=batch * (workload.dense_activation_bytes + looked_up),
        input_bytes=NUM_BATCHES * batch * workload.input_bytes * workload.lookup_imbalance,
        dense_bytes=workload.dense_bytes,
        sync_buffers_bytes=workload.sync_buffer_bytes / size if is_synced else 0.0,
        process_bytes=cluster.process_bytes,
        reserve_bytes=cluster.reserve_bytes,
    )


def copies_within(layout: Layout, num_ranks: int) -> int:
    """How many of the M copies of a shard so many neighbouring ranks hold."""
    if layout.placement == "intra_host":
        return min(layout.num_replicas, num_ranks)
    return min(layout.num_replicas, max(1, num_ranks // layout.shard_group_size))


def shards_within(layout: Layout, num_ranks: int) -> int:
    """How many ranks of a sharding group are among so many neighbouring ones."""
    return min(layout.shard_group_size, max(1, num_ranks // copies_within(layout, num_ranks)))


def all_to_all_s(num_bytes: float, layout: Layout, cluster: Cluster, num_collectives: int) -> float:
    """Seconds in which each rank sends `num_bytes`, spread over its sharding group."""
    size = layout.shard_group_size
    if size == 1:
        return 0.0
    within = [shards_within(layout, num_ranks) for num_ranks, _ in cluster.links]
    (_, near), *others = cluster.links
    seconds = [(within[0] - 1) / near]
    seconds += [(size - num) / rate for num, (_, rate) in zip(within, others, strict=False)]
    return num_collectives * cluster.collective_latency_s + num_bytes / size * max(seconds)


def all_reduce_s(
    num_bytes: float, within: Sequence[int], cluster: Cluster, num_collectives: int = 1
) -> float:
    """R of the module's docstring, with its latency; `within` are the members on the ranks of each
    of the cluster's links, the last of which are all."""
    if within[-1] == 1:
        return 0.0
    seconds, below = num_collectives * cluster.collective_latency_s, 1
    for num_members, (_, bytes_per_s) in zip(within, cluster.links, strict=True):
        num_parts = math.ceil(num_members / below)
        seconds += 2 * num_bytes / below * (num_parts - 1) / num_parts / bytes_per_s
        below = num_members
    return seconds


def memory_overhead_bytes(table_bytes: int, layout: Layout) -> int:
    """What the other copies of the tables cost each rank: S (M - 1) / T."""
    return table_bytes * (layout.num_replicas - 1) // layout.world_size


def sync_latency_s(table_bytes: int, layout: Layout, bytes_per_s: float) -> float:
    """A full sync over one link: 2 S (M - 1) / (T B)."""
    return 2 * table_bytes * (layout.num_replicas - 1) / (layout.world_size * bytes_per_s)
