"""Every sharding type and policy on real gloo ranks against M whole copies in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.wait import scaled
from tests.integration.ranks.sharding_cases import (
    POOLED_TABLES,
    TABLES,
    Reference,
    ShardingCase,
    plan_slowly,
    refusals,
    start,
    train_sharded,
)

TOLERANCE = 1e-6
# Sharding types of pooled and of sequence tables, side by side in one model.
PAIRS = (
    ("data_parallel", "row_wise"),
    ("table_wise", "table_wise"),
    ("column_wise", "column_wise"),
    ("row_wise", "row_wise"),
    ("table_row_wise", "column_wise"),
    ("grid_shard", "table_wise"),
)


def _every_type(case: ShardingCase, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[ShardingCase]:
    return [replace(case, pooled=pooled, sequence=sequence) for pooled, sequence in pairs]


def _check(cases: Sequence[ShardingCase]) -> list[dict[str, Any]]:
    """Run `cases`, compare every rank's copy with the reference; the results of rank 0."""
    ranks = run_ranks(train_sharded, cases[0].world_size, list(cases))
    for index, case in enumerate(cases):
        results = [rank[index] for rank in ranks]
        reference = Reference(case, results[0]["plans"])
        reference.run()
        for rank, result in enumerate(results):
            copy = next(i for i, group in enumerate(reference.groups) if rank in group)
            assert result["sharding_ranks"] == reference.groups[copy]
            where = f"{case}, rank {rank}"
            _assert_equal(result["tables"], reference.tables[copy], where)
            if case.optimizer != "sgd":
                _assert_equal(_sharded(case, result["moments"]), reference.moments[copy], where)
            torch.testing.assert_close(
                result["head"], reference.heads[copy].weight.detach(), atol=TOLERANCE, rtol=0
            )
    return list(ranks[0])


def _sharded(case: ShardingCase, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moments that live in shards; those of data-parallel tables are the torch optimizer's."""
    whole = POOLED_TABLES if case.pooled == "data_parallel" else {}
    return {name: moment for name, moment in moments.items() if name not in whole}


def _assert_equal(
    tables: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str
) -> None:
    assert tables
    wanted = {name: expected[name] for name in tables}
    message = f"{where}: {{}}".format
    torch.testing.assert_close(tables, wanted, atol=TOLERANCE, rtol=0, msg=message)


def _num_column_shards(result: dict[str, Any], table: str) -> int:
    plan = next(plan for plan in result["plans"] if plan.name == table)
    return len({shard.column_offset for shard in plan.shards})


def test_1d_over_two_hosts_equals_the_reference_for_every_type() -> None:
    cases = _every_type(ShardingCase(4, 4, hosts="abab", num_steps=2))
    results = _check(cases)
    for case, result in zip(cases, results, strict=True):
        chosen = {plan.name: plan.sharding_type for plan in result["plans"]}
        assert chosen == {
            name: case.pooled if name in POOLED_TABLES else case.sequence for name in TABLES
        }
    assert all(_num_column_shards(results[2], name) == 2 for name in TABLES)


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        (ShardingCase(4, 2, optimizer="adagrad", weighted=True), PAIRS),
        (ShardingCase(4, 2, placement="inter_host", optimizer="sgd"), PAIRS[::2]),
        pytest.param(
            ShardingCase(8, 4, hosts="abababab", weighted=True), PAIRS, marks=pytest.mark.slow
        ),
    ],
)
def test_two_replicas_equal_the_reference_for_every_type(
    case: ShardingCase, pairs: Sequence[tuple[str, str]]
) -> None:
    _check(_every_type(case, pairs))


def test_a_group_that_lies_elsewhere_than_planned_equals_the_reference() -> None:
    elsewhere = {"placement": "inter_host", "hosts": "aaab", "num_worlds": 2}
    case = ShardingCase(4, 4, dense="at_sync", moment_scale=1.0, sync_every=9, **elsewhere)
    for result in _check(_every_type(case, PAIRS[-2:])):
        (users, *_) = result["plans"]
        assert [each.row_offset for each in users.shards[:2]] == [0, 19], "two ranks of a host"


# The copies differ between syncs, and when the last steps are not synced.
APART = ShardingCase(4, 2, sequence="table_wise", sync_every=3, num_steps=5)


@pytest.mark.parametrize(
    "case",
    [
        APART,
        replace(APART, placement="inter_host", optimizer_state="never", moment_scale=1.0),
        replace(APART, num_steps=7, dense="at_sync", dense_optimizer="adam"),
        replace(APART, placement="inter_host", dense="at_sync"),
        pytest.param(
            ShardingCase(3, 1, hosts="aaa", num_steps=4, dense="at_sync"), marks=pytest.mark.slow
        ),
    ],
)
def test_copies_that_differ_between_syncs_equal_the_reference(case: ShardingCase) -> None:
    _check([case])


def _largest_difference(result: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        (table - other["tables"][name]).abs().max().item()
        for name, table in result["tables"].items()
    )


@pytest.mark.slow
def test_half_precision_on_the_way_and_in_tables_rounds_every_type_by_its_own_precision() -> None:
    fp32 = _every_type(ShardingCase(4, 4, num_steps=2, weighted=True))
    cases = [replace(case, all_to_all=half) for half in ("fp32", "fp16", "bf16") for case in fp32]
    cases += [replace(case, data_type="fp16") for case in fp32]
    results = run_ranks(train_sharded, 4, cases)[0]
    for index in range(len(fp32)):
        exact, fp16, bf16, tables = results[index :: len(fp32)]
        # fp16 has a mantissa of 10 bits, bf16 one of 7. TorchRec means fp16 by bf16 on CPU.
        assert 0 < _largest_difference(fp16, exact) < 0.02
        assert _largest_difference(fp16, exact) < _largest_difference(bf16, exact) < 0.1
        assert 0 < _largest_difference(tables, exact) < 0.02


def test_every_rank_learns_why_there_is_no_plan() -> None:
    cases = [
        # The sharding group could hold the tables, but no worker the largest and its activations.
        ShardingCase(3, 3, "table_wise", hosts="aab", memory_bytes=5000),
        ShardingCase(3, 3, "table_row_wise", hosts="aab"),
    ]
    ranks = run_ranks(refusals, 3, cases)
    too_large, unequal_hosts = ranks[0]
    assert ranks == [ranks[0]] * 3
    assert "'movies'" in too_large and "shard_group_size" in too_large
    assert "table_row_wise needs equally many ranks" in unequal_hosts


def test_planning_may_take_longer_than_a_collective() -> None:
    assert run_ranks(plan_slowly, 2, ShardingCase(2, 2, hosts="aa")) == [len(TABLES)] * 2


def test_all_copies_start_equal_know_the_same_and_wait_no_half_an_hour() -> None:
    case = ShardingCase(4, 2, "data_parallel", placement="inter_host", hosts="abab")
    ranks = run_ranks(start, 4, case)
    for result in ranks:
        torch.testing.assert_close(result["tables"], ranks[0]["tables"], atol=0, rtol=0)
        assert result["bandwidths"] == ranks[0]["bandwidths"]
        assert result["timeouts_s"] == pytest.approx([scaled(30)] * 3, abs=0.01)
    bandwidths = ranks[0]["bandwidths"]
    assert bandwidths.memory > 0 and bandwidths.intra_host > 0
    assert bandwidths.inter_host is None  # both ranks of a sharding group share a host
