"""What the planner may do with each table, what it is told of hosts, and what a plan says."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner.types import CollectiveType
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from tests.harness.builders import spec_document
from trainer.layout.cost import cpu_cluster
from trainer.layout.hosts import HostFacts, choose_on, described, site_of
from trainer.layout.layout import Layout, MeshLayout, WorkerSite
from trainer.layout.workload import GroupPlan, GroupTopology
from trainer.parallel import planner
from trainer.parallel.group_planner import group_plan, tables_of
from trainer.parallel.mesh import MeshGroups, ranks_per_host, replicas_per_level
from trainer.parallel.planner import (
    Bandwidths,
    PlanError,
    group_plan_of,
    least_memory_bytes,
    make_plan,
    median_bandwidths,
    narrowed,
    node_size,
    obstacle,
    partners,
    place_plan,
    plans_digest,
    table_constraints,
    table_plans,
)
from trainer.parallel.sharding import sharders
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec


def _spec(shard_group_size: int = 4, rows: int = 100, **constraints: Any) -> JobSpec:
    table = {"name": "movies", "num_embeddings": rows, "embedding_dim": 8}
    document = spec_document() | {
        "features": [
            {"name": "age", "type": "dense"},
            {"name": "seen", "type": "id_list", "table": "movies", "weights_column": "w"},
            {"name": "liked", "type": "id_list", "table": "movies"},
        ],
        "embedding_tables": [table | {"constraints": constraints}],
        "parallelism": {"workers": shard_group_size, "shard_group_size": shard_group_size},
    }
    return validate_spec(document)


@given(rows=st.integers(1, 50), parts=st.integers(1, 9))
def test_row_wise_is_possible_when_every_worker_gets_rows(rows: int, parts: int) -> None:
    spec = _spec(parts, rows)
    block = math.ceil(rows / parts)
    shards = [max(0, min(block, rows - part * block)) for part in range(parts)]
    reason = obstacle("row_wise", spec.embedding_tables[0], spec, ranks_per_host=None)
    assert (reason is None) == all(shards)


@pytest.mark.parametrize("sharding_type", ["table_row_wise", "grid_shard"])
def test_types_that_split_over_a_host_need_equal_hosts_and_enough_rows(sharding_type: str) -> None:
    spec = _spec(4, 5)
    table = spec.embedding_tables[0]
    assert obstacle(sharding_type, table, spec, ranks_per_host=2) is None
    assert "each host" in (obstacle(sharding_type, table, spec, ranks_per_host=None) or "")
    assert "5 rows" in (obstacle(sharding_type, table, spec, ranks_per_host=4) or "")
    assert node_size(_plan("row_wise", _halves())) is None, "it needs no equal hosts"


def test_impossible_types_are_left_out_and_a_table_without_any_other_is_refused() -> None:
    types = ["row_wise", "table_wise", "table_row_wise"]
    spec = _spec(4, 3, sharding_types=types, pooling_factor=7.5, min_partition=4)
    found = table_constraints(spec, ranks_per_host=None)["movies"]
    assert found.sharding_types == ["table_wise"]
    # What the planner reckons with; one factor for each feature of the table.
    assert (found.min_partition, found.pooling_factors, found.is_weighted) == (4, [7.5] * 2, True)
    spec = _spec(4, 3, sharding_types=["row_wise", "grid_shard"])
    with pytest.raises(PlanError) as error:
        table_constraints(spec, ranks_per_host=None)
    for part in ("'movies'", "row_wise would leave", "grid_shard needs", "Add table_wise"):
        assert part in str(error.value)


def _plan(sharding_type: str, shards: list[ShardMetadata] | None) -> ShardingPlan:
    parameter = ParameterSharding(
        sharding_type=sharding_type,
        compute_kernel="fused" if shards else "dense",
        ranks=[shard.placement.rank() for shard in shards] if shards else [0, 1],
        sharding_spec=EnumerableShardingSpec(shards) if shards else None,
    )
    return ShardingPlan({"tables": EmbeddingModuleShardingPlan({"movies": parameter})})


def _halves() -> list[ShardMetadata]:
    return [
        ShardMetadata(shard_offsets=[0, 4 * i], shard_sizes=[100, 4], placement=f"rank:{i}/cpu")
        for i in range(2)
    ]


def test_table_plans_name_the_position_and_rectangle_of_each_shard() -> None:
    (table,) = table_plans(_plan("column_wise", _halves()), _spec(2))
    assert (table.name, table.sharding_type, table.data_type) == ("movies", "column_wise", "fp32")
    assert table.size_bytes == 100 * (8 * 4 + 4)  # fp32 weights, one moment a row
    rectangles = [
        (s.position, s.row_offset, s.column_offset, s.num_rows, s.num_columns) for s in table.shards
    ]
    assert rectangles == [(0, 0, 0, 100, 4), (1, 0, 4, 100, 4)]


def test_a_data_parallel_table_lists_no_shards_and_is_whole_at_every_position() -> None:
    plan = _plan("data_parallel", None)
    (table,) = table_plans(plan, _spec(2))
    assert table.shards == []
    found = group_plan_of(plan, _spec(2), 2)
    assert (found.tables[0].ranks, found.tables[0].row_parts) == (None, 1)
    assert [rank.tables_bytes for rank in found.ranks] == [100 * 8 * 4] * 2


def test_a_placed_plan_is_a_copy_on_the_ranks_of_a_group() -> None:
    plan = _plan("column_wise", _halves())
    placed = place_plan(plan, ["rank:5/cpu", "rank:2/cpu"]).plan["tables"]["movies"]
    assert placed.ranks == [5, 2]
    places = [str(shard.placement) for shard in placed.sharding_spec.shards]
    assert places == ["rank:5/cpu", "rank:2/cpu"]
    assert plan.plan["tables"]["movies"].ranks == [0, 1]


# Rows of 32 bytes, with a moment each; two workers. 29 MB, 2.9 GB, 29 GB.
CACHED_ROWS = {"small": 800_000, "large": 80_000_000, "huge": 800_000_000}
GB = 10**9


def _spec_of_tables(tables: dict[str, dict[str, Any]], workers: int, **parallelism: Any) -> JobSpec:
    """A job with these tables of 8 columns, each looked up by a list."""
    document = spec_document() | {
        "features": [
            {"name": "age", "type": "dense"},
            *({"name": f"seen_{name}", "type": "id_list", "table": name} for name in tables),
        ],
        "embedding_tables": [
            {"name": name, "embedding_dim": 8} | table for name, table in tables.items()
        ],
        "parallelism": {"workers": workers, "shard_group_size": workers} | parallelism,
    }
    return validate_spec(document)


def _gpu_spec(**planner_spec: Any) -> JobSpec:
    tables = {name: {"num_embeddings": rows} for name, rows in CACHED_ROWS.items()}
    return _spec_of_tables(tables, 2, planner={"storage_reservation": 0.1} | planner_spec)


def _plan_on(device: str, spec: JobSpec, memory_bytes: int, host_bytes: int = 64 * GB) -> GroupPlan:
    """The plan of one host's workers that have so much memory each."""
    size = spec.parallelism.group_size
    topology = GroupTopology(
        shard_group_size=size,
        ranks_per_host=size,
        device=device,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_bytes,
        memory_bytes_per_s=9e11,
        intra_host_bytes_per_s=6e11,
        inter_host_bytes_per_s=1e10,
    )
    return group_plan(spec, topology)


