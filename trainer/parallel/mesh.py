"""Process groups of the 2D mesh, built from where the workers really run.

Every worker reports its host; the layout is laid over those sites and a DeviceMesh with the
dimensions ("replicate", "shard") is made of it. Its groups are formed here and not by DeviceMesh,
which would sort their ranks, though TorchRec needs them in shard order, and which leaves their
timeout at 30 minutes: a hung peer must never cost that long.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainer.layout.layout import Layout, MeshLayout, WorkerSite

LONG_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class MeshGroups:
    """The groups that this rank is a member of.

    `sharding_group` holds one copy of the tables over L ranks; `replica_group` joins the M ranks
    that hold the same shard; `global_group` is everybody, as is `long_timeout_group`, over gloo,
    where waiting for a rank that plans, or for storage, is no hang for half an hour (for one that
    plans, ten times `recovery.min_hang_s`). A dead peer is noticed at once, as all are connected:
    with TORCH_GLOO_LAZY_INIT torch 2.13 waits for it five time-outs or for good (gloo#520).
    """

    rank: int
    mesh: MeshLayout
    sites: tuple[WorkerSite, ...]
    device: torch.device
    timeout: timedelta
    device_mesh: DeviceMesh
    sharding_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    global_group: dist.ProcessGroup
    long_timeout_group: dist.ProcessGroup

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def sharding_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's sharding group, in shard order."""
        return next(group for group in self.mesh.sharding_groups if self.rank in group)

    @property
    def sharding_placements(self) -> tuple[str, ...]:
        """Rank and device of each shard of this rank's copy, as torch writes them."""
        if self.device.type == "cpu":
            return tuple(f"rank:{rank}/cpu" for rank in self.sharding_ranks)
        return tuple(
            f"rank:{rank}/{self.device.type}:{self.sites[rank].device_index}"
            for rank in self.sharding_ranks
        )

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks of a sharding group on each host it spans; None unless equal on all, in all."""
        hosts = [[self.sites[rank].host for rank in group] for group in self.mesh.sharding_groups]
        return ranks_per_host(hosts)

    @property
    def shard_index(self) -> int:
        """Which shard this rank holds, from 0 to L - 1."""
        return self.sharding_ranks.index(self.rank)


def ranks_per_host(hosts: Sequence[Sequence[str]]) -> int | None:
    """How many ranks of a group share a host, or None when that is not one number.

    `hosts[g][s]` is the host of member s of group g. Layouts number positions host by host, so a
    host's ranks of one group stand together.
    """
    sizes = {count for group in hosts for count in Counter(group).values()}
    return sizes.pop() if len(sizes) == 1 else None


def replicas_per_level(hosts: Sequence[Sequence[str]]) -> int | None:
    """How many replicas of a replica group share a host, where a sync shall go by hosts, else None.

    `hosts[s][g]` is the host of copy g of shard s. It does where all hosts have equally many, a
    power of two, of replica groups that span hosts: `trainer.parallel.collectives` says why.
    """
    size = ranks_per_host(hosts)
    if size is None or not 1 < size < len(hosts[0]) or size.bit_count() > 1:
        return None
    return size


def form_replica_levels(groups: MeshGroups) -> tuple[dist.ProcessGroup, ...]:
    """(intra-host, cross-host) groups of this rank's replica group, or () where a sync does not go
    by hosts. Collective over the global group.
    """
    of_shards = groups.mesh.replica_groups
    hosts = [[groups.sites[rank].host for rank in group] for group in of_shards]
    size = replicas_per_level(hosts)
    return () if size is None else _form_host_groups(of_shards, size, groups)


def form_node_groups(groups: MeshGroups, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups that table-row-wise and grid sharding need. Collective over the global group.

    (intra-host, cross-host): the ranks of this sharding group on one host, which are planned to be
    `size`, and those with the same place on each host.
    """
    return _form_host_groups(groups.mesh.sharding_groups, size, groups)


def _form_host_groups(
    whole: Sequence[Sequence[int]], size: int, groups: MeshGroups
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of each of the `whole` groups, in which `size` ranks of a host stand together: these, and
    those with the same place on each host.
    """
    blocks = [
        [group[start : start + size] for start in range(0, len(group), size)] for group in whole
    ]
    intra = [block for of_group in blocks for block in of_group]
    cross = [ranks for of_group in blocks for ranks in zip(*of_group, strict=True)]
    intra_host = form_groups(intra, groups.rank, groups.timeout)
    return intra_host, form_groups(cross, groups.rank, groups.timeout)


def build_groups(
    layout: Layout, device: torch.device, timeout_s: float, host: str | None = None
) -> MeshGroups:
    """Form the groups of `layout` over the default process group. Collective.

    `host` is this worker's host name unless the cluster knows it by another one. Raises
    `LayoutError` when the number of workers is not T.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    site = WorkerSite(rank, host or socket.gethostname(), local_rank, device.index or 0)
    everyone: list[WorkerSite] = [site] * dist.get_world_size()
    dist.all_gather_object(everyone, site)
    sites = tuple(everyone)
    mesh = MeshLayout.build(layout, sites)
    timeout = timedelta(seconds=timeout_s)
    _set_pg_timeout(timeout, world)
    sharding_group = form_groups(mesh.sharding_groups, rank, timeout)
    replica_group = form_groups(mesh.replica_groups, rank, timeout)
    device_mesh = DeviceMesh.from_group(
        [replica_group, sharding_group],
        device.type,
        mesh=torch.tensor(mesh.sharding_groups),
        mesh_dim_names=("replicate", "shard"),
    )
    return MeshGroups(
        rank=rank,
        mesh=mesh,
        sites=sites,
        timeout=timeout,
        device=device,
        device_mesh=device_mesh,
        sharding_group=sharding_group,
        replica_group=replica_group,
        global_group=world,
        long_timeout_group=dist.new_group(backend="gloo", timeout=LONG_TIMEOUT),
    )


def form_groups(
    groups: Sequence[Sequence[int]], rank: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Form all `groups`, each in the order of its ranks; the one of `rank`. Collective."""
    formed = [dist.new_group(list(ranks), timeout=timeout, sort_ranks=False) for ranks in groups]
    return next(pg for ranks, pg in zip(groups, formed, strict=True) if rank in ranks)
