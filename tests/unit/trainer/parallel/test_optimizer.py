"""Accumulation of gradients over the batches of a step, and schedules of learning rates."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.optimizer import GradientAccumulator, factor
from trainer.spec.training import ScheduleSpec

BATCH = st.tuples(
    st.floats(0, 1e4).map(lambda weight: 0.0 if weight < 1e-3 else weight), st.floats(-9, 9)
)


def accumulated(batches: list[tuple[float, float]], dtype: torch.dtype) -> float:
    """What a window, and the next, makes of (weight, mean gradient) of batches; one that weighs 0
    gives 0.
    """
    window, found = GradientAccumulator(), set()
    for _ in range(2):
        held = torch.zeros(1, dtype=dtype)
        for weight, gradient in batches:
            window.add([held], torch.tensor(weight))
            held += gradient if weight else 0.0
        window.close([held])
        found.add(held.item())
    (mean,) = found
    return mean


@given(st.lists(BATCH, min_size=1, max_size=12))
def test_a_window_gives_the_weighted_mean(batches: list[tuple[float, float]]) -> None:
    batches = [(torch.tensor(weight).item(), gradient) for weight, gradient in batches]
    total = sum(weight for weight, _ in batches)
    wanted = sum(weight * gradient for weight, gradient in batches) / total if total else 0.0
    assert accumulated(batches, torch.float64) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=8), st.integers(1, 2**20))
def test_batches_of_equal_weight_are_just_added_and_divided(
    gradients: list[float], weight: int
) -> None:
    plain = torch.zeros(1)
    for gradient in gradients:
        plain += gradient
    plain /= len(gradients)
    found = accumulated([(float(weight), gradient) for gradient in gradients], torch.float32)
    assert found == plain.item()


def test_complex_gradients_share_a_window_with_others() -> None:
    window, held = GradientAccumulator(), [torch.zeros(1, dtype=torch.complex64), torch.zeros(1)]
    for weight, gradient in ((2.0, 4.0), (4.0, 7.0)):
        window.add(held, torch.tensor(weight))
        torch._foreach_add_(held, gradient)
    window.close(held)
    assert [each.item() for each in held] == [6, 6]


DECAYS = get_args(ScheduleSpec.model_fields["decay"].annotation)


@st.composite
def schedules(draw: st.DrawFn) -> ScheduleSpec:
    return ScheduleSpec(
        warmup_steps=draw(st.integers(0, 50)),
        decay=draw(st.sampled_from(DECAYS)),
        min_ratio=draw(st.floats(0, 1)),
    )


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
    # The first step without warm-up has the whole rate, and so has each without a schedule.
    assert factor(1, 1, ScheduleSpec(decay=decay)) == factor(3, 3, None) == 1.0


@pytest.mark.parametrize(("shift", "total"), [(500, 1500), (-250, 750)])
def test_a_resize_neither_moves_decay_nor_begins_warm_up_again(shift: int, total: int) -> None:
    spec = ScheduleSpec(warmup_steps=100, decay="linear")
    assert factor(50, total, spec, shift) == 0.5
    assert factor(500, total, spec, shift) == pytest.approx(factor(500, 1000, spec), abs=0.08)
    assert factor(101, total, spec, shift) > 0.6
    assert factor(total, total, spec, shift) == spec.min_ratio


@given(schedules(), st.integers(1, 300))
def test_rates_rise_to_the_peak_and_fall_to_the_least_ratio(spec: ScheduleSpec, total: int) -> None:
    factors = [factor(step, total, spec) for step in range(1, total + 8)]
    peak = min(max(spec.warmup_steps, 1), total)
    assert all(a < b for a, b in pairwise(factors[:peak]))
    if total > peak:
        assert factors[peak - 1] == 1.0
        assert all(a >= b - 1e-12 for a, b in pairwise(factors[peak - 1 :]))
        last = 1.0 if spec.decay == "constant" else spec.min_ratio
        assert factors[total - 1 :] == pytest.approx([last] * 8)
