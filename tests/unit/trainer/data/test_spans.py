"""Sets of rows as spans, against Python's sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.data.spans import Spans

CHANGES = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=12)


def built(changes) -> tuple[Spans, set[int]]:
    spans, rows = Spans(), set()
    for is_in, start, stop in changes:
        if is_in:
            spans.add(start, stop)
            rows |= set(range(start, stop))
        else:
            spans.remove(start, stop)
            rows -= set(range(start, stop))
    return spans, rows


@given(CHANGES)
def test_spans_hold_the_rows_added_and_not_removed_and_stay_apart(changes):
    spans, rows = built(changes)
    assert len(spans) == len(rows)
    assert {row for start, stop in spans.spans for row in range(start, stop)} == rows
    bounds = [bound for span in spans.spans for bound in span]
    assert bounds == sorted(set(bounds))


@given(CHANGES, st.integers(0, 30), st.integers(0, 35))
def test_gaps_are_the_missing_rows_in_order(changes, start, stop):
    spans, rows = built(changes)
    gaps = spans.gaps(start, stop)
    missing = [row for row in range(start, stop) if row not in rows]
    assert [row for first, last in gaps for row in range(first, last)] == missing
    assert spans.gap(start, stop) == (gaps[0] if gaps else None)


def test_spans_given_in_any_order_are_joined():
    assert Spans([(5, 8), (0, 2), (2, 4), (9, 9)]).spans == ((0, 4), (5, 8))
