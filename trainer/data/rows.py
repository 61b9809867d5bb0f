"""Decoded rows in numpy, gathered by row without a Python loop.

`Rows.take` picks rows in any order, all sparse features in one ragged gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.quarantine import FaultArray
from trainer.data.ragged import IntArray, offsets_of, ragged_positions

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """n decoded rows. F sparse features, pooled ones before sequences; D dense ones; K labels.

    dense [n, D], label (normalised), offset and scale [n, K], row_weight [n]; `starts` and
    `lengths` [F, n] are the ranges of each feature and row in the flat `ids`; `weights` has one
    for each id, or is None where no feature is weighted. `faults` [n] says which rows are bad, and
    by which number of a `FaultLog`; None where bad rows raise.
    """

    dense: FloatArray
    label: FloatArray
    offset: FloatArray
    scale: FloatArray
    row_weight: FloatArray
    ids: IntArray
    starts: IntArray
    lengths: IntArray
    weights: FloatArray | None = None
    faults: FaultArray | None = None

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: IntArray) -> Rows:
        """Gather `rows` in that order; the ids come out packed feature by feature."""
        lengths = self.lengths[:, rows]
        flat = ragged_positions(self.starts[:, rows].ravel(), lengths.ravel())
        return Rows(
            dense=self.dense[rows],
            label=self.label[rows],
            offset=self.offset[rows],
            scale=self.scale[rows],
            row_weight=self.row_weight[rows],
            ids=self.ids[flat],
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
            weights=None if self.weights is None else self.weights[flat],
            faults=None if self.faults is None else self.faults[rows],
        )


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, one after the other, packed feature by feature."""
    if len(parts) == 1:
        return parts[0]
    bases = offsets_of(np.array([len(part.ids) for part in parts]))
    weights = [part.weights for part in parts if part.weights is not None]
    faults = [part.faults for part in parts if part.faults is not None]
    joined = Rows(
        dense=np.concatenate([part.dense for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        row_weight=np.concatenate([part.row_weight for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        starts=np.concatenate(
            [part.starts + base for part, base in zip(parts, bases, strict=False)], axis=1
        ),
        lengths=np.concatenate([part.lengths for part in parts], axis=1),
        weights=np.concatenate(weights) if weights else None,
        faults=np.concatenate(faults) if faults else None,
    )
    return joined.take(np.arange(len(joined)))
