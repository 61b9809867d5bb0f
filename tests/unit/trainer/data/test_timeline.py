"""Strictly earlier rows and time splits against naive references."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.prepare.timeline import earlier_ranges, mark_validation, range_sums

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=40).map(
    sorted
)


def columns(events):
    return np.array([e[0] for e in events]), np.array([e[1] for e in events])


@given(EVENTS)
def test_earlier_rows_are_of_the_same_group_and_strictly_before(events):
    starts, ends = earlier_ranges(*columns(events))
    for row, (group, time) in enumerate(events):
        expected = [i for i, (g, t) in enumerate(events) if g == group and t < time]
        assert list(range(starts[row], ends[row])) == expected


@given(EVENTS)
def test_range_sums_add_what_a_loop_would_add(events):
    values = np.arange(len(events)) + 0.5
    starts, ends = earlier_ranges(*columns(events))
    expected = [values[s:e].sum() for s, e in zip(starts, ends, strict=True)]
    assert np.allclose(range_sums(values, starts, ends), expected)


@given(EVENTS, st.sampled_from([0.1, 0.25, 0.5]))
def test_a_global_split_holds_out_the_last_ratings(events, fraction):
    user, time = columns(events)
    held_out = mark_validation(user, time, "global", fraction)
    assert held_out.sum() == int(len(events) * fraction)
    if held_out.any():
        assert time[held_out].min() >= time[~held_out].max()


@given(EVENTS, st.sampled_from([0.1, 0.25, 0.5]))
def test_a_per_user_split_holds_out_the_last_ratings_of_each(events, fraction):
    user, time = columns(events)
    held_out = mark_validation(user, time, "per_user", fraction)
    for one in np.unique(user):
        own = user == one
        assert held_out[own].sum() == int(own.sum() * fraction)
        if held_out[own].any():
            assert time[own & held_out].min() >= time[own & ~held_out].max()


def test_a_user_with_too_few_ratings_stays_in_training():
    user, time = np.zeros(9, dtype=np.int64), np.arange(9)
    assert not mark_validation(user, time, "per_user", 0.1).any()