def _kernels(plan: GroupPlan) -> dict[str, tuple[str, float]]:
    """How each table is computed, and the share of its rows in GPU memory."""
    assert not plan.obstacle
    return {table.name: (table.compute_kernel, table.load_factor) for table in plan.tables}


def _types(plan: GroupPlan) -> dict[str, str]:
    assert not plan.obstacle
    return {table.name: table.sharding_type for table in plan.tables}


def test_tables_that_do_not_fit_a_gpu_are_in_host_memory_with_what_is_left_for_their_cache() -> (
    None
):
    auto = _gpu_spec(compute_kernel="auto")
    flat = ("fused", 1.0)
    assert _kernels(_plan_on("cuda", auto, 20 * GB)) == dict.fromkeys(CACHED_ROWS, flat)
    shares = []
    for gpu_bytes in (6 * GB, 8 * GB, 10 * GB):
        found = _kernels(_plan_on("cuda", auto, gpu_bytes))
        kernel, share = found["huge"]
        assert (kernel, found["small"]) == ("fused_uvm_caching", flat)
        shares.append(share)
    assert 0.01 < shares[0] < shares[1] < shares[2] < 1, "a cache takes what there is"
    fixed = _gpu_spec(compute_kernel="auto", cache_load_factor=0.1)
    assert _kernels(_plan_on("cuda", fixed, 10 * GB))["huge"] == ("fused_uvm_caching", 0.1)
    obstacle = _plan_on("cuda", auto, 10 * GB, host_bytes=16 * GB).obstacle
    assert re.search(r"ddr=5\d{10}", obstacle or "")


