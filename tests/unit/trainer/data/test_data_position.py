"""Position arithmetic: equal batches per rank, nothing lost or repeated at any world size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.position import (
    BatchShape,
    DataPosition,
    advance,
    rank_slice,
    remaining_steps,
    step_start,
)

SHAPES = st.builds(
    BatchShape,
    num_rows=st.integers(1, 500),
    world_size=st.integers(1, 8),
    batch_size=st.integers(1, 40),
)


def rows_of_step(start: DataPosition, shape: BatchShape) -> list[int]:
    return [row for rank in range(shape.world_size) for row in rank_slice(start.row, rank, shape)]


@given(SHAPES)
def test_ranks_of_a_step_share_consecutive_rows_without_overlap(shape):
    rows = rows_of_step(DataPosition(0, 5), shape)
    assert rows == list(range(5, 5 + shape.rows_per_step))


@given(SHAPES)
def test_an_epoch_takes_every_row_once_but_the_incomplete_tail(shape):
    position, taken = DataPosition(), []
    for _ in range(shape.steps_per_epoch):
        start = step_start(position, shape)
        taken += rows_of_step(start, shape)
        position = advance(start, shape)
    assert taken == list(range(shape.num_rows - shape.num_rows % shape.rows_per_step))
    assert step_start(position, shape) == DataPosition(1, 0)


@given(
    num_rows=st.integers(1, 400),
    lives=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(0, 6)), max_size=6),
)
def test_resuming_at_other_world_sizes_never_loses_or_repeats_a_row(num_rows, lives):
    position, taken = DataPosition(), []
    for world_size, batch_size, steps in lives:
        shape = BatchShape(num_rows, world_size, batch_size)
        for _ in range(steps if shape.steps_per_epoch else 0):
            start = step_start(position, shape)
            if start.epoch > position.epoch:
                assert num_rows - position.row < shape.rows_per_step
                taken = []
            taken += rows_of_step(start, shape)
            position = advance(start, shape)
            assert taken == list(range(position.row))
            assert position.row <= num_rows


@given(SHAPES, st.integers(0, 3), st.integers(0, 500), st.integers(1, 4))
def test_remaining_steps_counts_the_steps_that_a_run_takes(shape, epoch, row, epochs):
    position = DataPosition(epoch, min(row, shape.num_rows))
    expected = 0
    walk = position
    while shape.steps_per_epoch and (start := step_start(walk, shape)).epoch < epochs:
        walk = advance(start, shape)
        expected += 1
    if shape.steps_per_epoch:
        assert remaining_steps(position, shape, epochs) == expected


def test_positions_order_by_epoch_then_row():
    assert DataPosition(0, 900) < DataPosition(1, 0) < DataPosition(1, 1)


def test_padded_steps_cover_the_last_rows():
    assert BatchShape(num_rows=33, world_size=2, batch_size=8).padded_steps == 3
    assert BatchShape(num_rows=32, world_size=2, batch_size=8).padded_steps == 2
