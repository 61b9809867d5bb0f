"""Process groups of the 2D mesh, built from where the workers really run.

Every worker reports its host; the layout is laid over those sites and a DeviceMesh with the
dimensions ("replicate", "shard") is made of it. `init_process_group(timeout=)` does not reach the
groups of a DeviceMesh, so each gets its time-out here: a hung peer must never cost 30 minutes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainer.parallel.layout import Layout, MeshLayout, WorkerSite, placement_warning


@dataclass(frozen=True)
class MeshGroups:
    """The groups that this rank is a member of.

    `sharding_group` holds one copy of the tables over L ranks; `replica_group` joins the M ranks
    that hold the same shard; `global_group` is everybody.
    """

    rank: int
    mesh: MeshLayout
    hosts: tuple[str, ...]
    warning: str | None
    device: torch.device
    device_mesh: DeviceMesh
    sharding_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    global_group: dist.ProcessGroup

    @property
    def layout(self) -> Layout:
        """The layout in positions."""
        return self.mesh.layout

    @property
    def sharding_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's sharding group, in shard order."""
        return self.mesh.sharding_group_of(self.rank)

    @property
    def shard_index(self) -> int:
        """Which shard this rank holds, from 0 to L - 1."""
        return self.mesh.shard_index_of(self.rank)


def local_site(rank: int, host: str | None = None) -> WorkerSite:
    """This worker's site; `host` is its host name unless the cluster knows it by another one."""
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return WorkerSite(rank, host or socket.gethostname(), local_rank)


def gather_sites(site: WorkerSite) -> tuple[WorkerSite, ...]:
    """Sites of all ranks, indexed by rank. Collective over the default group."""
    sites: list[WorkerSite | None] = [None] * dist.get_world_size()
    dist.all_gather_object(sites, site)
    return tuple(site for site in sites if site is not None)


def build_groups(
    layout: Layout, device: torch.device, timeout_s: float, host: str | None = None
) -> MeshGroups:
    """Form the groups of `layout` over the default process group. Collective.

    Raises `LayoutError` when the number of workers is not T.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    sites = gather_sites(local_site(rank, host))
    mesh = MeshLayout.build(layout, sites)
    device_mesh = DeviceMesh(
        device.type,
        [list(group) for group in mesh.sharding_groups],
        mesh_dim_names=("replicate", "shard"),
    )
    groups = MeshGroups(
        rank=rank,
        mesh=mesh,
        hosts=tuple(site.host for site in sites),
        warning=placement_warning(mesh, sites),
        device=device,
        device_mesh=device_mesh,
        sharding_group=device_mesh.get_group("shard"),
        replica_group=device_mesh.get_group("replicate"),
        global_group=world,
    )
    for group in (groups.sharding_group, groups.replica_group, groups.global_group):
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return groups
