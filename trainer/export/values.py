"""Python values of a request as Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def array_of(values: Sequence[Any]) -> pa.Array:
    """Values, or lists of them, in the type that they are of: uint64 where int64 is too small.

    Raises `pa.ArrowException`, TypeError, ValueError or OverflowError where they are of several
    kinds, or beyond 64 bits.
    """
    try:
        return pa.array(values)
    except (OverflowError, pa.ArrowInvalid):
        # Arrow never infers uint64; asked for it, it would cut decimals off.
        if not all(type(item) is int for item in _items(values)):
            raise
    is_list = any(isinstance(value, list) for value in values)
    return pa.array(values, pa.list_(pa.uint64()) if is_list else pa.uint64())


def _items(values: Sequence[Any]) -> list[Any]:
    """What is there of values and of lists of them."""
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [item for items in lists for item in items if item is not None]
