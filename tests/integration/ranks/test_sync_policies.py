"""Syncs on gloo ranks: touched rows give what a full all-reduce gives; each policy; fallbacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.integration.ranks import sync_policy_cases as cases
from tests.integration.ranks.sync_cases import (
    SyncCase,
    Table,
    check_cases,
    check_resharded,
    random_case,
    untouched_rows,
)

CASES_A_RUN = 10
TABLES = (Table(300), Table(20, num_features=2), Table(6, sharding="data_parallel"))
CASE = SyncCase(2, 1, tables=TABLES, batch_size=3)
MODES = ({"mode": "touched_rows", "full_above": 1.0}, {"mode": "full"})


@pytest.fixture(params=MODES, ids=["touched_rows", "full"])
def case(request: pytest.FixtureRequest) -> SyncCase:
    """A case in each mode."""
    return replace(CASE, sync=request.param)


def test_an_overlapped_sync_equals_an_immediate_one_when_nothing_happens_meanwhile(
    case: SyncCase,
) -> None:
    run_ranks(cases.overlapped_equals_immediate, 2, case)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_overlapped_means_land_as_a_difference(case: SyncCase, optimizer: str) -> None:
    moved = run_ranks(
        cases.overlapped_keeps_what_was_learned, 2, replace(case, optimizer=optimizer)
    )
    assert all(number > 0 for number in moved)


@pytest.mark.parametrize("optimizer", ["adagrad", "row_wise_adagrad"])
def test_delayed_moments_lag_one_sync(case: SyncCase, optimizer: str) -> None:
    assert all(run_ranks(cases.delayed_moments_lag_one_sync, 2, replace(case, optimizer=optimizer)))


def test_moments_that_are_never_synced_are_equal_after_a_flush() -> None:
    run_ranks(cases.moments_stay_until_a_flush, 2, replace(CASE, sync=MODES[0]))


def test_a_flush_makes_all_copies_equal_whatever_the_policy(case: SyncCase) -> None:
    run_ranks(cases.flush_is_exact, 3, replace(case, world_size=3))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_changes_in_half_precision_err_by_a_rounding_on_the_way_and_one_back(
    case: SyncCase, dtype: str, precision: float, overlap: bool
) -> None:
    half = replace(case, optimizer="sgd", sync=case.sync | {"dtype": dtype})
    for errors in run_ranks(cases.errors_of_changes, 2, half, overlap):
        for error, largest in errors:
            assert largest > 0
            # Half a unit each, and fp32's own rounding of weights below 1.
            assert error <= precision * largest + 2.0**-23


def test_overlapped_changes_in_half_precision_bring_copies_together(case: SyncCase) -> None:
    half = replace(case, optimizer="adagrad", sync=case.sync | {"dtype": "bf16"})
    run_ranks(cases.overlapped_changes_agree_later, 2, half)


def test_small_updates_of_large_weights_survive_bf16(case: SyncCase) -> None:
    half = replace(case, optimizer="sgd", lr=1e-3, sync=case.sync | {"dtype": "bf16"})
    for applied, meant in run_ranks(cases.small_updates_survive, 2, half):
        assert meant > 0
        assert applied == pytest.approx(meant, rel=0.02)


def test_a_change_too_large_for_fp16_travels_in_fp32_on_all_copies(case: SyncCase) -> None:
    half = replace(case, optimizer="sgd", sync=case.sync | {"dtype": "fp16"})
    first, other = run_ranks(cases.overflow_falls_back, 2, half)
    # Told by one rank of the replica group, at the first such sync and at the tenth.
    assert ["so far: 1." in first[0], "so far: 10." in first[1]] == [True, True]
    assert len(first) == 2 and other == []


def test_weight_decay_switches_touched_rows_off_with_a_warning() -> None:
    decayed = replace(CASE, weight_decay=0.1, sync=MODES[0])
    (density, (warning,)), other = run_ranks(cases.weight_decay_is_full, 2, decayed)
    assert density == 1.0
    assert "weight_decay" in warning
    assert other == (1.0, [])


def test_a_sync_costs_what_was_touched_and_falls_back_to_full_when_that_is_most() -> None:
    tables = (Table(3000), Table(500))
    for prices in run_ranks(cases.price_of_syncs, 2, replace(CASE, tables=tables, batch_size=60)):
        (some, some_bytes), (none, none_bytes), (all_, all_bytes) = prices
        assert 0 < some < 0.2
        assert none == 0
        assert none_bytes < 100
        assert all_ == 1.0
        assert none_bytes < some_bytes < 0.25 * all_bytes


def test_lookups_without_training_touch_nothing() -> None:
    assert run_ranks(cases.evaluation_touches_nothing, 2, CASE) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("world_size", "first_seed"),
    [
        (4, 0),  # M = 2 (L = 2) and M = 4 (L = 1)
        pytest.param(4, 100, marks=pytest.mark.slow),
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(3, 100, marks=pytest.mark.slow),
    ],
)
def test_touched_rows_equal_the_full_all_reduce(world_size: int, first_seed: int) -> None:
    seeds = range(first_seed, first_seed + CASES_A_RUN)
    runs = [random_case(seed, world_size) for seed in seeds]
    densities = run_ranks(check_cases, world_size, runs)
    assert any(0 < density < 1 for rank in densities for density in rank)


def test_rows_that_nobody_touched_never_drift_though_three_copies_round() -> None:
    case = SyncCase(3, 1, tables=(Table(300), Table(200)))
    for shares in run_ranks(untouched_rows, 3, case):
        assert shares["touched_rows"] == 0
        assert shares["full"] > 0.1


def test_touched_rows_stay_exact_in_tables_loaded_at_another_layout(tmp_path: Path) -> None:
    before = SyncCase(4, 2, tables=(Table(40), Table(9, num_features=2), Table(30, "table_wise")))
    after = SyncCase(4, 1, tables=before.tables, placement="inter_host")
    for first, second in run_ranks(check_resharded, 4, before, after, tmp_path / "step"):
        assert first == 0
        assert 0 < second < 1
