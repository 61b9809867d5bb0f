"""Choosing a layout: the rules of `auto`, exact survivability, prices, and refusals that help."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import spec_document
from trainer.layout.choice import Choice, Need, candidates, choose, need_of
from trainer.layout.layout import LayoutError
from trainer.spec import validate_spec
from trainer.spec.base import MAX_WORKERS
from trainer.spec.parse import apply_overrides

GIB = 2**30

small_clusters = st.lists(st.integers(0, 5), min_size=1, max_size=5).map(tuple)


@st.composite
def needs(draw: st.DrawFn) -> Need:
    """Needs on small clusters, of all kinds."""
    most = draw(st.integers(1, 10))
    size = draw(st.none() | st.integers(1, 4))
    return Need(
        hosts=draw(small_clusters),
        min_workers=draw(st.integers(1, most)),
        max_workers=most,
        shard_group_size=size,
        placement=draw(st.sampled_from([None, "intra_host", "inter_host"])),
        survive_hosts=draw(st.integers(0, 3)),
        table_bytes=draw(st.none() | st.integers(0, 40)),
        worker_table_bytes=draw(st.none() | st.integers(0, 20)),
        links_bytes_per_s=draw(st.none() | st.just((8.0, 4.0))),
        tied_by=draw(st.sampled_from(["", "a setting"])),
    )


def need(*hosts: int, workers: int | tuple[int, int] = 0, **changes: Any) -> Need:
    """All of the cluster's room, unless `workers` or (min, max) says otherwise; 8 GiB of tables."""
    least, most = workers if isinstance(workers, tuple) else (workers or sum(hosts),) * 2
    known = {"table_bytes": 8 * GIB, "worker_table_bytes": 8 * GIB}
    return Need(hosts, least, most, **{**known, **changes})


def shape(choice: Choice) -> tuple[int, int, str, str]:
    """(T, L, placement, failure domain)."""
    layout = choice.layout
    return (layout.world_size, layout.shard_group_size, layout.placement, choice.failure_domain)


def survived_by_trying(groups: tuple[tuple[int, ...], ...], num_hosts: int) -> int:
    """The greatest k such that each loss of k hosts leaves a whole group, by trying them all."""

    def is_survived(k: int) -> bool:
        losses = itertools.combinations(range(num_hosts), k)
        return all(any(set(group).isdisjoint(lost) for group in groups) for lost in losses)

    return max(k for k in range(num_hosts + 1) if is_survived(k))


@given(needs())
def test_whatever_is_chosen_is_legal_and_survives_what_it_must(need: Need) -> None:
    for each in candidates(need):
        if each.failure_domain == "replica_group":
            survived = survived_by_trying(each.group_hosts, len(need.hosts))
            assert each.num_hosts_survived == survived
    try:
        choice = choose(need)
    except LayoutError as error:
        assert str(error)
        return
    layout = choice.layout
    assert need.min_workers <= layout.world_size <= need.max_workers
    assert need.placement in (None, layout.placement)
    assert need.shard_group_size in (None, layout.shard_group_size)
    assert need.holds_tables(layout.shard_group_size)
    used = [host for group in choice.group_hosts for host in group]
    assert all(used.count(host) <= room for host, room in enumerate(need.hosts))
    assert [len(group) for group in choice.group_hosts] == (
        [layout.shard_group_size] * layout.num_replicas
    )
    assert choice.num_hosts_survived >= need.survive_hosts
    assert choice.reason


