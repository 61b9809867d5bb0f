"""Learning-rate schedules: bounds, end points and shape, for any length of run."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer.parallel.schedule import factor
from trainer.spec import ScheduleSpec

DECAYS = get_args(ScheduleSpec.model_fields["decay"].annotation)


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSpec:
    return ScheduleSpec(
        warmup_steps=draw(st.integers(0, 50)),
        decay=draw(st.sampled_from(DECAYS)),
        min_ratio=draw(st.floats(0, 1)),
    )


def test_without_a_schedule_the_rate_stays() -> None:
    assert [factor(step, 3, None) for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, None, 0.2]),
    ],
)
def test_factors_of_a_short_run(decay: str, expected: list[float | None]) -> None:
    spec = ScheduleSpec(warmup_steps=2, decay=decay, min_ratio=0.2)
    for step, value in enumerate(expected, start=1):
        if value is not None:
            assert factor(step, 6, spec) == pytest.approx(value)


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert factor(1, 10, ScheduleSpec(decay="linear")) == 1.0


def test_a_run_of_one_step_has_the_whole_rate() -> None:
    assert factor(1, 1, ScheduleSpec(decay="cosine")) == 1.0


@given(schedules(), st.integers(1, 300), st.integers(1, 300))
def test_factors_stay_within_their_bounds(spec: ScheduleSpec, step: int, total: int) -> None:
    floor = min(spec.min_ratio, 1 / max(spec.warmup_steps, 1))
    assert floor - 1e-12 <= factor(step, total, spec) <= 1.0 + 1e-12


@given(schedules(), st.integers(2, 300))
def test_rates_rise_to_the_peak_and_never_after(spec: ScheduleSpec, total: int) -> None:
    factors = [factor(step, total, spec) for step in range(1, total + 1)]
    peak = min(max(spec.warmup_steps, 1), total)
    assert all(a < b for a, b in pairwise(factors[:peak]))
    assert all(a >= b - 1e-12 for a, b in pairwise(factors[peak - 1 :]))


@given(schedules(), st.integers(2, 300))
def test_a_decay_ends_at_the_least_ratio(spec: ScheduleSpec, total: int) -> None:
    assume(spec.decay != "constant" and total > max(spec.warmup_steps, 1))
    assert factor(total, total, spec) == pytest.approx(spec.min_ratio)
    assert factor(total + 7, total, spec) == pytest.approx(spec.min_ratio)
