"""Every sharding type, 1D and 2D, on real gloo ranks against whole tables in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.integration.gloo import run_ranks
from tests.integration.sharding_cases import (
    POOLED_TABLES,
    TABLES,
    ShardingCase,
    train_sharded,
)
from tests.integration.sharding_reference import Reference

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


def _every_type(case: ShardingCase) -> list[ShardingCase]:
    return [replace(case, pooled=pooled, sequence=sequence) for pooled, sequence in PAIRS]


def _check(cases: Sequence[ShardingCase]) -> list[dict[str, Any]]:
    """Run `cases`, compare every rank's copy with the reference; the results of rank 0."""
    ranks = run_ranks(train_sharded, cases[0].world_size, list(cases))
    for index, case in enumerate(cases):
        results = [rank[index] for rank in ranks]
        reference = Reference(case, results[0]["plans"])
        reference.run()
        for rank, result in enumerate(results):
            copy = next(i for i, group in enumerate(reference.groups) if rank in group)
            where = f"{case}, rank {rank}"
            _assert_equal(result["tables"], reference.tables[copy], where)
            if case.optimizer != "sgd":
                _assert_equal(_sharded(case, result["moments"]), reference.moments[copy], where)
            torch.testing.assert_close(
                result["head"], reference.head.weight.detach(), atol=TOLERANCE, rtol=0
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
    for name, table in tables.items():
        torch.testing.assert_close(
            table,
            expected[name],
            atol=TOLERANCE,
            rtol=0,
            msg=lambda message, name=name: f"{where}, table {name}: {message}",
        )


def _num_column_shards(result: dict[str, Any], table: str) -> int:
    plan = next(plan for plan in result["plans"] if plan.name == table)
    return len({shard.column_offset for shard in plan.shards})


def test_1d_over_two_hosts_equals_the_reference_for_every_type() -> None:
    cases = _every_type(ShardingCase(4, 4, hosts="abab"))
    results = _check(cases)
    for case, result in zip(cases, results, strict=True):
        chosen = {plan.name: plan.sharding_type for plan in result["plans"]}
        assert chosen == {
            name: case.pooled if name in POOLED_TABLES else case.sequence for name in TABLES
        }
    assert all(_num_column_shards(results[2], name) == 2 for name in TABLES)


@pytest.mark.parametrize(
    ("placement", "optimizer", "weighted"),
    [("intra_host", "adagrad", True), ("inter_host", "sgd", False)],
)
def test_two_replicas_of_two_shards_equal_the_reference_for_every_type(
    placement: str, optimizer: str, weighted: bool
) -> None:
    _check(
        _every_type(ShardingCase(4, 2, placement=placement, optimizer=optimizer, weighted=weighted))
    )


def test_two_replicas_over_two_hosts_of_four_equal_the_reference_for_every_type() -> None:
    cases = _every_type(ShardingCase(8, 4, hosts="abababab", weighted=True))
    _check(cases)
