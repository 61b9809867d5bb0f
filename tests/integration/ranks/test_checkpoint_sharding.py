"""Checkpoints on real gloo ranks: saved in any sharding, loaded in any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_in_turn
from tests.integration.ranks.checkpoint_cases import (
    Sharding,
    load,
    train_and_save,
    whole_tables,
)

ROWS = Sharding(4, 2, ("row_wise",))
FOUR_COLUMNS = Sharding(4, 2, ("column_wise",), min_partition=4)
EIGHT_COLUMNS = Sharding(4, 2, ("column_wise",), min_partition=8, placement="inter_host")
MIXED = Sharding(4, 2, ("data_parallel", "column_wise", "table_wise"), min_partition=8)
GRID = Sharding(4, 4, ("grid_shard",), min_partition=8, placement="inter_host")
BY_HOST = Sharding(
    4, 4, ("table_row_wise", "grid_shard", "data_parallel"), min_partition=8, placement="inter_host"
)


def _check_loaded(saved: dict[str, torch.Tensor], loaded: list[dict[str, Any]]) -> None:
    """Weights are bitwise those of the checkpoint, moments the mean over a shard's columns."""
    whole_tables(loaded)  # complete, and copies are equal
    for table, row, column, weight, states in (s for rank in loaded for s in rank["shards"]):
        num_rows, num_columns = weight.shape
        place = (slice(row, row + num_rows), slice(column, column + num_columns))
        assert torch.equal(weight, saved[table][place]), table
        for state in states:
            moments = saved[f"{table}.moments"][place]
            expected = moments.double().mean(1).float() if state.dim() == 1 else moments
            torch.testing.assert_close(state.reshape(expected.shape), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("optimizer", "savers", "loaders"),
    [
        ("row_wise_adagrad", [FOUR_COLUMNS, MIXED, GRID], [ROWS, EIGHT_COLUMNS, BY_HOST]),
        pytest.param("adagrad", [MIXED, GRID], [FOUR_COLUMNS], marks=pytest.mark.slow),
    ],
)
def test_every_sharding_loads_what_any_other_saved(
    optimizer: str, savers: list[Sharding], loaders: list[Sharding], tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []
    for i, saver in enumerate(savers):
        folder = tmp_path / str(i)
        calls.append((train_and_save, replace(saver, optimizer=optimizer), folder))
        calls += [(load, replace(each, optimizer=optimizer), folder) for each in loaders]
    results = iter(run_in_turn(4, *calls))
    for _ in savers:
        original = next(results)
        saved = whole_tables(original)
        for _ in loaders:
            loaded = next(results)
            _check_loaded(saved, loaded)
            torch.testing.assert_close(loaded[0]["dense"], original[0]["dense"], atol=0, rtol=0)
