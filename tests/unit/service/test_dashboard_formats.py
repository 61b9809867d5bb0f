"""Numbers as the dashboard writes them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dashboard import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.8125, "7.81"),
        (999, "999"),
        (999.9, "1k"),
        (16_540, "16.5k"),
        (999_960, "1M"),
        (6_270_000, "6.27M"),
        (3e9, "3B"),
        (math.nan, "NaN"),
        (None, formats.NOTHING),
    ],
)
def test_compact_keeps_three_digits_and_a_suffix(value: float | None, text: str) -> None:
    assert formats.compact(value) == text


@given(st.floats(min_value=0.01, max_value=9.9e11))
def test_compact_is_within_half_a_percent_of_the_value(value: float) -> None:
    text = formats.compact(value)
    scale = {"k": 1e3, "M": 1e6, "B": 1e9}.get(text[-1])
    shown = float(text[:-1]) * scale if scale else float(text)
    assert shown == pytest.approx(value, rel=5.1e-3)
    assert len(text) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.88123, "0.8812"), (0.0, "0.0000"), (1e-5, "1e-05"), (-math.inf, "-∞")],
)
def test_precise_shows_four_decimals_unless_they_would_hide_the_value(
    value: float, text: str
) -> None:
    assert formats.precise(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.25, "1.25 s"), (0.0125, "12.5 ms"), (0.00084, "840 µs"), (0.0, "0 µs")],
)
def test_latency_picks_the_unit_of_the_value(seconds: float, text: str) -> None:
    assert formats.latency(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.9, "59s"),
        (200, "3m 20s"),
        (7_500, "2h 05m"),
        (97 * 3600, "4d 01h"),
        (-3, "0s"),
        (math.inf, formats.NOTHING),
        (None, formats.NOTHING),
    ],
)
def test_duration_shows_the_two_largest_units(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


@given(st.integers(min_value=0, max_value=10**7))
def test_duration_never_promises_more_than_there_is(seconds: int) -> None:
    unit_s = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
    shown = [(int(part[:-1]), unit_s[part[-1]]) for part in formats.duration(seconds).split()]
    total_s = sum(number * unit for number, unit in shown)
    assert total_s <= seconds < total_s + shown[-1][1]


def test_clock_adds_hours_only_when_there_are_any() -> None:
    assert formats.clock(133) == "+02:13"
    assert formats.clock(3909) == "+1:05:09"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 B"), (84_300_000, "84.3 MB"), (999_900, "1 MB")]
)
def test_size_uses_decimal_units(num_bytes: int, text: str) -> None:
    assert formats.size(num_bytes) == text


def test_utc_names_its_time_zone() -> None:
    assert formats.utc(0) == "1970-01-01 00:00:00 UTC"


@given(st.integers(min_value=0, max_value=10**9), st.integers(min_value=0, max_value=10**9))
def test_percent_done_stays_within_bounds(step: int, total_steps: int) -> None:
    assert 0.0 <= formats.percent_done(step, total_steps) <= 100.0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("balance/lookup", 1.0849, "1.08×"),  # noqa: RUF001
        ("speed/rows_per_s", 16_540.0, "16.5k"),
        ("sync/time_s", 0.0125, "12.5 ms"),
        ("sync/bytes", 21e6, "21 MB"),
        ("validation/rmse", 0.87123, "0.8712"),
    ],
)
def test_a_metric_is_written_in_the_unit_that_its_name_implies(
    name: str, value: float, text: str
) -> None:
    assert formats.metric(name, value) == text


def test_metrics_line_is_sorted_by_name() -> None:
    line = formats.metrics_line({"validation/rmse": 0.9, "validation/mae": 0.7})
    assert line == "validation/mae 0.7000 · validation/rmse 0.9000"
