"""The order of an epoch: complete, bounded in memory, cut at windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.reader import EpochOrder

GROUPS = st.lists(st.integers(1, 30), min_size=1, max_size=15)


def rows_in_order(order: EpochOrder, group_rows: list[int]) -> list[tuple[int, int]]:
    """(row group, row in group) of every row of the epoch."""
    rows = []
    for number in range(len(order.bounds) - 1):
        groups, row_order = order.window(number)
        flat = [(group, row) for group in groups for row in range(group_rows[group])]
        rows += [flat[place] for place in row_order]
    return rows


@given(GROUPS, st.integers(1, 60), st.integers(0, 5), st.integers(0, 5))
def test_every_row_comes_exactly_once(group_rows, window_rows, seed, epoch):
    order = EpochOrder(group_rows, window_rows=window_rows, seed=seed, epoch=epoch)
    rows = rows_in_order(order, group_rows)
    assert sorted(rows) == [(g, r) for g, count in enumerate(group_rows) for r in range(count)]


@given(GROUPS, st.integers(1, 60))
def test_a_window_holds_no_more_groups_than_it_needs(group_rows, window_rows):
    order = EpochOrder(group_rows, window_rows=window_rows, seed=1)
    for number in range(len(order.bounds) - 1):
        groups, _ = order.window(number)
        assert sum(group_rows[group] for group in groups[:-1]) < window_rows


@given(GROUPS, st.integers(1, 60), st.data())
def test_pieces_cover_a_range_of_rows_across_windows(group_rows, window_rows, data):
    total = sum(group_rows)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    order = EpochOrder(group_rows, window_rows=window_rows, seed=2)
    all_rows = [
        (number, place)
        for number in range(len(order.bounds) - 1)
        for place in range(len(order.window(number)[1]))
    ]
    covered = [
        (number, place)
        for number, piece in order.pieces(range(start, stop))
        for place in range(piece.start, piece.stop)
    ]
    assert covered == all_rows[start:stop]
