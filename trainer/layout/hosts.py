"""Hosts as a job sees them: room for its workers, memory of each, and the layout that it gets.

Pure arithmetic, no torch. The driver of an attempt and a dry run of the service both choose by
`choose_on`, from what Ray says of its nodes (`hosts_by_address`), so that they choose alike. A
worker has the memory of a GPU where it trains on one, else an equal share of its host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.layout.choice import Choice, choose, need_of
from trainer.layout.cost import (
    Cluster,
    ClusterError,
    cpu_cluster,
    gpu_cluster_of_ray,
    gpu_memory_bytes,
)
from trainer.spec.job import JobSpec

_NO_LIMIT = 1_000_000
_CGROUP = Path("/sys/fs/cgroup")
# Of the resources by which Ray names the GPUs of a node, as in "accelerator_type:H100".
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class HostFacts:
    """What a live host of the cluster has in all, whoever uses it now.

    `memory_bytes` is what Ray may use, 0 where it is not known, as `gpu_memory_bytes` of one GPU.
    `gpu` is its type as Ray names it.
    """

    address: str
    num_cpus: float
    num_gpus: float
    memory_bytes: int
    gpu: str = ""
    gpu_memory_bytes: int = 0  # of the answer of GET /v1/cluster, too


def host_memory_bytes() -> tuple[int, int]:
    """(all, free) memory of this host or, where that has less, of this container (cgroup v2)."""
    host = _numbers_in(Path("/proc/meminfo"))
    total, free = (1024 * host[f"Mem{name}:"] for name in ("Total", "Available"))
    with suppress(OSError, ValueError):  # no such files, or "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Files that can be read again hold no memory.
        files = _numbers_in(_CGROUP / "memory.stat")["inactive_file"]
        total, free = min(total, limit), min(free, limit - used + files)
    return total, max(0, free)


def _numbers_in(path: Path) -> dict[str, int]:
    """The numbers in a file with a name and a number a line; raises OSError."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def hosts_by_address(
    nodes: Iterable[tuple[str, Mapping[str, float]]],
) -> tuple[HostFacts, ...]:
    """Hosts from the (address, resources) of Ray's nodes, of which several may be on one host."""
    totals: dict[str, dict[str, float]] = {}
    for address, resources in nodes:
        total = totals.setdefault(address, {})
        for name, amount in resources.items():
            total[name] = total.get(name, 0) + amount
    return tuple(_facts_of(address, total) for address, total in sorted(totals.items()))


def _facts_of(address: str, resources: Mapping[str, float]) -> HostFacts:
    types = [name for name in resources if name.startswith(_ACCELERATOR)]
    gpu = types[0].removeprefix(_ACCELERATOR) if len(types) == 1 else ""
    return HostFacts(
        address=address,
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        memory_bytes=int(resources.get("memory", 0)),
        gpu=gpu,
        gpu_memory_bytes=gpu_memory_bytes(gpu),
    )


def demand_per_worker(spec: JobSpec, use_gpu: bool) -> dict[str, float]:
    """Ray resources of one worker."""
    return {"CPU": spec.resources.cpus_per_worker} | ({"GPU": 1.0} if use_gpu else {})


def wants_gpu(spec: JobSpec, num_gpus: float, *, may_grow: bool = False) -> bool:
    """Whether to train on GPUs: as asked, or when a cluster of `num_gpus` has one for every worker.

    Of one that `may_grow` by itself the others are taken to be like those that are there.
    """
    if spec.resources.device != "auto":
        return spec.resources.device == "cuda"
    return num_gpus >= (1 if may_grow else spec.parallelism.min_workers)


