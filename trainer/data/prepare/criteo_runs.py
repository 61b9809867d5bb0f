"""Parsed rows on disk between reading and writing: runs whose rows lie bucket by bucket.

Shuffling more rows than memory holds takes two steps. Each run of input rows is scattered over
buckets at random and written; later each bucket is gathered from all runs and shuffled by itself.
A run is a numpy file of shape [41, n], 4 bytes a cell: label, 13 float32, 26 raw ids and one word
whose bit c says that id c was not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.data.prepare.criteo_format import MISSING, RawClicks
from trainer.data.prepare.criteo_teacher import NUM_CATEGORICAL, NUM_DENSE
from trainer.data.ragged import IntArray, offsets_of

Cells = NDArray[np.uint32]
_FIRST_ID = 1 + NUM_DENSE
_MISSING_BITS = _FIRST_ID + NUM_CATEGORICAL
_NUM_CELLS = _MISSING_BITS + 1


@dataclass(frozen=True)
class Buckets:
    """Where rows go: of the first `num_training` lines to random buckets, of later ones in order.

    Training buckets come first. A run's draws depend on `seed` and the run's number alone.
    """

    num_training: int
    num_validation: int
    training_buckets: int
    validation_buckets: int
    seed: int

    @property
    def total(self) -> int:
        """Number of buckets."""
        return self.training_buckets + self.validation_buckets

    def place(self, run: int, line: IntArray) -> IntArray:
        """Bucket [n] of the rows of a run, whose lines are `line` [n], counted over all files."""
        drawn = np.random.default_rng([self.seed, 0, run]).integers(
            0, self.training_buckets, len(line)
        )
        later = (line - self.num_training) * self.validation_buckets // self.num_validation
        return np.where(line < self.num_training, drawn, self.training_buckets + later)


def pack(clicks: RawClicks, dense: NDArray[np.float32]) -> Cells:
    """Rows as cells [41, n]; `dense` [n, 13] are the transformed counts."""
    cells = np.empty((_NUM_CELLS, len(clicks)), dtype=np.uint32)
    cells[0] = clicks.label
    cells[1:_FIRST_ID] = np.ascontiguousarray(dense.T, dtype=np.float32).view(np.uint32)
    missing = clicks.ids.T == MISSING
    cells[_FIRST_ID:_MISSING_BITS] = np.where(missing, 0, clicks.ids.T)
    bits = np.left_shift(missing, np.arange(NUM_CATEGORICAL)[:, None]).sum(0)
    cells[_MISSING_BITS] = bits
    return cells


def labels_of(cells: Cells) -> NDArray[np.float32]:
    """Labels [n]."""
    return cells[0].astype(np.float32)


def dense_of(cells: Cells, column: int) -> NDArray[np.float32]:
    """Values [n] of a dense column, numbered from 0."""
    return cells[1 + column].view(np.float32)


def ids_of(cells: Cells, column: int) -> IntArray:
    """Raw ids [n] of a categorical column, numbered from 0; `MISSING` where not given."""
    is_missing = (cells[_MISSING_BITS] >> np.uint32(column)) & 1
    return np.where(is_missing, MISSING, cells[_FIRST_ID + column].astype(np.int64))


def write_run(path: Path, cells: Cells, bucket: IntArray, num_buckets: int) -> list[int]:
    """Write `cells` in order of their bucket; gives the buckets' offsets [num_buckets + 1]."""
    order = np.argsort(bucket, kind="stable")
    with path.open("wb") as file:
        np.save(file, cells[:, order])
    return offsets_of(np.bincount(bucket, minlength=num_buckets)).tolist()


@dataclass(frozen=True)
class Runs:
    """All runs of a preparation, in input order; cells are read from disk as they are asked for.

    `offsets` [runs, buckets + 1] are those that `write_run` gave.
    """

    paths: Sequence[Path]
    offsets: IntArray

    def ids(self, column: int, num_buckets: int) -> Iterator[IntArray]:
        """Raw ids of a column, run by run, of the rows in the first `num_buckets` buckets."""
        for path, end in zip(self.paths, self.offsets[:, num_buckets], strict=True):
            yield ids_of(np.load(path, mmap_mode="r")[:, :end], column)

    def bucket(self, number: int) -> Cells:
        """All rows of a bucket, in input order."""
        bounds = self.offsets[:, number : number + 2]
        parts = [
            np.load(path, mmap_mode="r")[:, start:end]
            for path, (start, end) in zip(self.paths, bounds, strict=True)
        ]
        return np.concatenate(parts, axis=1)