def test_tables_are_cached_where_that_is_asked_for_and_there_are_gpus() -> None:
    cached = _gpu_spec(compute_kernel="fused_uvm_caching")
    found = _kernels(_plan_on("cuda", cached, 20 * GB))
    assert found == dict.fromkeys(CACHED_ROWS, ("fused_uvm_caching", 0.2))
    assert "CUDA only" in (_plan_on("cpu", cached, 64 * GB).obstacle or "")
    auto = _gpu_spec(compute_kernel="auto")
    assert _kernels(_plan_on("cpu", auto, 64 * GB)) == dict.fromkeys(CACHED_ROWS, ("fused", 1.0))
    assert "planner.compute_kernel auto" in (_plan_on("cuda", _gpu_spec(), 10 * GB).obstacle or "")


@pytest.mark.parametrize(
    ("sharding_type", "optimizer", "row_bytes"),
    [
        # Of 16 columns of 2 bytes, with a moment of 4 a row: whole, its gradient, both in float32.
        ("data_parallel", "row_wise_adagrad", 2 * (32 + 64) + 4),
        ("row_wise", "row_wise_adagrad", (32 + 4) / 4),
        # Four columns, and the moments of all rows, or of these columns.
        ("column_wise", "row_wise_adagrad", 8 + 4),
        ("column_wise", "adagrad", 8 + 16),
        ("column_wise", "sgd", 8),
    ],
)
def test_a_plan_holds_what_a_rank_holds_of_a_table(
    sharding_type: str, optimizer: str, row_bytes: float
) -> None:
    table = {"name": "movies", "num_embeddings": 10_000_000, "embedding_dim": 16}
    constraints = {"sharding_types": [sharding_type], "min_partition": 4}
    document = spec_document() | {
        "features": [
            {"name": "age", "type": "dense"},
            {"name": "seen", "type": "id", "table": "movies"},
        ],
        "embedding_tables": [table | {"data_type": "fp16", "constraints": constraints}],
        "parallelism": {"workers": 4, "shard_group_size": 4},
        "model": spec_document()["model"] | {"dense_arch": {"layer_sizes": [16]}},
        "optimizer": {"sparse": {"name": optimizer}},
        "resources": {"device": "cpu"},
    }
    spec, held = validate_spec(document), row_bytes * table["num_embeddings"]
    usable = 1 - spec.parallelism.planner.storage_reservation
    for share, fits in ((1.05, True), (0.95, False)):
        found = _plan_on("cpu", spec, int(held * share / usable))
        assert (not found.obstacle) == fits, found.obstacle
        for rank in found.ranks:
            assert rank.tables_bytes + rank.optimizer_bytes == pytest.approx(held)


HOSTS = st.lists(st.sampled_from("abc"), max_size=9)


@given(hosts=HOSTS, same_host=st.booleans())
def test_partners_are_mutual_pairs_of_the_asked_kind(hosts: list[str], same_host: bool) -> None:
    pairs = partners(hosts, same_host=same_host)
    for position, other in pairs.items():
        assert position != other and pairs[other] == position
        assert (hosts[position] == hosts[other]) == same_host
    # No two that could pair up are left over.
    alone = [position for position in range(len(hosts)) if position not in pairs]
    assert not any((hosts[p] == hosts[q]) == same_host for p in alone for q in alone if p < q)


def test_medians_count_only_the_workers_that_could_measure() -> None:
    measured = [Bandwidths(10.0, 4.0), Bandwidths(30.0, None), Bandwidths(20.0, 8.0)]
    assert median_bandwidths(measured) == Bandwidths(20.0, 6.0, None)
    # A collective within a host is reckoned at its own speed.
    links = Bandwidths(memory=1.0, intra_host=8.0, inter_host=2.0)
    assert [links.get_bw(n, 4, CollectiveType.ALL_REDUCE) for n in (4, 2)] == [8.0, 2.0]


