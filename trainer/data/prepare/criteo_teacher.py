"""Criteo-shaped click data whose click probabilities are known.

A row has 13 dense values, 26 categorical ids and a click. The generated rows come from a *teacher*,
a logistic model with one effect per id, low-rank interactions between ids and a curved dense part.
Because the probability of every click is known, so is the best normalized entropy that any model
can reach on those rows. Ids follow a Zipf law over tables as large as Criteo's, up to a cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

NUM_DENSE = 13
# Distinct values per categorical column of the Criteo display advertising set.
CARDINALITIES = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
NUM_CATEGORICAL = len(CARDINALITIES)
_NUM_FACTORS = 4
_EFFECT_STD = 0.2
_FACTOR_STD = 0.08
_DENSE_STD = 0.18
_BIAS = -1.5


@dataclass(frozen=True)
class ClickRows:
    """N rows: dense [N, 13], ids [N, 26] below the table sizes, label [N] of 0 and 1.

    `probability` [N] is that of label 1 where the teacher is known, else None.
    """

    dense: FloatArray
    ids: IntArray
    label: FloatArray
    probability: FloatArray | None

    def __len__(self) -> int:
        return len(self.label)

    def slice(self, start: int, stop: int) -> ClickRows:
        """Rows `start` to `stop`, without copying them."""
        part = slice(start, stop)
        probability = None if self.probability is None else self.probability[part]
        return ClickRows(self.dense[part], self.ids[part], self.label[part], probability)

    def take(self, order: IntArray) -> ClickRows:
        """The rows numbered `order`, in that order."""
        probability = None if self.probability is None else self.probability[order]
        return ClickRows(self.dense[order], self.ids[order], self.label[order], probability)


def table_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the 26 tables: Criteo's own numbers, at most `max_rows` each."""
    return tuple(min(cardinality, max_rows) for cardinality in CARDINALITIES)


class Teacher:
    """The logistic model that decides the clicks; the same seed gives the same model."""

    def __init__(self, sizes: Sequence[int], zipf_exponent: float, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self._sizes = tuple(sizes)
        self._zipf = [_zipf_cdf(size, zipf_exponent) for size in sizes]
        self._effects = [rng.normal(0, _EFFECT_STD, size) for size in sizes]
        self._factors = [rng.normal(0, _FACTOR_STD, (size, _NUM_FACTORS)) for size in sizes]
        self._slopes, self._bends = rng.normal(0, _DENSE_STD, (2, NUM_DENSE))

    def draw(self, num_rows: int, seed: Sequence[int]) -> ClickRows:
        """`num_rows` independent rows, always the same ones for the same `seed`."""
        rng = np.random.default_rng(seed)
        counts = rng.lognormal(1.0, 1.5, (num_rows, NUM_DENSE)).astype(np.int64)
        dense = log_transform(counts)
        uniforms = rng.random((len(self._sizes), num_rows))
        drawn = [
            np.searchsorted(cdf, uniform, side="right")
            for cdf, uniform in zip(self._zipf, uniforms, strict=True)
        ]
        ids = np.stack(drawn, axis=1)
        probability = self.probability(dense, ids)
        label = (rng.random(num_rows) < probability).astype(np.float32)
        return ClickRows(dense, ids, label, probability)

    def probability(self, dense: FloatArray, ids: IntArray) -> FloatArray:
        """Probability [N] of a click."""
        logit = _BIAS + _centered(dense) @ self._slopes + np.cos(dense) @ self._bends
        total = np.zeros((len(ids), _NUM_FACTORS))
        own = np.zeros(len(ids))
        for column, (effects, factors) in enumerate(zip(self._effects, self._factors, strict=True)):
            rows = factors[ids[:, column]]
            logit += effects[ids[:, column]]
            total += rows
            own += np.square(rows).sum(axis=1)
        # Half of (square of the sum - sum of the squares) is the sum over all pairs.
        logit += (np.square(total).sum(axis=1) - own) / 2
        return (1 / (1 + np.exp(-logit))).astype(np.float32)


def log_transform(counts: IntArray) -> FloatArray:
    """log(1 + count), with missing and negative counts as 0."""
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)


def _centered(dense: FloatArray) -> FloatArray:
    return dense - np.float32(1.5)


def _zipf_cdf(size: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    cdf = np.cumsum(weights) / weights.sum()
    cdf[-1] = 1.0
    return cdf
