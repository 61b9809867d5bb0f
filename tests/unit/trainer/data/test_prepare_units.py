"""The arithmetic of streaming: blocks, units, cuts and moments are what one pass would find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.errors import BadValueError, CorruptFileError
from trainer.data.prepare.csv_blocks import BlockReader
from trainer.data.prepare.csv_reader import integer, number, read_csv, text
from trainer.data.prepare.movie_past import cut_movies
from trainer.data.prepare.partitions import cut_partitions
from trainer.data.prepare.spill import map_columns, write_columns
from trainer.data.prepare.statistics import Moments
from trainer.data.prepare.timeline import find_cut, mark_validation, order_by
from trainer.data.prepare.units import cut_users
from trainer.data.storage import Location

COLUMNS = [integer("userId"), number("rating", above=0, at_most=5), text("tag")]
EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=40).map(
    sorted
)


def read_in_blocks(path: Path, block_bytes: int) -> tuple[pl.DataFrame, int]:
    reader = BlockReader(Location.parse(path), COLUMNS, block_bytes=block_bytes)
    frames, start, line = [], reader.first, 2
    while start < reader.size_bytes:
        block, frame = reader.read(start, line)
        start, line = block.end, block.next_line
        frames.append(frame)
    return pl.concat(frames), len(frames)


@pytest.mark.parametrize("last_newline", ["\n", ""])
def test_blocks_hold_every_line_once(tmp_path, last_newline):
    path = tmp_path / "ratings.csv"
    lines = [f'{row},{row % 9 / 2 + 0.5},"a, ""b""\nc{row}"' for row in range(200)]
    path.write_text("userId,rating,tag\n" + "\n".join(lines) + last_newline)
    frame, num_blocks = read_in_blocks(path, block_bytes=100)
    assert num_blocks > 20
    assert frame.equals(read_csv(path, COLUMNS))


def test_a_fault_in_a_late_block_has_the_line_of_the_file(tmp_path):
    path = tmp_path / "ratings.csv"
    lines = [f"{row},3,x" for row in range(500)]
    lines[321] = "321,six,x"
    path.write_text("userId,rating,tag\n" + "\n".join(lines) + "\n")
    with pytest.raises(BadValueError, match="line 323, column 'rating': 'six'"):
        read_in_blocks(path, block_bytes=64)


def test_a_quote_that_is_never_closed_is_refused_without_reading_on(tmp_path):
    path = tmp_path / "ratings.csv"
    path.write_text('userId,rating,tag\n1,3,"open\n' + "2,3,x\n" * 1000)
    with pytest.raises(CorruptFileError, match="is a quote left open"):
        read_in_blocks(path, block_bytes=200)


@given(
    st.lists(
        st.tuples(*3 * [st.integers(-(2**62), 2**62) | st.integers(0, 9)]), min_size=1, max_size=30
    )
)
def test_packed_keys_sort_as_single_ones_do(rows):
    keys = [np.array(key, dtype=np.int64) for key in zip(*rows, strict=True)]
    assert order_by(*keys).tolist() == np.lexsort(keys[::-1]).tolist()


@given(EVENTS, st.sampled_from([0.0, 0.1, 0.25, 0.5]), st.integers(1, 4), st.integers(0, 40))
def test_a_cut_over_units_marks_what_a_sort_of_all_rows_would(events, fraction, num_units, scale):
    user = np.array([user for user, _ in events])
    time = np.array([time << scale for _, time in events])
    units = np.array_split(time, num_units)
    cut = find_cut(lambda: units, int(len(events) * fraction))
    before = np.cumsum([0, *(int((unit == cut.time).sum()) for unit in units)])
    marks = [cut.mark(unit, before[number]) for number, unit in enumerate(units)]
    expected = mark_validation(user, time, "global", fraction)
    assert np.concatenate(marks).tolist() == expected.tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 100))
def test_units_hold_every_user_once_and_are_of_similar_size(rows_per_user, unit_rows):
    units = cut_users(np.array(rows_per_user), unit_rows)
    assert [user for unit in units for user in unit] == list(range(len(rows_per_user)))
    assert all(len(unit) for unit in units)
    largest = max(sum(rows_per_user[user] for user in unit) for unit in units)
    assert largest <= 2 * unit_rows + max(rows_per_user)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 100))
def test_ranges_of_movies_cover_each_once(rows_of_movie, range_rows):
    bounds = cut_movies(np.array(rows_of_movie), range_rows)
    assert (bounds[0], bounds[-1]) == (0, len(rows_of_movie))
    assert (np.diff(bounds) > 0).all()
    sizes = np.add.reduceat(rows_of_movie, bounds[:-1])
    assert sizes.max() <= 2 * range_rows + max(rows_of_movie)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_partitions_hold_every_row_once_in_files_of_equal_size(rows, num_partitions, group_rows):
    partitions = cut_partitions(np.array(rows), num_partitions, group_rows)
    found = [
        (unit, row)
        for partition in partitions
        for unit, start, end in partition.slices
        for row in range(start, end)
    ]
    assert found == [(unit, row) for unit, size in enumerate(rows) for row in range(size)]
    sizes = [partition.num_rows for partition in partitions]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(num_partitions, max(1, sum(rows) // group_rows))


@given(st.lists(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=8), min_size=1))
def test_moments_of_parts_add_up_to_those_of_the_whole(parts):
    total = sum((Moments.of(np.array(part, dtype=float)) for part in parts), Moments())
    whole = Moments.of(np.array([value for part in parts for value in part], dtype=float))
    assert total.count == whole.count
    assert total.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-6)
    assert total.squares == pytest.approx(whole.squares, rel=1e-9, abs=1e-3)


def test_columns_come_back_from_a_file_as_they_were(tmp_path):
    columns = {"a": np.arange(5, dtype=np.int32), "b": np.linspace(0, 1, 5, dtype=np.float32)}
    write_columns(tmp_path / "some", columns)
    write_columns(tmp_path / "none", {name: values[:0] for name, values in columns.items()})
    for name, values in map_columns(tmp_path / "some").items():
        assert values.dtype == columns[name].dtype
        assert values.tolist() == columns[name].tolist()
    assert [len(values) for values in map_columns(tmp_path / "none").values()] == [0, 0]