def test_independent_groups_plan_alike_wherever_they_lie_and_whatever_they_would_measure() -> None:
    tables = {
        f"t{i}": {"num_embeddings": 1000 - 100 * i, "constraints": {"pooling_factor": factor}}
        for i, factor in enumerate((1, 20, 5, 1))
    }
    whole = _spec_of_tables(tables, 2)
    one_of_two = _spec_of_tables(tables, 4, shard_group_size=2, placement="inter_host")
    assert one_of_two.parallelism.failure_domain == "replica_group"
    rates = {"intra_host_bytes_per_s": 4e9, "inter_host_bytes_per_s": 4e6}
    cluster = replace(cpu_cluster(2, 8 * GB), hbm_bytes_per_s=1e10, **rates)

    def plan(spec: JobSpec, measured: Bandwidths, hosts: str = "aa") -> str:
        sites = tuple(WorkerSite(rank, host, 0, 0) for rank, host in enumerate(hosts))
        groups = _one_group(sites)
        with (
            patch.object(planner, "measure_bandwidths", lambda _: measured),
            patch.object(planner, "host_memory_bytes", lambda: (32 * GB, 0)),
            patch.object(planner.dist, "all_gather_object"),
            patch.object(planner.dist, "broadcast_object_list"),
        ):
            found = make_plan(tables_of(spec), spec, groups, sharders(spec), cluster)
        return plans_digest(table_plans(found, spec))

    fast_memory, fast_links = Bandwidths(4e7, 1e6, 1e6), Bandwidths(1e7, 4e6, 4e3)
    assert plan(whole, fast_memory) != plan(whole, fast_links)
    assert plan(whole, fast_links) != plan(whole, fast_links, "ab")
    assert plan(one_of_two, fast_memory) == plan(one_of_two, fast_links, "ab")


def _one_group(sites: tuple[WorkerSite, ...]) -> MeshGroups:
    """The world of one sharding group, seen by its first rank."""
    mesh = MeshLayout.build(Layout(len(sites), len(sites), "inter_host"), sites)
    none = [cast("Any", None)] * 5
    return MeshGroups(0, mesh, sites, torch.device("cpu"), timedelta(0), *none)


def test_a_workers_share_of_a_host_is_that_of_a_host_that_other_groups_fill() -> None:
    sites = tuple(WorkerSite(rank, "a", rank, 0) for rank in range(2))
    with (
        patch.object(planner, "host_memory_bytes", lambda: (32 * GB, 0)),
        patch.object(planner.dist, "all_gather_object"),
    ):
        assert least_memory_bytes(_one_group(sites)) == (16 * GB, 16 * GB)
        assert least_memory_bytes(_one_group(sites), num_on_host=8) == (4 * GB, 4 * GB)


def test_the_workers_of_independent_groups_have_the_least_share_of_any_host_wherever_they_lie() -> (
    None
):
    tables = {"t": {"num_embeddings": 50 * 10**6}}  # 1.6 GB
    spec = _spec_of_tables(tables, 4, shard_group_size=2, placement="inter_host")
    site = site_of(spec, [HostFacts("a", 16, 0, 64 * GB), HostFacts("b", 2, 0, 4 * GB)])
    assert choose_on(spec, site).failure_domain == "replica_group"
    sites = tuple(WorkerSite(rank, "b", rank, 0) for rank in range(2))
    with (
        # A sixteenth of that would be too little.
        patch.object(planner, "host_memory_bytes", lambda: (4 * GB, 0)),
        patch.object(planner.dist, "all_gather_object"),
        patch.object(planner.dist, "broadcast_object_list"),
        patch.object(planner, "plan_group", side_effect=PlanError("not here")) as asked,
        pytest.raises(PlanError),
    ):
        make_plan(nn.Module(), spec, _one_group(sites), sharders(spec), described(site))
    assert asked.call_args.args[6] == (2 * GB, 2 * GB)


