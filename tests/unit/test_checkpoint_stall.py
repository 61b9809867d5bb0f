"""What the checkpoint benchmark makes of the blocks that it measured."""

from __future__ import annotations

import pytest

from tests.benchmarks.checkpoint_stall import GOAL, STEPS, rows_of, runs_of
from tests.benchmarks.checkpoint_stall_ranks import Pair
from tests.benchmarks.report import ratio_of

PAIRS = [Pair(10.1, 10.0, 0.05, 0.6, 0.5), Pair(10.3, 10.0, 0.07, 0.8, 0.7)]


def test_step_time_is_that_of_whole_blocks_with_a_save_over_none() -> None:
    ratio = ratio_of(GOAL, runs_of(PAIRS))
    assert ratio["value"] == pytest.approx(1.02)
    assert ratio["ours"] == pytest.approx(10.2 / STEPS)
    assert ratio["spread"] == pytest.approx([1.01, 1.03])


def test_a_blocking_save_costs_its_own_time_once_a_block() -> None:
    beside, blocking = rows_of(PAIRS)
    assert beside["step_time_over_none"] == pytest.approx(1.02)
    assert blocking["step_time_over_none"] == pytest.approx(1.06)
    assert (beside["stall_s"], blocking["stall_s"]) == (0.06, 0.6)
