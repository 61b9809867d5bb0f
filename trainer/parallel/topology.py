"""What the planner reckons with: memory, hosts and bandwidths of one sharding group.

All sharding groups get the same plan, so the topology describes the poorest worker of any group
and the hosts that every group alike is spread over.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import (
    CollectiveType,
    GeneralizedCommsBandwidth,
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)

from trainer.parallel.bandwidth import Bandwidths
from trainer.parallel.groups import MeshGroups

# The most that a container may use (cgroup v2); "max" where there is no limit.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class MeasuredBandwidths(GeneralizedCommsBandwidth):
    """Measured links for TorchRec's cost model, in bytes per ms.

    The stock model multiplies the link between hosts by the workers of a host for an all-reduce
    (a network card for each GPU). What is measured here is what one worker got while all others
    were busy too, so no such factor belongs to it.
    """

    def __init__(self, intra_host: float, inter_host: float) -> None:
        self._intra_host = intra_host
        self._inter_host = inter_host

    @property
    def intra_host_bw(self) -> float:
        """Between two workers of a host."""
        return self._intra_host

    @property
    def inter_host_bw(self) -> float:
        """Between two workers of different hosts."""
        return self._inter_host

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """The slowest link that a collective over `world_size` ranks must use."""
        return self._intra_host if world_size <= local_world_size else self._inter_host


def topology_of(
    groups: MeshGroups, usable_bytes: int, bandwidths: Bandwidths | None = None
) -> Topology:
    """Topology of one sharding group with `usable_bytes` for tables on each worker.

    Without `bandwidths`, or where no two workers share a kind of link, TorchRec's own numbers
    stand.
    """
    is_cpu = groups.device.type == "cpu"
    memory_bw = bandwidths.memory if bandwidths else None
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=groups.layout.shard_group_size,
            # Unequal hosts: every link counts as one between hosts.
            local_world_size=groups.ranks_per_host or 1,
            hbm_cap_bytes=None if is_cpu else usable_bytes,
            ddr_cap_bytes=usable_bytes if is_cpu else None,
        ),
        HardwareConfig(
            hbm_mem_bw=None if is_cpu else memory_bw,
            ddr_mem_bw=memory_bw if is_cpu else None,
        ),
        KernelConfig(
            compute_device=groups.device.type,
            use_hardware_based_bandwidth=bandwidths is not None,
            generalized_comms_bandwidths=_links(bandwidths) if bandwidths else None,
        ),
    )


def _links(bandwidths: Bandwidths) -> MeasuredBandwidths | None:
    intra, inter = bandwidths.intra_host, bandwidths.inter_host
    if intra is None and inter is None:
        return None
    return MeasuredBandwidths(intra or inter or 0.0, inter or intra or 0.0)


def least_memory_bytes(groups: MeshGroups) -> int:
    """Memory of the poorest worker. Collective over the global group."""
    everyone = [0] * groups.layout.world_size
    dist.all_gather_object(everyone, _memory_bytes(groups), group=groups.global_group)
    return min(everyone)


def _memory_bytes(groups: MeshGroups) -> int:
    """Memory of this worker's GPU, or its share of the host's."""
    if groups.device.type == "cuda":
        return torch.cuda.get_device_properties(groups.device).total_memory
    num_on_host = Counter(site.host for site in groups.sites)
    return _host_memory_bytes() // num_on_host[groups.sites[groups.rank].host]


def _host_memory_bytes() -> int:
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdigit() else installed
