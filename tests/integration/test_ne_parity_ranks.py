"""The NE parity benchmark on real ranks, in small: what it calls equal is equal."""

from __future__ import annotations

import pytest

from tests.benchmarks.ne_parity import NOISE, name_of_scale, variants_of
from tests.benchmarks.ne_parity_case import Settings
from tests.benchmarks.ne_parity_ranks import measure_seed
from tests.benchmarks.ne_parity_report import PEER
from tests.harness.ranks import run_ranks

SETTINGS = Settings(
    world_size=2,
    global_batch_size=256,
    num_steps=4,
    num_held_out_rows=4096,
    num_evaluations=2,
    max_table_rows=100,
)


@pytest.fixture(scope="module")
def result():
    variants = variants_of(SETTINGS.world_size, shard_group_size=1)
    return run_ranks(measure_seed, SETTINGS.world_size, SETTINGS, variants, 0)[0]


def test_our_engine_in_1d_learns_what_stock_torchrec_learns(result):
    assert result.curves[NOISE].ne == pytest.approx(result.curves[PEER].ne, rel=1e-6)
    assert result.curves[PEER].rows == [512, 1024]


def test_every_variant_learns_and_none_beats_the_teacher(result):
    for curve in result.curves.values():
        assert curve.ne[1] < curve.ne[0]
        assert curve.ne[1] > result.teacher_ne


def test_the_moment_scale_makes_a_difference_and_the_smaller_one_learns_slower(result):
    unscaled, scaled = (result.curves[name_of_scale(c)].ne[-1] for c in (1, 2))
    assert unscaled > scaled