def test_independent_groups_on_gpus_plan_alike_where_workers_hold_a_little_more_or_less() -> None:
    sites = tuple(WorkerSite(rank, "a", rank, 0) for rank in range(2))
    groups = replace(_one_group(sites), device=torch.device("cuda"))

    def measured(free: int, num_on_host: int | None) -> tuple[int, int]:
        with (
            patch.object(planner, "host_memory_bytes", lambda: (64 * GB + free, 0)),
            patch.object(planner.dist, "all_gather_object"),
            patch.object(planner.torch.cuda, "empty_cache"),
            patch.object(planner.torch.cuda, "mem_get_info", lambda _: (free, 80 * 2**30)),
        ):
            return least_memory_bytes(groups, num_on_host)

    more, less = 78 * 2**30 + 2**20, 78 * 2**30 - 2**20
    assert measured(more, None) == (more, (64 * GB + more) // 2)
    assert measured(more, 8) == measured(less, 8)
    assert measured(less, 8)[0] == 75 * 2**30
    assert measured(2**36 + 5, 8)[0] == 2**36, "which others hold a part of"


def test_of_ways_that_are_equally_good_a_table_gets_the_one_that_its_constraints_name_first() -> (
    None
):
    for types in (["table_wise", "column_wise"], ["column_wise", "table_wise"]):
        spec = _spec(2, rows=1000, sharding_types=types, min_partition=8)
        assert _types(_plan_on("cpu", spec, GB)) == {"movies": types[0]}


def test_a_sequence_is_planned_with_as_many_lookups_as_it_may_be_long() -> None:
    table = {"num_embeddings": 100, "embedding_dim": 8, "constraints": {"pooling_factor": 7.5}}
    types = {"history": "sequence", "last": "id", "tags": "id_list"}
    features = [{"name": name, "type": kind, "table": name} for name, kind in types.items()]
    features[0]["max_length"] = 30
    tables = [{"name": name} | table for name in types]
    document = spec_document(features=[*features, {"name": "age", "type": "dense"}])
    spec = validate_spec(document | {"embedding_tables": tables})
    found = table_constraints(spec, ranks_per_host=2)
    assert [found[name].pooling_factors for name in types] == [[30.0], [1.0], [7.5]]


def test_ranks_per_host_is_one_number_only_when_all_groups_are_spread_alike() -> None:
    assert ranks_per_host(["aabb", "aabb"]) == 2
    assert ranks_per_host(["abcd"]) == 1
    assert ranks_per_host(["aab"]) is None
    assert ranks_per_host(["aaaa", "bbcc"]) is None


def test_a_sync_goes_by_hosts_where_they_hold_equal_powers_of_two_of_its_copies() -> None:
    assert replicas_per_level(["aabb", "aabb"]) == 2
    assert replicas_per_level(["aabbcc"]) == 2
    assert replicas_per_level(["aaaabbbb"]) == 4
    for elsewhere in (["aaaa"], ["abcd"], ["aaabbb"], ["aaaabb"], ["aabb", "aaaa"]):
        assert replicas_per_level(elsewhere) is None


def test_where_the_search_would_take_minutes_each_table_has_one_way() -> None:
    rows = {"small": 1_000, "wide": 40_000_000, "hot": 2_000, "whole": 3_000}
    heavy = {"hot": {"pooling_factor": 500.0}, "whole": {"sharding_types": ["table_wise"]}}
    tables = {
        name: {"num_embeddings": number, "constraints": heavy.get(name, {})}
        for name, number in rows.items()
    }
    spec = _spec_of_tables(tables, 4)
    constraints = table_constraints(spec, ranks_per_host=4)

    def types(usable_bytes: int, most_load: float = 1.0) -> dict[str, list[str] | None]:
        found = narrowed(spec, constraints, 4, usable_bytes, most_load)
        assert list(found) == list(constraints)
        return {name: each.sharding_types for name, each in found.items()}

    one_way = {"small": "table_wise", "wide": "row_wise", "hot": "row_wise", "whole": "table_wise"}
    assert types(64 * GB) == {name: [way] for name, way in one_way.items()}
    # More than half of a worker's memory: split, however small its load is.
    assert types(60_000, most_load=100.0)["small"] == ["row_wise"]
    assert types(64 * GB, most_load=100.0)["hot"] == ["table_wise"]


def test_many_tables_are_planned_by_their_one_way() -> None:
    with patch.object(planner, "_MAX_SEARCH", 0):
        types = _types(_plan_on("cuda", _gpu_spec(), 64 * GB))
        assert types == {"small": "table_wise", "large": "table_wise", "huge": "row_wise"}
        obstacle = _plan_on("cuda", _gpu_spec(), GB).obstacle
        assert "no sharding plan fits" in (obstacle or "")
        assert "data.batch_size" in (obstacle or "") and "max_length" in (obstacle or "")


def test_of_many_tables_a_small_one_is_planned_as_it_can_be() -> None:
    everywhere = {"constraints": {"sharding_types": ["data_parallel", "row_wise"]}}
    cached = {"planner": {"compute_kernel": "fused_uvm_caching"}}
    for device, small, parallelism in (
        ("cpu", {"dynamic": {"num_buckets": 4}}, {}),
        ("cuda", everywhere, cached),
    ):
        large = {"num_embeddings": 10_000, "constraints": {"pooling_factor": 100.0}}
        tables = {"small": small | {"num_embeddings": 100}, "large": large}
        spec = _spec_of_tables(tables, 4, **parallelism)
        with patch.object(planner, "_MAX_SEARCH", 0):
            assert _types(_plan_on(device, spec, 64 * GB))["small"] == "row_wise"
