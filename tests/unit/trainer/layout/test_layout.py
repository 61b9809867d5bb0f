"""Rank arithmetic of the 2D layout: the published tables, and laws that hold for any T and L."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.layout.layout import (
    Layout,
    LayoutError,
    MeshLayout,
    WorkerSite,
    order_by_host,
    placement_warning,
)

layouts = st.builds(
    lambda copies, size, placement: Layout(copies * size, size, placement),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(["intra_host", "inter_host"]),
)


def sites_on_hosts(num_hosts: int, per_host: int) -> list[WorkerSite]:
    """Workers numbered host by host."""
    return [
        WorkerSite(host * per_host + local, f"host-{host}", local)
        for host in range(num_hosts)
        for local in range(per_host)
    ]


def test_eight_ranks_equal_the_published_tables() -> None:
    layout = Layout(8, 4, "intra_host")
    assert layout.sharding_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.replica_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    layout = Layout(8, 4, "inter_host")
    assert layout.sharding_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(layouts)
def test_every_rank_is_in_one_group_of_each_kind(layout: Layout) -> None:
    for groups, size in (
        (layout.sharding_groups, layout.shard_group_size),
        (layout.replica_groups, layout.num_replicas),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {size}
    for shards, copies in itertools.product(layout.sharding_groups, layout.replica_groups):
        assert len(set(shards) & set(copies)) == 1


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="not a multiple"):
        Layout(5, 2, "intra_host")
    with pytest.raises(LayoutError, match="3 workers"):
        MeshLayout.build(Layout(4, 2, "intra_host"), sites_on_hosts(1, 3))


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_positions_run_host_by_host_however_ranks_are_numbered(
    num_hosts: int, per_host: int, rng: random.Random
) -> None:
    numbers = list(range(num_hosts * per_host))
    rng.shuffle(numbers)
    sites = [
        WorkerSite(numbers[index], site.host, site.local_rank)
        for index, site in enumerate(sites_on_hosts(num_hosts, per_host))
    ]
    host_of = {site.rank: site.host for site in sites}
    hosts = [host_of[rank] for rank in order_by_host(sites)]
    changes = sum(before != after for before, after in itertools.pairwise(hosts))
    assert changes == num_hosts - 1


def test_groups_follow_the_hosts_however_ranks_are_numbered() -> None:
    interleaved = [WorkerSite(rank, f"host-{rank % 2}", rank // 2) for rank in range(8)]
    mesh = MeshLayout.build(Layout(8, 4, "intra_host"), interleaved)
    assert mesh.replica_groups == ((0, 2), (4, 6), (1, 3), (5, 7))
    assert placement_warning(mesh, interleaved) is None
    mesh = MeshLayout.build(Layout(8, 4, "inter_host"), interleaved)
    assert mesh.sharding_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert placement_warning(mesh, interleaved) is None


@pytest.mark.parametrize(("placement", "num_hosts"), [("intra_host", 4), ("inter_host", 1)])
def test_a_topology_that_breaks_the_placement_is_said(placement: str, num_hosts: int) -> None:
    sites = sites_on_hosts(num_hosts, 4 // num_hosts)
    warning = placement_warning(MeshLayout.build(Layout(4, 2, placement), sites), sites)
    assert warning is not None and placement in warning
