"""How a user liked earlier movies of a kind: against a slow loop, and never from the future."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.prepare.past import Ratings, UserPast, look_back_at_users
from trainer.data.prepare.taste import look_back_at_kinds
from trainer.data.ragged import Ragged, offsets_of

rows_of_users = st.lists(
    st.tuples(
        st.integers(0, 2),  # user
        st.integers(0, 5),  # time
        st.sampled_from([1.0, 3.0, 5.0]),
        st.lists(st.integers(0, 3), max_size=3, unique=True),
    ),
    min_size=1,
    max_size=25,
)


def past_of(rows) -> tuple[UserPast, np.ndarray, Ragged]:
    user, time, stars, kinds = zip(*sorted(rows, key=lambda r: (r[0], r[1], r[3])), strict=True)
    ratings = Ratings(
        user=np.array(user),
        movie=np.arange(len(rows)),
        stars=np.array(stars),
        timestamp=np.array(time),
        is_validation=np.zeros(len(rows), dtype=bool),
    )
    values = np.array([kind for each in kinds for kind in each], dtype=np.int64)
    lengths = np.array([len(each) for each in kinds])
    past = look_back_at_users(ratings, global_mean=3.0)
    return past, ratings.timestamp, Ragged(values, offsets_of(lengths))


@given(rows_of_users)
def test_it_is_the_mean_over_kinds_of_damped_means_of_earlier_rows(rows):
    past, time, kinds = past_of(rows)
    lists = [kinds.values[a:b] for a, b in zip(kinds.offsets, kinds.offsets[1:], strict=False)]
    expected = []
    for row, own in enumerate(lists):
        means = []
        for kind in own:
            earlier = [
                past.residual[other]
                for other in range(len(rows))
                if past.starts[other] == past.starts[row]
                and time[other] < time[row]
                and kind in lists[other]
            ]
            means.append(sum(earlier) / (len(earlier) + 5))
        expected.append(np.mean(means) if means else 0.0)
    assert look_back_at_kinds(past, time, kinds) == pytest.approx(expected, abs=1e-9)


@given(rows_of_users, st.integers(0, 5))
def test_what_comes_at_or_after_a_moment_does_not_change_it(rows, moment):
    changed = [(u, t, s if t < moment else 6 - s, k) for u, t, s, k in rows]
    past, time, kinds = past_of(rows)
    other_past, _, _ = past_of(changed)
    before = look_back_at_kinds(past, time, kinds)
    after = look_back_at_kinds(other_past, time, kinds)
    seen = time <= moment
    np.testing.assert_allclose(before[seen], after[seen], atol=1e-9)
