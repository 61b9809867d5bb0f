"""Fused optimizers on real FBGEMM kernels against plain torch; accumulation; schedules."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_model import FusedKernel, fused_kernel
from trainer.parallel.optimizer import GradientAccumulator, factor, fused_optimizer_params
from trainer.spec.training import ScheduleSpec, SparseOptimizerSpec

NUM_ROWS, DIM = 13, 8
# Bags of every kind: ids twice in one bag, in two bags, alone, and an empty bag.
IDS = torch.tensor([3, 3, 5, 5, 7, 0, 12, 3])
OFFSETS = torch.tensor([0, 3, 3, 5, 8])


def _kernel(spec: SparseOptimizerSpec, moment_scale: float) -> FusedKernel:
    kernel = fused_kernel([NUM_ROWS], DIM, **fused_optimizer_params(spec, moment_scale))
    generator = torch.Generator().manual_seed(0)
    kernel.split_embedding_weights()[0].copy_(torch.randn(NUM_ROWS, DIM, generator=generator))
    return kernel


def _gradient(step: int) -> torch.Tensor:
    """Gradient of the pooled output, [num_bags, DIM]."""
    return torch.randn(len(OFFSETS) - 1, DIM, generator=torch.Generator().manual_seed(step))


def _row_gradient(weight: torch.Tensor, step: int) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    pooled = torch.nn.functional.embedding_bag(IDS, leaf, OFFSETS[:-1], mode="sum")
    return torch.autograd.grad(pooled, leaf, _gradient(step))[0]


def _expected(
    weight: torch.Tensor, spec: SparseOptimizerSpec, moment_scale: float, num_steps: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and moments after `num_steps` by the formulas in the optimizer's docstring."""
    if spec.name == "sgd":
        for step in range(num_steps):
            weight = weight - spec.lr * _row_gradient(weight, step)
        return weight, None
    moment = torch.zeros(NUM_ROWS, 1 if spec.name == "row_wise_adagrad" else DIM)
    for step in range(num_steps):
        gradient = _row_gradient(weight, step)
        squares = gradient**2
        moment += squares.mean(1, keepdim=True) if moment.shape[1] == 1 else squares
        weight = weight - spec.lr / ((moment / moment_scale).sqrt() + spec.eps) * gradient
    return weight, moment


@pytest.mark.parametrize(
    ("name", "moment_scale"),
    [("sgd", 1.0), *itertools.product(["adagrad", "row_wise_adagrad"], [1.0, 2.5])],
)
def test_updates_follow_algorithm_1_with_duplicate_ids(name: str, moment_scale: float) -> None:
    spec = SparseOptimizerSpec(name=name, lr=0.1, eps=0.01)
    kernel = _kernel(spec, moment_scale)
    weight, moment = _expected(
        kernel.split_embedding_weights()[0].clone(), spec, moment_scale, num_steps=5
    )
    for step in range(5):
        kernel(IDS, OFFSETS).backward(_gradient(step))
    torch.testing.assert_close(kernel.split_embedding_weights()[0], weight, atol=1e-6, rtol=0)
    if moment is not None:
        (state,) = kernel.get_optimizer_state()[0].values()
        torch.testing.assert_close(state, moment.view(state.shape), atol=1e-5, rtol=1e-6)


BATCH = st.tuples(
    st.floats(0, 1e4).map(lambda weight: 0.0 if weight < 1e-3 else weight), st.floats(-9, 9)
)


def accumulated(batches: list[tuple[float, float]], dtype: torch.dtype) -> float:
    """What a window makes of (weight, mean gradient) of batches; one that weighs 0 gives 0."""
    window, held = GradientAccumulator(), torch.zeros(1, dtype=dtype)
    for weight, gradient in batches:
        window.add([held], torch.tensor(weight))
        held += gradient if weight else 0.0
    window.close([held])
    assert window.num_batches == 0
    return held.item()


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