def num_that_fit(demand: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many workers of `demand` each fit into `resources`."""
    # Ray counts in ten-thousandths, so a float may lie a hair below the whole number meant.
    fits = (
        int(resources.get(name, 0.0) / amount + 1e-6)
        for name, amount in demand.items()
        if amount > 0
    )
    return min(fits, default=_NO_LIMIT)


def rooms(spec: JobSpec, hosts: Sequence[HostFacts], *, use_gpu: bool) -> tuple[int, ...]:
    """How many workers fit on each host as a whole."""
    demand = demand_per_worker(spec, use_gpu)
    return tuple(
        num_that_fit(demand, {"CPU": host.num_cpus, "GPU": host.num_gpus}) for host in hosts
    )


def worker_bytes(
    spec: JobSpec, hosts: Sequence[HostFacts], *, use_gpu: bool
) -> tuple[int | None, int | None]:
    """Memory of the poorest worker that the hosts have room for, and its share of its host's; None
    where that is not known."""
    room, most = rooms(spec, hosts, use_gpu=use_gpu), spec.parallelism.world_size
    usable = [(host, num) for host, num in zip(hosts, room, strict=True) if num]
    shares = [host.memory_bytes // min(num, most) for host, num in usable if host.memory_bytes]
    share = min(shares, default=None)
    if not use_gpu:
        return share, share
    sizes = [host.gpu_memory_bytes for host, _ in usable]
    return min(sizes) if sizes and all(sizes) else None, share


def hosts_to_come(
    spec: JobSpec, hosts: Sequence[HostFacts], max_workers: int, *, use_gpu: bool
) -> tuple[HostFacts, ...]:
    """The hosts of a cluster that grows to room for `max_workers`: those there, and more like the
    one with the most room; none where no host has room for a worker, so that nothing is known.
    """
    room = rooms(spec, hosts, use_gpu=use_gpu)
    if not any(room):
        return ()
    most, model = max(zip(room, hosts, strict=True), key=lambda pair: pair[0])
    num_more = max(0, max_workers - sum(room)) // most
    return (*hosts, *(replace(model, address=f"new-{index}") for index in range(num_more)))


@dataclass(frozen=True)
class Site:
    """A cluster as one job finds it, at its largest.

    `room` has the workers that fit on each of `hosts`, which are in order of their addresses;
    `worker_bytes` is the memory of the poorest worker, `host_bytes` its share of its host's, None
    where that is not known.
    """

    use_gpu: bool
    hosts: tuple[HostFacts, ...]
    room: tuple[int, ...]
    worker_bytes: int | None
    host_bytes: int | None


def site_of(
    spec: JobSpec,
    hosts: Sequence[HostFacts],
    max_workers: int | None = None,
    *,
    use_gpu: bool | None = None,
) -> Site:
    """The hosts for a job, those to come included where the cluster grows to `max_workers`.

    Whether it trains on GPUs follows from what there are, unless it is settled.
    """
    if use_gpu is None:
        num_gpus = sum(host.num_gpus for host in hosts)
        use_gpu = wants_gpu(spec, num_gpus, may_grow=max_workers is not None)
    found = tuple(sorted(hosts, key=lambda host: host.address))
    if max_workers is not None:
        found = hosts_to_come(spec, found, max_workers, use_gpu=use_gpu)
    room = rooms(spec, found, use_gpu=use_gpu)
    return Site(use_gpu, found, room, *worker_bytes(spec, found, use_gpu=use_gpu))


def described(site: Site) -> Cluster:
    """The hosts as the cost model sees them; raises `ClusterError` where too little is known."""
    room, most = site.room, max(site.room, default=0)
    if not most:
        raise ClusterError(
            "no host of the cluster has room for a worker, or none is known; describe the "
            "cluster to plan for"
        )
    if site.worker_bytes is None:
        types = ", ".join(sorted({host.gpu or "unknown" for host in site.hosts if host.num_gpus}))
        what = f"GPUs ({types})" if site.use_gpu else "hosts"
        raise ClusterError(
            f"the memory of the cluster's {what} is not known; describe the cluster to plan for"
        )
    if site.use_gpu:
        gpu = next(host.gpu for host, num in zip(site.hosts, room, strict=True) if num)
        cluster = replace(gpu_cluster_of_ray(gpu, most), hbm_bytes=site.worker_bytes)
    else:
        cluster = cpu_cluster(most, site.worker_bytes)
    return replace(cluster, name="the service's own", num_hosts=len(room))


def choose_on(spec: JobSpec, site: Site) -> Choice:
    """The best layout of a job on a cluster when it is empty; raises `LayoutError`."""
    links = None
    with suppress(ClusterError):
        links = described(site).host_links
    return choose(need_of(spec, site.room, site.worker_bytes, links))
