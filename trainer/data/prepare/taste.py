"""How a user liked earlier movies of the same kind as the one that is rated."""

from __future__ import annotations

import numpy as np

from trainer.data.prepare.past import UserPast
from trainer.data.prepare.statistics import FloatArray
from trainer.data.prepare.timeline import earlier_ranges, order_by, range_sums
from trainer.data.ragged import IntArray, Ragged

# Ratings that the prior is worth in a mean over earlier ratings of one kind.
_PRIOR_ROWS = 5.0


def look_back_at_kinds(past: UserPast, timestamp: IntArray, kinds: Ragged) -> FloatArray:
    """Mean residual of the user's earlier ratings of each row's kinds, leaning on 0; shape [n].

    `kinds` has the kinds (genres, say) of each row's movie, as indices. Each kind of the row counts
    alike, whatever the number of earlier ratings; a row without kinds gets 0. Rows are those of
    `past`, sorted by (user, timestamp), and like there only a smaller timestamp is earlier.
    """
    rows = np.repeat(np.arange(len(timestamp)), kinds.lengths)
    kind = kinds.values.astype(np.int64)
    # `starts` is the user's first row, so it tells users apart. Rows stay in order of time.
    num_kinds = int(kind.max()) + 1 if len(kind) else 1
    group = past.starts[rows] * num_kinds + kind
    order = order_by(group)
    by_kind = rows[order]
    starts, ends = earlier_ranges(group[order], timestamp[by_kind])
    is_seen, mean = past.is_seen[by_kind], np.empty(len(order))
    total = range_sums(past.residual[by_kind] * is_seen, starts, ends)
    mean[order] = total / (range_sums(is_seen, starts, ends) + _PRIOR_ROWS)
    sums = np.bincount(rows, mean, minlength=len(timestamp))
    return sums / np.maximum(kinds.lengths, 1)
