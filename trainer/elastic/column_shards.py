"""Row-wise moments of column-sharded tables: naming them in a checkpoint, and changing the columns.

Row-wise AdaGrad keeps one number a row, v, to which each step adds the mean of g^2 over the
*columns of the shard*. A table in C column shards thus has C moments a row. A checkpoint stores the
moments of each column range under a key of its own, and those of a whole row under the plain key,
as row-wise and table-wise sharded tables always had them.

Loaded into other columns, v becomes the mean over them, each column counting with the v of the
range that it was stored in. So moments of

- the same columns are loaded bitwise;
- several ranges loaded into their union are what the union would have had with the same gradients,
  because a mean of means weighted by width is the mean (up to one rounding);
- a range loaded into parts of it are the same for each part, the mean being all that is known.

Going from whole rows to columns and back is bitwise, too: the mean of equal numbers is formed in
fp64, where it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_SUFFIX = re.compile(r"\.columns_(\d+)_(\d+)$")


@dataclass(frozen=True, order=True)
class Columns:
    """A range of a table's columns, `stop` excluded."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    def num_shared(self, other: Columns) -> int:
        """Number of columns that are in both."""
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))


def moment_key(key: str, columns: Columns, whole: Columns) -> str:
    """Where a checkpoint keeps the moments of `columns`; `key` is that of whole rows."""
    return key if columns == whole else f"{key}.columns_{columns.start}_{columns.stop}"


def column_suffix(key: str) -> str:
    """The end of `key` that `moment_key` added; empty for moments of whole rows."""
    found = _SUFFIX.search(key)
    return found[0] if found else ""


def stored_columns(key: str, whole: Columns, stored_keys: Iterable[str]) -> list[Columns]:
    """The column ranges whose moments a checkpoint holds, in order; `key` is that of whole rows."""
    ranges = []
    for stored in stored_keys:
        if stored == key:
            ranges.append(whole)
        elif stored.startswith(key) and (found := _SUFFIX.fullmatch(stored, len(key))):
            ranges.append(Columns(int(found[1]), int(found[2])))
    return sorted(ranges)


def moments_of(wanted: Columns, stored: Mapping[Columns, torch.Tensor]) -> torch.Tensor:
    """Moments [rows] fp64 of the columns `wanted`, from the [rows] of each range that shares any.

    The ranges must cover `wanted` and not overlap.
    """
    terms = [values.double() * wanted.num_shared(columns) for columns, values in stored.items()]
    return torch.stack(terms).sum(0) / wanted.width
