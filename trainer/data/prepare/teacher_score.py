"""How well the probabilities behind generated clicks predict them: the best that a model can do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Probabilities in one bin count as equal, which moves the AUC by less than one in a million.
_NUM_BINS = 1 << 20


class TeacherScore:
    """Log loss, normalised entropy and AUC of known probabilities, gathered part by part.

    Normalised entropy is log loss over that of always predicting the mean click rate (He et al.
    2014, "Practical Lessons from Predicting Clicks on Ads at Facebook").
    """

    def __init__(self) -> None:
        self._clicks = np.zeros(_NUM_BINS, dtype=np.int64)
        self._views = np.zeros(_NUM_BINS, dtype=np.int64)
        self._loss = 0.0

    def add(self, probability: NDArray[np.float32], label: NDArray[np.float32]) -> None:
        """Count rows: `probability` [n] of a click in (0, 1), `label` [n] of 0 and 1."""
        exact = probability.astype(np.float64)
        self._loss -= float(np.log(np.where(label > 0, exact, 1 - exact)).sum())
        bins = np.minimum((exact * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        self._views += np.bincount(bins, minlength=_NUM_BINS)
        self._clicks += np.bincount(bins, label, minlength=_NUM_BINS).astype(np.int64)

    def as_dict(self) -> dict[str, float | None]:
        """`rows`, `click_rate`, `logloss`, `ne`, `auc`; None where clicks or others are lacking."""
        rows, clicks = int(self._views.sum()), int(self._clicks.sum())
        rate = clicks / rows if rows else None
        logloss = self._loss / rows if rows else None
        has_both = 0 < clicks < rows
        return {
            "rows": rows,
            "click_rate": rate,
            "logloss": logloss,
            "ne": self._loss / rows / entropy(clicks / rows) if has_both else None,
            "auc": self._auc() if has_both else None,
        }

    def _auc(self) -> float:
        others = self._views - self._clicks
        below = np.cumsum(others) - others
        won = (self._clicks * (below + others / 2)).sum()
        return float(won / (float(self._clicks.sum()) * float(others.sum())))


def entropy(rate: float) -> float:
    """Log loss, in nats, of predicting `rate` for clicks that come at that rate."""
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
