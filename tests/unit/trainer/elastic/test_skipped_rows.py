"""Rows that a run leaves out: the file, what lies between two positions, and going on without."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.position import BatchShape, DataPosition, advance, remaining_steps, step_start
from trainer.elastic.skipped_rows import SkippedRows, rows_between, without


def test_a_run_without_the_file_skips_nothing(tmp_path: Path) -> None:
    assert SkippedRows.read(tmp_path / "none.json") == SkippedRows()


def test_what_is_written_is_read_again_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "skipped.json"
    SkippedRows().with_rows([(1, ((0, 10),))]).write(path)
    SkippedRows.read(path).with_rows([(1, ((10, 15),)), (0, ((3, 4),))]).write(path)
    assert SkippedRows.read(path).epochs == ((0, ((3, 4),)), (1, ((0, 15),)))


def test_a_damaged_file_is_an_error_of_storage_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "skipped.json"
    path.write_text('{"epochs": [[0')
    with pytest.raises(OSError, match="remove it to train all rows"):
        SkippedRows.read(path)


def test_rows_between_two_positions_cross_the_end_of_an_epoch() -> None:
    before, after = DataPosition(0, 80), DataPosition(1, 20)
    assert rows_between(before, after, 100) == [(0, ((80, 100),)), (1, ((0, 20),))]


def test_rows_that_were_done_out_of_turn_are_not_between() -> None:
    before = DataPosition(0, 10, done=((20, 30),))
    assert rows_between(before, DataPosition(0, 40), 100) == [(0, ((10, 20), (30, 40)))]


@given(
    num_rows=st.integers(20, 200),
    world_size=st.integers(1, 4),
    bad_step=st.integers(0, 30),
    num_bad_steps=st.integers(1, 4),
    resumed_steps=st.integers(0, 30),
)
def test_a_resumed_run_takes_every_row_but_the_skipped_ones(
    num_rows: int, world_size: int, bad_step: int, num_bad_steps: int, resumed_steps: int
) -> None:
    shape = BatchShape(num_rows, world_size, 5)
    finite_at = _after(DataPosition(), shape, bad_step)
    skipped = SkippedRows().with_rows(
        rows_between(finite_at, _after(finite_at, shape, num_bad_steps), num_rows)
    )
    start = _after(DataPosition(), shape, min(resumed_steps, bad_step))
    position = without(start, skipped)
    num_skipped = sum(stop - first for _, spans in skipped.epochs for first, stop in spans)
    assert position.rows_done(num_rows) == start.rows_done(num_rows) + num_skipped
    epochs = position.epoch + 60
    end = _after(position, shape, remaining_steps(position, shape, epochs))
    assert end.rows_done(num_rows) == epochs * num_rows


def _after(position: DataPosition, shape: BatchShape, num_steps: int) -> DataPosition:
    for _ in range(num_steps):
        position = advance(step_start(position, shape), shape)
    return position
