"""Decisions of a sync: when, in which mode, how often to warn, and how late means are applied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.overlap import apply_difference
from trainer.parallel.replica_sync import OverflowWarning
from trainer.parallel.sync import is_sync_step, mode_for
from trainer.spec import SparseOptimizerSpec, SyncSpec


def test_syncs_come_every_so_many_steps_counted_from_one() -> None:
    spec = SyncSpec(every_steps=3)
    assert [step for step in range(1, 10) if is_sync_step(step, spec)] == [3, 6, 9]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row_wise_adagrad"])
def test_touched_rows_stays_on_for_optimizers_that_leave_other_rows_alone(name: str) -> None:
    optimizer = SparseOptimizerSpec.model_validate({"name": name})
    assert mode_for(SyncSpec(mode="touched_rows"), optimizer) == ("touched_rows", None)


def test_weight_decay_makes_every_sync_full_and_says_what_to_change() -> None:
    decayed = SparseOptimizerSpec(weight_decay=0.01)
    mode, warning = mode_for(SyncSpec(mode="touched_rows"), decayed)
    assert mode == "full"
    assert warning is not None
    assert "optimizer.sparse.weight_decay (0.01)" in warning
    assert mode_for(SyncSpec(mode="full"), decayed) == ("full", None)


def test_overflows_are_told_at_the_first_tenth_and_hundredth_sync() -> None:
    told: list[str] = []
    warning = OverflowWarning(told.append)
    for _ in range(150):
        warning.count(0)
        warning.count(3)
    assert [text.split("so far: ")[1].split(".")[0] for text in told] == ["1", "10", "100"]


FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@settings(deadline=None)
@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1))
def test_a_value_that_did_not_change_becomes_exactly_the_mean(
    values: list[tuple[float, float]],
) -> None:
    current, mean = torch.tensor(values).unbind(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kept, mean_then = current.to(dtype), mean.clamp(-6e4, 6e4).to(dtype)
        kept = torch.where(kept.isfinite(), kept, 0)
        assert torch.equal(apply_difference(kept, kept.clone(), mean_then), mean_then)


def test_what_changed_since_the_snapshot_is_added_to_the_mean() -> None:
    current, snapshot, mean = (torch.tensor([v]) for v in (5.0, 3.0, 2.5))
    assert apply_difference(current, snapshot, mean).item() == 4.5


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e6, width=32, allow_subnormal=False)] * 3), min_size=1))
def test_a_moment_never_becomes_negative(values: list[tuple[float, float, float]]) -> None:
    snapshot, growth, mean = torch.tensor(values).unbind(1)
    assert bool((apply_difference(snapshot + growth, snapshot, mean) >= 0).all())
