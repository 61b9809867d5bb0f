"""Numbers, sizes and times as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.commands.formats import (
    BLOCKS,
    human_age,
    human_bytes,
    human_count,
    human_duration,
    human_number,
    sparkline,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (999_960, "1.0 MB")],
)
def test_sizes(num_bytes, text):
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (-1, "0.0s"),
        (3.21, "3.2s"),
        (42, "42s"),
        (72, "1m 12s"),
        (3900, "1h 05m"),
        (90000, "1d 01h"),
    ],
)
def test_durations(duration_s, text):
    assert human_duration(duration_s) == text


@pytest.mark.parametrize(
    ("age_s", "text"), [(0.4, "now"), (59, "59 s ago"), (125, "2 m ago"), (200_000, "2 d ago")]
)
def test_ages(age_s, text):
    assert human_age(1000.0, 1000.0 + age_s) == text


@pytest.mark.parametrize(("count", "text"), [(7, "7"), (21_345, "21.3k"), (2_100_000, "2.1M")])
def test_counts(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (0.93412, "0.9341"),
        (1.0657, "1.066"),
        (21345.6, "21,346"),
        (3e-7, "3.000e-07"),
        (math.nan, "nan"),
    ],
)
def test_metric_values(value, text):
    assert human_number(value) == text


def test_a_falling_curve_falls():
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"


def test_a_flat_curve_is_flat_and_no_curve_is_empty():
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([]) == ""


def test_values_that_are_not_finite_leave_a_gap():
    assert sparkline([1.0, math.nan, 2.0]) == "▁ █"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 40))
def test_a_curve_fits_its_width_and_touches_top_and_bottom(values, width):
    curve = sparkline(values, width)
    assert len(curve) == min(width, len(values))
    assert set(curve) <= set(BLOCKS)
    assert len(set(curve)) == 1 or {BLOCKS[0], BLOCKS[-1]} <= set(curve)
