"""How far a gain in RMSE may be chance of who was asked: a paired bootstrap over users.

Users are drawn with replacement, all held-out ratings of a user together and the same users for
both sides (Efron and Tibshirani 1993, chapters 6 and 13: percentile interval).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.benchmarks.quality_data import FloatArray
from trainer.data.ragged import IntArray

LEVEL = 0.95
_NUM_DRAWS = 2000
_SEED = 0


def squares_by_user(user: IntArray, errors: FloatArray, num_users: int) -> FloatArray:
    """Sum of the squared errors of each user, [num_users]."""
    return np.bincount(user, errors**2, minlength=num_users)


def rmse_of(squares: FloatArray, num_rows: IntArray) -> float:
    """RMSE over all rows, of which each user has `num_rows`."""
    return float(np.sqrt(squares.sum() / num_rows.sum()))


def gain_interval(
    peer: Sequence[FloatArray], ours: Sequence[FloatArray], num_rows: IntArray
) -> list[float]:
    """Ends of the interval of mean RMSE over seeds of the peer less that of ours, in stars.

    `peer` and `ours` hold `squares_by_user` for each seed; `num_rows` is [num_users].
    """
    rng = np.random.default_rng(_SEED)
    num_users = len(num_rows)
    drawn = rng.multinomial(num_users, np.full(num_users, 1 / num_users), size=_NUM_DRAWS)
    gains = _means(drawn, peer, num_rows) - _means(drawn, ours, num_rows)
    tail = (1 - LEVEL) / 2
    return [float(end) for end in np.quantile(gains, [tail, 1 - tail])]


def _means(drawn: IntArray, squares: Sequence[FloatArray], num_rows: IntArray) -> FloatArray:
    """Mean RMSE over seeds for each draw; `drawn` is how often each user came, [draws, users]."""
    counts = drawn @ num_rows
    return np.mean([np.sqrt(drawn @ each / counts) for each in squares], axis=0)
