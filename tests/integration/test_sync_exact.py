"""touched_rows gives what a full all-reduce gives, in random training runs on gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.gloo import run_ranks
from tests.integration.sync_cases import (
    SyncCase,
    Table,
    check_cases,
    check_resharded,
    random_case,
    untouched_rows,
)

CASES_A_RUN = 10


@pytest.mark.parametrize("world_size", [3, 4])  # M = 3; M = 2 (L = 2) and M = 4 (L = 1)
def test_touched_rows_equal_the_full_all_reduce(world_size: int) -> None:
    @settings(
        max_examples=2,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking would start ranks again and again
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.integers(0, 2**31), min_size=CASES_A_RUN, max_size=CASES_A_RUN, unique=True))
    def check(seeds: list[int]) -> None:
        cases = [random_case(seed, world_size) for seed in seeds]
        densities = run_ranks(check_cases, world_size, cases)
        assert any(0 < density < 1 for rank in densities for density in rank)

    check()


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