@given(needs())
def test_a_refusal_means_that_no_placement_of_whole_groups_would_do(need: Need) -> None:
    try:
        choose(need)
    except LayoutError:
        can_be_groups = not need.tied_by and need.placement != "intra_host"
        for size in range(1, need.max_workers + 1):
            fits = need.shard_group_size in (None, size) and need.holds_tables(size)
            most = need.max_workers // size
            inside = min(most, sum(room // size for room in need.hosts))
            distinct = min(most, sum(room >= size for room in need.hosts))
            is_safe = need.survive_hosts == 0 or (can_be_groups and distinct > need.survive_hosts)
            assert not (fits and inside and inside * size >= need.min_workers and is_safe)


def test_the_price_is_that_of_the_paper() -> None:
    choice = choose(
        need(4, 4, shard_group_size=4, placement="inter_host", links_bytes_per_s=(9 * GIB, GIB))
    )
    # S (M - 1) / T = 8 GiB * 1 / 8, and twice that over 1 GiB/s.
    assert choice.memory_overhead_bytes == GIB
    assert choice.sync_latency_s == 2.0
    unknown = choose(need(4, shard_group_size=2, table_bytes=None))
    assert (unknown.memory_overhead_bytes, unknown.sync_latency_s) == (None, None)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        # One host: the smallest group that holds the tables, copies beside each other.
        (need(4), (4, 1, "intra_host", "job")),
        (need(4, worker_table_bytes=5 * GIB), (4, 2, "intra_host", "job")),
        # They fit only into all workers: one copy.
        (need(4, worker_table_bytes=2 * GIB), (4, 4, "intra_host", "job")),
        # Two hosts: as small as leaves the copies of a shard on one host.
        (need(4, 4), (8, 2, "intra_host", "job")),
        # One worker a host: no two copies can share one, so lookups stay inside instead.
        (need(1, 1, 1), (3, 1, "inter_host", "replica_group")),
        # To survive a host: a group a host, however many more copies would fit.
        (need(4, 4, survive_hosts=1), (8, 4, "inter_host", "replica_group")),
        # Unequal hosts: lookups inside hosts come before the fewest copies.
        (need(4, 2, 2, survive_hosts=1), (8, 2, "inter_host", "replica_group")),
        # Tables larger than a host: groups of two hosts that share none.
        (
            need(3, 3, 3, 3, workers=(4, 8), shard_group_size=4, survive_hosts=1),
            (8, 4, "inter_host", "replica_group"),
        ),
        # As many as may be inside single hosts, and the others across those too small for one.
        (
            need(4, 3, 3, workers=(4, 8), shard_group_size=4, placement="inter_host"),
            (8, 4, "inter_host", "replica_group"),
        ),
        # One large host survives nothing by itself, however many groups it holds.
        (
            need(8, 3, 3, 3, 3, workers=12, shard_group_size=4, survive_hosts=2),
            (12, 4, "inter_host", "replica_group"),
        ),
        # Elastic: as many workers as there is room for.
        (need(2, 2, workers=(2, 6), shard_group_size=2), (4, 2, "intra_host", "job")),
        # Bounds need not be multiples of an L that nobody gave.
        (
            need(4, 4, workers=(3, 7), worker_table_bytes=5 * GIB, survive_hosts=1),
            (6, 3, "inter_host", "replica_group"),
        ),
        # Nobody knows how large the tables are: the fewest copies.
        (need(4, table_bytes=None), (4, 2, "intra_host", "job")),
        # Inter-host was asked for: two copies even on one host, for there is nothing else to give.
        (need(4, placement="inter_host"), (4, 2, "inter_host", "replica_group")),
        # Tables that must stay whole: no two of three of 5 GiB share a worker of 8 GiB.
        (
            need(6, table_bytes=15 * GIB, whole_table_bytes=(5 * GIB,) * 3),
            (6, 3, "intra_host", "job"),
        ),
        # Larger groups would be too few.
        (
            need(2, 2, 2, 2, workers=4, survive_hosts=1, min_groups=3),
            (4, 1, "inter_host", "replica_group"),
        ),
        (
            need(4, 4, workers=(5, 8), placement="inter_host", min_groups=3),
            (8, 2, "inter_host", "replica_group"),
        ),
        # What ties the groups together makes them one job again.
        (
            need(2, 2, placement="inter_host", tied_by="a setting"),
            (4, 2, "inter_host", "job"),
        ),
    ],
)
def test_auto(wanted: Need, expected: tuple[int, int, str, str]) -> None:
    assert shape(choose(wanted)) == expected


def test_the_largest_job_is_laid_out_on_hosts_of_one_worker_each() -> None:
    hosts = (1,) * MAX_WORKERS
    choice = choose(need(*hosts, workers=(1, MAX_WORKERS), placement="inter_host"))
    assert (choice.layout.world_size, choice.num_hosts) == (MAX_WORKERS, MAX_WORKERS)
    assert choice.most_groups_per_host == 1


def test_the_reason_names_the_numbers() -> None:
    for wanted, reason in (
        (
            need(2, 2, 2, survive_hosts=1),
            "3 groups of 2 workers on 3 hosts: the fewest copies with 2 workers a group, each "
            "inside one host; inter_host, so a whole copy trains on when any 2 hosts are lost",
        ),
        (
            need(4, worker_table_bytes=5 * GIB),
            "2 groups of 2 workers on 1 host: the smallest group that holds the tables (8 GiB on "
            "workers with room for 5 GiB) and keeps the copies of a shard on one host; intra_host, "
            "so a sync stays inside a host",
        ),
    ):
        assert choose(wanted).reason == reason


