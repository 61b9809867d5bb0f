"""Ragged arrays in numpy: lists of varying length, kept as flat values and offsets into them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def offsets_of(lengths: IntArray) -> IntArray:
    """Start of each list, and the total at the end: shape [n + 1] for lengths of shape [n]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def cut_at(rows: range, offsets: IntArray) -> list[tuple[int, slice]]:
    """Cut consecutive rows where parts begin, at `offsets`: (part, slice of the part's rows)."""
    first, last = np.searchsorted(offsets, [rows.start, rows.stop - 1], side="right") - 1
    bounds = offsets[first : last + 2].tolist()
    return [
        (part, slice(max(rows.start, start) - start, min(rows.stop, stop) - start))
        for part, (start, stop) in enumerate(pairwise(bounds), start=int(first))
    ]


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Positions `starts[i] .. starts[i] + lengths[i] - 1` for every i, one after the other.

    Indexing flat values with the result gathers the lists in the order asked for.
    """
    offsets = offsets_of(lengths)
    shifts = starts - offsets[:-1]
    positions = np.repeat(shifts, lengths)
    positions += np.arange(len(positions), dtype=np.int64)
    return positions
