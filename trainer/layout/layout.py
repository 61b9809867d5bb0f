"""The 2D layout: which rank holds which shard of which copy (pure, no torch).

T ranks form M = T / L *sharding groups* of L ranks, each holding one full copy of the tables,
sharded. Ranks that hold the same shard form a *replica group*. `intra_host` puts a replica group
on neighbouring positions (fast sync), `inter_host` a sharding group (a lost host leaves a full
copy alive). Positions number the workers host by host; `MeshLayout` maps them to the ranks that
the cluster really gave out. (2D sparse parallelism paper, section 3.1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LayoutError(ValueError):
    """A layout that cannot be built; the message says which numbers would fit."""


@dataclass(frozen=True)
class Layout:
    """T = `world_size` positions in sharding groups of L = `shard_group_size`."""

    world_size: int
    shard_group_size: int
    placement: str

    def __post_init__(self) -> None:
        if self.world_size % self.shard_group_size:
            raise LayoutError(
                f"world size {self.world_size} is not a multiple of shard group size "
                f"{self.shard_group_size}"
            )

    @property
    def num_replicas(self) -> int:
        """M, the number of sharding groups."""
        return self.world_size // self.shard_group_size

    @property
    def sharding_groups(self) -> tuple[tuple[int, ...], ...]:
        """M tuples of L positions; entry [g][s] holds shard s of copy g."""
        size, copies = self.shard_group_size, self.num_replicas
        if self.placement == "inter_host":
            return tuple(tuple(range(g * size, (g + 1) * size)) for g in range(copies))
        return tuple(tuple(range(g, self.world_size, copies)) for g in range(copies))

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """L tuples of M positions; entry [s] holds the M copies of shard s."""
        return tuple(zip(*self.sharding_groups, strict=True))


@dataclass(frozen=True)
class WorkerSite:
    """Where one worker runs: `rank` as the cluster numbered it, its host and its place there.

    `device_index` is the GPU that it sees as its own (0 on CPU).
    """

    rank: int
    host: str
    local_rank: int
    device_index: int = 0


def order_by_host(sites: Sequence[WorkerSite]) -> tuple[int, ...]:
    """Ranks host by host, hosts by their lowest rank: position p is held by rank result[p].

    Node order changes between restarts and ranks need not be contiguous per node, so groups are
    laid over positions and never over the rank numbers themselves.
    """
    lowest: dict[str, int] = {}
    for site in sites:
        lowest[site.host] = min(site.rank, lowest.get(site.host, site.rank))
    ordered = sorted(sites, key=lambda site: (lowest[site.host], site.local_rank, site.rank))
    return tuple(site.rank for site in ordered)


@dataclass(frozen=True)
class MeshLayout:
    """A layout laid over the workers that really exist."""

    layout: Layout
    ranks: tuple[int, ...]

    @classmethod
    def build(cls, layout: Layout, sites: Sequence[WorkerSite]) -> MeshLayout:
        """Lay `layout` over `sites`; raises `LayoutError` when their number is not T."""
        if sorted(site.rank for site in sites) != list(range(layout.world_size)):
            raise LayoutError(
                f"{len(sites)} workers reported in, but the layout is for ranks 0 to "
                f"{layout.world_size - 1}"
            )
        return cls(layout, order_by_host(sites))

    @property
    def sharding_groups(self) -> tuple[tuple[int, ...], ...]:
        """As `Layout.sharding_groups`, in ranks."""
        return tuple(tuple(self.ranks[p] for p in g) for g in self.layout.sharding_groups)

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """As `Layout.replica_groups`, in ranks."""
        return tuple(tuple(self.ranks[p] for p in g) for g in self.layout.replica_groups)


def placement_warning(mesh: MeshLayout, sites: Sequence[WorkerSite]) -> str | None:
    """A sentence when the true topology does not give what the placement promises, else None."""
    if mesh.layout.num_replicas == 1:
        return None
    hosts = {site.rank: site.host for site in sites}
    spans = [len({hosts[rank] for rank in group}) for group in mesh.replica_groups]
    if mesh.layout.placement == "intra_host" and max(spans) > 1:
        return (
            f"placement intra_host: a replica group spans {max(spans)} hosts, so syncs cross hosts"
        )
    if mesh.layout.placement == "inter_host" and min(spans) == 1:
        return (
            "placement inter_host: all copies of a shard sit on one host, so losing that host "
            "loses the shard"
        )
    return None
