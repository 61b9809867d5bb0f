"""Rows feature by feature: gathered, cut and joined as lists in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ragged import offsets_of
from trainer.data.row_columns import RowColumns, concat_columns
from trainer.data.sparse_ids import IdLists, SparseIds

LISTS = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=12)


def column_of(lists: list[list[int]], is_weighted: bool = False) -> IdLists:
    ids = np.array([item for items in lists for item in items], dtype=np.int64)
    offsets = offsets_of(np.array([len(items) for items in lists]))
    return IdLists(ids, offsets, (ids / 2).astype(np.float32) if is_weighted else None)


def lists_of(column: IdLists) -> list[list[int]]:
    ends = offsets_of(column.lengths)[1:-1]
    return [part.tolist() for part in np.split(column.ids, ends)]


def rows_of(lists: list[list[int]]) -> RowColumns:
    """Each row's number as its dense value, label and single id; the lists with weights."""
    number = np.arange(len(lists), dtype=np.float32)
    return RowColumns(
        dense=number[:, None],
        label=number[:, None],
        offset=number[:, None],
        scale=number[:, None],
        row_weight=number,
        sparse=SparseIds(
            is_single=(True, False),
            singles=number.astype(np.int32)[:, None],
            lists=(column_of(lists, is_weighted=True),),
        ),
        faults=number.astype(np.int32),
    )


def check(rows: RowColumns, lists: list[list[int]], numbers: list[int]) -> None:
    """`rows` are those `numbers` of `rows_of(lists)`."""
    is_whole = rows.sparse.is_single == (False, False)
    single = rows.sparse.lists[0].ids if is_whole else rows.sparse.singles[:, 0]
    ragged = rows.sparse.lists[-1]
    assert rows.dense[:, 0].tolist() == rows.row_weight.tolist() == numbers
    assert single.tolist() == rows.faults.tolist() == numbers
    assert lists_of(ragged) == [lists[number] for number in numbers]
    assert np.array_equal(ragged.weights, ragged.ids / 2)


@given(lists=LISTS, data=st.data())
def test_rows_are_gathered_cut_and_joined(lists, data) -> None:
    rows = rows_of(lists)
    some = st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=9)
    picked = data.draw(some)
    taken = rows.take(np.array(picked))
    check(taken, lists, picked)
    first = data.draw(st.integers(0, len(picked) - 1))
    stop = data.draw(st.integers(first + 1, len(picked)))
    check(taken.slice(first, stop), lists, picked[first:stop])
    again = data.draw(some)
    joined = concat_columns([taken.slice(first, stop), rows.take(np.array(again))])
    check(joined, lists, picked[first:stop] + again)
    check(RowColumns.of(joined.rows()), lists, picked[first:stop] + again)


@given(lists=LISTS, limit=st.integers(1, 6))
def test_the_last_ids_keep_their_weights(lists, limit) -> None:
    cut = column_of(lists, is_weighted=True).last(limit)
    assert lists_of(cut) == [items[-limit:] for items in lists]
    assert np.array_equal(cut.weights, cut.ids / 2)
    assert (cut.lengths <= limit).all()


FEATURES = st.lists(st.booleans(), min_size=1, max_size=7)


@given(lists=LISTS, is_single=FEATURES, is_weighted=st.booleans(), data=st.data())
def test_ids_are_packed_feature_by_feature_in_any_order(
    lists, is_single, is_weighted, data
) -> None:
    column = column_of(lists, is_weighted)
    numbers = np.arange(len(lists) * sum(is_single), dtype=np.int32)
    ids = SparseIds(
        is_single=tuple(is_single),
        singles=numbers.reshape(len(lists), -1),
        lists=(column,) * (len(is_single) - sum(is_single)),
    )
    count = data.draw(st.integers(0, len(is_single)))
    expected = {True: iter(ids.singles.T.tolist()), False: iter([column.ids.tolist()] * 7)}
    by_feature = [next(expected[each]) for each in is_single]
    for part, wanted, kinds in (
        (ids, by_feature, is_single),
        (ids.first(count), by_feature[:count], is_single[:count]),
        (ids.after(count), by_feature[count:], is_single[count:]),
    ):
        assert part.packed().tolist() == [item for items in wanted for item in items]
        assert part.packed().dtype == np.int64
        ones, lengths = [1] * len(lists), column.lengths.tolist()
        assert part.lengths().tolist() == [ones if each else lengths for each in kinds]
        weights = [[1.0] * len(lists) if each else column.some_weights.tolist() for each in kinds]
        assert part.weights().tolist() == [item for items in weights for item in items]
