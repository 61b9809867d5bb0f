"""Ragged arrays in numpy: lists of varying length, kept as flat values and offsets into them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def offsets_of(lengths: IntArray) -> IntArray:
    """Start of each list, and the total at the end: shape [n + 1] for lengths of shape [n]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_positions(starts: IntArray, lengths: IntArray) -> IntArray:
    """Positions `starts[i] .. starts[i] + lengths[i] - 1` for every i, one after the other.

    Indexing flat values with the result gathers the lists in the order asked for.
    """
    offsets = offsets_of(lengths)
    shifts = starts - offsets[:-1]
    positions = np.repeat(shifts, lengths)
    positions += np.arange(len(positions), dtype=np.int64)
    return positions
