"""Windows of gradients: the mean over all rows, whatever each batch weighs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.accumulation import Window

BATCH = st.tuples(
    st.floats(0, 1e4).map(lambda weight: 0.0 if weight < 1e-3 else weight), st.floats(-9, 9)
)


def accumulated(batches: list[tuple[float, float]], dtype: torch.dtype) -> float:
    """What a window makes of (weight, mean gradient) of batches; one that weighs 0 gives 0."""
    window, held = Window(), torch.zeros(1, dtype=dtype)
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