def test_a_setting_that_makes_the_job_one_failure_domain_is_named() -> None:
    asked = ("parallelism.placement=inter_host", "parallelism.shard_group_size=2")
    spread = choose(need_of(movielens(*asked), [2, 2]))
    tied = choose(need_of(movielens(*asked, "parallelism.dense=every_step"), [2, 2]))
    assert (spread.failure_domain, tied.failure_domain) == ("replica_group", "job")
    assert "the failure domain is the whole job, as dense every_step averages" in tied.reason
    assert "failure domain" not in spread.reason


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        (
            need(2, 2, workers=6, survive_hosts=2, shard_group_size=2),
            ["at least 6 workers in groups of 2", "room for 4 (2 + 2 on 2 hosts)"],
        ),
        (
            need(2, 2, workers=(2, 6), survive_hosts=2, shard_group_size=2),
            ["needs 3 hosts with room for L=2 workers", "has 2", "or lower survive.hosts to 1"],
        ),
        (
            need(2, 2, 2, workers=4, survive_hosts=2, shard_group_size=2),
            ["needs 3 groups of 2", "at most 4 workers make 2", "workers to 6"],
        ),
        (need(4, worker_table_bytes=GIB), ["takes 8 GiB", "needs 8 workers", "at most 4"]),
        (
            need(4, shard_group_size=2, worker_table_bytes=2 * GIB),
            ["needs 4 workers", "at most 2: raise parallelism.shard_group_size"],
        ),
        (
            need(4, whole_table_bytes=(6 * GIB,), worker_table_bytes=5 * GIB),
            ["must stay whole takes 6 GiB", "row_wise"],
        ),
        (
            need(3, 3, 3, workers=8, shard_group_size=4, placement="inter_host"),
            ["room for 9 (3 + 3 + 3 on 3 hosts)", "each holds whole groups, or takes part in one"],
        ),
        (need(5, shard_group_size=2), ["workers (5) must be a multiple of shard_group_size (2)"]),
        (need(workers=4), ["room for 0 (none on 0 hosts)"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_needed(
    wanted: Need, parts: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        choose(wanted)
    for part in parts:
        assert part in str(caught.value)


@given(needs(), st.integers(0, 3))
def test_one_more_host_never_makes_a_job_impossible(need: Need, room: int) -> None:
    try:
        choose(need)
    except LayoutError:
        return
    assert choose(replace(need, hosts=(*need.hosts, room)))


def movielens(*changes: str) -> Any:
    """A checked spec: one table of 36 000 bytes with its state."""
    sizes = ["shard_group_size=auto", "placement=auto"]
    changes = (*(f"parallelism.{each}" for each in sizes), *changes)
    if not any("num_embeddings" in change for change in changes):
        changes = ("embedding_tables[0].num_embeddings=1000", *changes)
    return validate_spec(apply_overrides(spec_document(), list(changes)))


def test_a_spec_says_what_it_needs() -> None:
    found = need_of(movielens(), [2, 2], worker_bytes=100_000, links_bytes_per_s=(2e9, 1e9))
    # Of 85 000 bytes 36 of 37: a row has 36 bytes, and a mark of one where it is touched.
    known = {"table_bytes": 36_000, "worker_table_bytes": 82_702, "links_bytes_per_s": (2e9, 1e9)}
    assert found == Need(hosts=(2, 2), min_workers=4, max_workers=4, **known)
    unknown = movielens("embedding_tables[0].num_embeddings=auto")
    assert need_of(unknown, [4], worker_bytes=100_000).table_bytes is None
    whole = movielens("embedding_tables[0].constraints.sharding_types=[table_wise]")
    assert need_of(whole, [4]).whole_table_bytes == (36_000,)
    limit, sync = "resources.memory_bytes_per_worker=40000", "{mode: full, dtype: bf16}"
    found = need_of(movielens(limit, f"parallelism.sync={sync}"), [4], worker_bytes=100_000)
    assert found.worker_table_bytes == 17_000, "a sync keeps a copy"
    cached = movielens(limit, "parallelism.planner.compute_kernel=auto")
    assert need_of(cached, [4]).worker_table_bytes is None, "host memory holds tables as well"
    assert (found.tied_by, found.min_groups) == ("", 1)
    assert need_of(movielens("parallelism.min_groups=3"), [4]).min_groups == 3
    assert need_of(movielens("parallelism.dense=every_step"), [4]).tied_by
