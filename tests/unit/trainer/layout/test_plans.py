"""Layouts side by side: what is recommended, what no other beats, and what to change."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.unit.trainer.layout.test_scaling import AUTO, CLUSTER, spec_of
from trainer.layout.choice import choose, need_of
from trainer.layout.cost import ClusterError, cluster_of
from trainer.layout.hosts import HostFacts, site_of
from trainer.layout.layout import Layout, LayoutError
from trainer.layout.plans import (
    Calibration,
    Candidate,
    Comparer,
    Comparison,
    PlanSite,
    does_fit,
    predict,
    smallest_changes,
    why_not_held,
)
from trainer.layout.workload import GroupPlan, RankLoad, TablePlacement, planned
from trainer.spec import validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

GIB = 2**30


def compared(spec: JobSpec) -> Comparison:
    return Comparer(spec, PlanSite.of_profile(CLUSTER, spec)).result()


def on_one_rank(spec: JobSpec) -> tuple[TablePlacement, ...]:
    rest = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": (0,)}
    return tuple(TablePlacement(name=table.name, **rest) for table in spec.embedding_tables)


def shape(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.world_size, candidate.shard_group_size, candidate.placement


def test_candidates_show_what_the_driver_takes_and_what_no_other_beats() -> None:
    spec = spec_of(400, parallelism=AUTO)
    found = compared(spec).candidates
    expected = choose(need_of(spec, (8,) * 8, CLUSTER.hbm_bytes))
    (chosen,) = [each for each in found if each.is_chosen]
    assert shape(chosen) == tuple(vars(expected.layout).values())
    assert chosen.sync_every_steps == spec.parallelism.sync.every_steps
    assert chosen.memory_overhead_bytes == expected.memory_overhead_bytes
    fitting = [each for each in found if each.fits]
    front = [each for each in fitting if each.is_on_front]
    assert fitting[0].samples_per_s == max(each.samples_per_s for each in front)
    for each in fitting:
        assert each.is_on_front != any(each.is_beaten_by(other) for other in front)
    assert {each.sync_every_steps for each in front} >= {1, 64}
    assert {each.placement for each in front} == {"intra_host", "inter_host"}


@pytest.mark.parametrize(
    ("parallelism", "shape_of_chosen"),
    [
        # Of one copy the placement says nothing.
        ({"placement": "inter_host"}, (8, 8, "intra_host")),
        # Tables of 600 GB, of which a worker cannot hold a copy.
        ({"shard_group_size": 1, "placement": "intra_host"}, (8, 1, "intra_host")),
    ],
)
def test_what_the_spec_asks_for_is_marked_whether_it_fits_or_not(
    parallelism: dict[str, Any], shape_of_chosen: tuple[Any, ...]
) -> None:
    spec = spec_of(400, parallelism={"workers": 8, "shard_group_size": 8} | parallelism)
    found = compared(spec).candidates
    assert {shape(each) for each in found if each.is_chosen} == {shape_of_chosen}


def test_what_auto_takes_is_recommended_unless_another_is_much_faster_with_the_same_interval() -> (
    None
):
    rare = AUTO | {"sync": {"every_steps": 64}}
    calm = compared(spec_of(40, parallelism=rare))
    assert calm.recommended is not None and calm.recommended.candidate.is_chosen
    assert calm.reason.startswith(calm.recommended.choice.reason.split(":")[0])
    busy = compared(spec_of(40, parallelism=AUTO))
    best = busy.recommended.candidate
    assert not best.is_chosen and best.sync_every_steps in (
        1,
        spec_of(1).parallelism.sync.every_steps,
    )
    assert "is the fastest that fits, by" in busy.reason
    assert "which the spec and auto take" in busy.reason


@pytest.mark.parametrize(
    ("parallelism", "window", "table", "num_layouts"),
    [
        # One copy of dynamic tables, of all workers.
        ({"shard_group_size": 8}, 1, {"dynamic": {"num_buckets": 8}}, 1),
        ({"shard_group_size": 4, "dense": "at_sync", "sync": {"every_steps": 3}}, 3, {}, 7),
        # In 100 steps Adam's moments of eight copies change too much to be averaged late.
        (
            {
                "shard_group_size": 4,
                "dense": "at_sync",
                "sync": {"every_steps": 100, "overlap": 100},
            },
            1,
            {},
            5,
        ),
    ],
)
def test_layouts_and_intervals_that_a_spec_may_not_have_are_no_candidates(
    parallelism: dict[str, Any], window: int, table: dict[str, Any], num_layouts: int
) -> None:
    document = spec_of(
        4,
        parallelism={"workers": 8} | parallelism,
        training={"accumulate_steps": window, "report_every_steps": window},
        checkpoint={"every_steps": window},
    ).model_dump(mode="json", exclude_unset=True)
    document["embedding_tables"][0] |= table
    spec = validate_spec(document)
    found = compared(spec).candidates
    assert len({shape(each) for each in found}) == num_layouts
    for each in found:
        sync = spec.parallelism.sync.model_copy(update={"every_steps": each.sync_every_steps})
        own = spec.parallelism.model_copy(update={"sync": sync})
        at_interval = spec.model_copy(update={"parallelism": own})
        assert at_interval.with_layout(each.shard_group_size, each.placement)


def test_a_spec_that_may_have_no_layout_is_told_why() -> None:
    sync = {"every_steps": 1000, "overlap": 1000}
    spec = spec_of(4, parallelism=AUTO | {"dense": "at_sync", "sync": sync})
    with pytest.raises(SpecError, match=r"sync\.overlap: in 1000 step\(s\) Adam's second moments"):
        compared(spec)


def test_a_tuned_interval_is_planned_where_it_would_settle_with_room_for_the_longest() -> None:
    @cache
    def planned(every_steps: int | str) -> dict[tuple[Any, ...], Candidate]:
        sync = {"every_steps": every_steps, "tuner": {"max_steps": 128}}
        sizes = AUTO | {"sync": sync, "dense": "every_step"}
        found = compared(spec_of(40, parallelism=sizes)).candidates
        return {
            (*shape(each), each.sync_mode, each.sync_every_steps): each
            for each in found
            if each.num_replicas > 1
        }

    tuned, longest = planned("auto"), planned(128)
    (chosen,) = [each for each in tuned.values() if each.is_chosen]
    assert chosen.sync_mode == "touched_rows"
    assert len({key[:-1] for key in tuned}) == len(tuned), "one interval for each layout and mode"
    for (*at, every_steps), each in tuned.items():
        assert each.step.sync_s <= 0.05 * each.step.total_s or every_steps == 128
        fixed = planned(every_steps)[*at, every_steps]
        assert each.samples_per_s == fixed.samples_per_s
        if (*at, 128) in longest:
            assert each.peak == longest[*at, 128].peak


def test_workers_are_foretold_what_was_planned_for_them_a_tuned_interval_too() -> None:
    parallelism = AUTO | {"workers": 8, "sync": {"every_steps": "auto"}, "dense": "every_step"}
    spec = spec_of(4, parallelism=parallelism)
    comparer = Comparer(spec, PlanSite.of_profile(CLUSTER, spec))
    option = next(each for each in comparer.result().options if each.candidate.num_replicas == 2)
    load = RankLoad(tables_bytes=GIB, sync_bytes=1, lookup_bytes=1.0)
    plan = GroupPlan(tables=on_one_rank(spec), ranks=(load,) * 4)
    comparer.add(option.topology, plan)
    layout, mode = option.choice.layout, spec.parallelism.sync.mode
    expected = next(
        each
        for each in comparer.result().candidates
        if shape(each) == tuple(vars(layout).values()) and each.sync_mode == mode
    )
    found = predict(option.spec, layout, plan, CLUSTER)
    assert found.sync_every_steps == expected.sync_every_steps > 1
    assert found.samples_per_s == expected.samples_per_s
    alone = predict(option.spec, replace(layout, world_size=4), plan, CLUSTER)
    assert alone.sync_every_steps is None


@pytest.mark.parametrize("size", [8, 4])
def test_gradients_that_accumulate_are_averaged_once_a_window_and_held_twice(size: int) -> None:
    parallelism = AUTO | {"workers": 8, "dense": "every_step"}
    plain = spec_of(4, parallelism=parallelism)
    windows = {"accumulate_steps": 4, "report_every_steps": 4}
    load = RankLoad(tables_bytes=GIB, sync_bytes=1, lookup_bytes=1.0)
    layout = Layout(8, size, "intra_host")
    plan = GroupPlan(tables=on_one_rank(plain), ranks=(load,) * size)
    often, seldom = (
        predict(spec_of(4, parallelism=parallelism, training=training), layout, plan, CLUSTER)
        for training in ({}, windows)
    )
    workload = planned(plain, layout, plan)
    flops_s = workload.batch_size * workload.dense_flops / CLUSTER.fp32_flops_per_s
    assert seldom.step.dense_s - flops_s == pytest.approx((often.step.dense_s - flops_s) / 4)
    more_bytes = seldom.ranks[0].dense_bytes - often.ranks[0].dense_bytes
    assert more_bytes == workload.dense_gradient_bytes


def test_a_comparison_ends_when_time_is_over() -> None:
    class OverError(Exception):
        pass

    def check() -> None:
        raise OverError

    spec = spec_of(4, parallelism=AUTO)
    with pytest.raises(OverError):
        Comparer(spec, PlanSite.of_profile(CLUSTER, spec), check=check)


def test_torchrec_plans_with_what_a_process_leaves_or_what_the_spec_gives() -> None:
    cluster = cluster_of("8xCPU-8GB")
    for resources, expected, of_independent in (
        # As the driver chooses and the workers of such groups plan.
        ({}, int(8 * GIB - cluster.process_bytes), 8 * GIB),
        ({"memory_bytes_per_worker": 2 * GIB}, 2 * GIB, 2 * GIB),
    ):
        spec = spec_of(4, parallelism=AUTO | {"workers": 8}, resources=resources)
        options = Comparer(spec, PlanSite.of_profile(cluster, spec)).result().options
        found = {(each.candidate.failure_domain, each.topology.memory_bytes) for each in options}
        assert found == {("job", expected), ("replica_group", of_independent)}


def test_groups_that_plan_for_themselves_are_planned_as_if_alone_on_their_hosts() -> None:
    spec = spec_of(4, parallelism=AUTO | {"workers": 16})
    options = Comparer(spec, PlanSite(CLUSTER, (8, 4, 4))).result().options
    found = {
        each.topology.shard_group_size: each.topology.ranks_per_host
        for each in options
        if each.candidate.failure_domain == "replica_group"
    }
    assert found[8] == 8, "of which one is on two hosts"
    assert all(num == min(size, 8) for size, num in found.items())


def test_rows_at_risk_are_those_of_a_group_where_it_may_be_lost_alone() -> None:
    for each in compared(spec_of(400, batch_size=10, parallelism=AUTO)).candidates:
        if each.failure_domain == "replica_group":
            expected = each.sync_every_steps * each.shard_group_size * 10
        else:
            expected = 100 * 64 * 10  # since the last checkpoint
        assert each.rows_at_risk == expected


def test_candidates_survive_what_the_spec_asks_for() -> None:
    parallelism = {"workers": 64, "shard_group_size": "auto", "survive": {"hosts": 2}}
    found = compared(spec_of(40, parallelism=parallelism)).candidates
    assert found and all(each.num_hosts_survived >= 2 for each in found)
    few = PlanSite(CLUSTER, (8, 8))
    with pytest.raises(LayoutError, match="add hosts"):
        Comparer(spec_of(40, parallelism=AUTO), few)


def test_where_nothing_fits_the_changes_that_would_do_are_named() -> None:
    spec = spec_of(400, parallelism=AUTO | {"workers": 4})
    found = compared(spec)
    assert found.recommended is None and not any(each.fits for each in found.candidates)
    assert found.reason.startswith("no layout fits in memory; the smallest is one copy on 4")

    def fits(changed: JobSpec) -> bool:
        return does_fit(changed, PlanSite.of_profile(CLUSTER, changed))

    changes = smallest_changes(spec, fits, "cuda")
    assert {"parallelism.planner.compute_kernel": "auto"} in [each.set for each in changes]
    more = next(each for each in changes if "parallelism.workers" in each.set)
    assert more.set["parallelism.workers"] == 16
    assert "needs 9 workers" in str(why_not_held(spec, CLUSTER.hbm_bytes))
    assert why_not_held(spec_of(400, parallelism=AUTO | {"workers": 16}), CLUSTER.hbm_bytes) is None


def test_a_table_that_must_be_whole_and_is_too_large_is_to_be_split() -> None:
    spec = spec_of(2, {"sharding_types": ["table_wise"]}, parallelism=AUTO | {"workers": 4})
    assert "must stay whole" in str(why_not_held(spec, GIB))
    (first, *_) = smallest_changes(
        spec, lambda changed: why_not_held(changed, 2 * GIB) is None, "cpu"
    )
    types = first.set["embedding_tables[0].constraints.sharding_types"]
    assert types == ["table_wise", "row_wise"] and "row_wise" in first.text


def test_a_plan_of_torchrec_decides_memory_and_balance_of_the_layouts_with_such_groups() -> None:
    spec = spec_of(4, parallelism=AUTO | {"workers": 8})
    comparer = Comparer(spec, PlanSite.of_profile(CLUSTER, spec))
    option = next(
        each for each in comparer.result().options if each.candidate.shard_group_size == 4
    )
    heavy = RankLoad(tables_bytes=70 * GIB, lookup_bytes=8.0, output_bytes=1.0, sync_bytes=1)
    plan = GroupPlan(tables=on_one_rank(spec), ranks=(heavy, *[RankLoad()] * 3))
    comparer.add(option.topology, plan)
    found = [
        each.candidate for each in comparer.result().options if each.topology == option.topology
    ]
    assert found and all(each.is_planned for each in found)
    assert {each.lookup_imbalance for each in found} == {4.0}
    assert {each.peak.tables_bytes for each in found} == {70 * GIB}
    assert {each.mean.tables_bytes for each in found} == {70 * GIB / 4}
    comparer.add(option.topology, GroupPlan(obstacle="no sharding plan fits"))
    found = [each for each in comparer.result().candidates if each.is_planned]
    assert not any(each.fits for each in found)
    assert {each.obstacle for each in found} == {"no sharding plan fits"}


def test_the_cluster_of_the_service_is_described_by_what_ray_says_of_it() -> None:
    spec = spec_of(4, parallelism=AUTO | {"workers": 8})
    gpu = HostFacts("a", 16, 8, 64 * GIB, "H100", 80 * GIB)
    site = PlanSite.of_site(site_of(spec, [gpu]))
    assert (site.cluster.device, site.room) == ("cuda", (8,))
    assert site.host_memory_bytes == 8 * GIB
    few = spec_of(4, parallelism=AUTO | {"workers": 2})
    assert PlanSite.of_site(site_of(few, [gpu])).host_memory_bytes == 32 * GIB
    head = HostFacts("0", 0, 1, 64 * GIB, "T4")  # without room for a worker
    assert PlanSite.of_site(site_of(spec, [head, gpu])).cluster == replace(
        site.cluster, num_hosts=2
    )
    assert PlanSite.of_site(site_of(spec, [replace(gpu, memory_bytes=0)])).host_memory_bytes > 1e15
    assert site.cluster.hbm_bytes_per_s == cluster_of("8xH100-80GB").hbm_bytes_per_s
    cpu = PlanSite.of_site(site_of(spec, [HostFacts("a", 8, 0, 64 * GIB)]))
    assert (cpu.cluster.device, cpu.cluster.hbm_bytes) == ("cpu", 8 * GIB)
    unknown = replace(gpu, gpu="T4", gpu_memory_bytes=0)
    for hosts, words in (([unknown], "GPUs \\(T4\\)"), ([], "no host")):
        with pytest.raises(ClusterError, match=words):
            PlanSite.of_site(site_of(spec, hosts))


def test_a_calibration_believes_medians_within_bounds_only() -> None:
    assert Calibration.of([], []) is None
    found = Calibration.of([100.0, 90.0, 0.5], [])
    assert found == Calibration(num_jobs=3, step_ratio=4.0, extra_bytes=0)
    less = Calibration.of([0.01], [-math.inf])
    assert less is not None and (less.step_ratio, less.extra_bytes) == (0.25, -(2**32))
    assert less.applied(CLUSTER).process_bytes == 0.0
    assert less.applied(CLUSTER).hbm_bytes_per_s == 4 * CLUSTER.hbm_bytes_per_s
    assert less.applied(CLUSTER).step_overhead_s == CLUSTER.step_overhead_s / 4
