"""The ragged gather against a naive reference."""

from __future__ import annotations

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ragged import Ragged, gather, offsets_of

LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=12)


def ragged_of(lists: list[list[int]]) -> Ragged:
    lengths = np.array([len(items) for items in lists], dtype=np.int64)
    return Ragged(np.array(list(chain.from_iterable(lists)), dtype=np.int64), offsets_of(lengths))


def lists_of(ragged: Ragged) -> list[list[int]]:
    return [part.tolist() for part in np.split(ragged.values, ragged.offsets[1:-1])]


@given(LISTS, st.data())
def test_take_gathers_whole_lists_in_the_order_asked_for(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=20))
    taken = ragged_of(lists).take(np.array(rows, dtype=np.int64))
    assert lists_of(taken) == [lists[row] for row in rows]
    assert taken.lengths.tolist() == [len(lists[row]) for row in rows]


@given(st.lists(st.integers(), min_size=1, max_size=30), st.data())
def test_gather_reads_any_ranges(values, data):
    ends = data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=8))
    starts = [data.draw(st.integers(0, end)) for end in ends]
    found = gather(np.array(values, dtype=object), np.array(starts), np.array(ends))
    expected = [values[start:end] for start, end in zip(starts, ends, strict=True)]
    assert lists_of(found) == expected
