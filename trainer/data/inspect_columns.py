"""What a column holds, found in one pass and bounded memory: nulls, range, cardinality, skew.

Up to `MAX_VALUES` distinct values are counted exactly. Beyond that a column keeps its most frequent
values and those whose hash falls into an ever smaller part (distinct sampling, Gibbons 2001): the
number of the latter, scaled up, estimates the cardinality within about half a percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

MAX_VALUES = 400_000
# Share of the most frequent values that `top_share` is about.
TOP_FRACTION = 0.01
_FEWEST_FOR_ZIPF = 10
_MAX_ZIPF_RANK = 1000
_COUNTS = pl.Schema({"value": pl.UInt64, "count": pl.Int64})


@dataclass(frozen=True)
class ListLengths:
    """Lengths of the lists of a column; nulls are not counted."""

    mean: float
    longest: int
    num_empty: int


@dataclass(frozen=True)
class ColumnReport:
    """One column. For lists all but `num_nulls` is about their items.

    `kind`: integer, number, text, or other; text that is all integers or numbers counts as such.
    `top_share` is the share of the values that the most frequent hundredth of the distinct ones
    make up; `zipf_exponent` is minus the slope of log count over log rank, None for few values.
    `is_estimate` marks `num_distinct` and both of these. NaN counts as null; infinite numbers are
    counted in `num_infinite` and left out of range, mean and deviation.
    """

    name: str
    kind: str
    num_rows: int
    num_nulls: int
    num_distinct: int
    is_estimate: bool
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None
    top_share: float | None
    zipf_exponent: float | None
    lists: ListLengths | None
    num_infinite: int = 0

    @property
    def is_binary(self) -> bool:
        """Whether it holds 0 and 1 and nothing else."""
        bounds = (self.minimum, self.maximum, self.num_distinct, self.num_nulls)
        return self.lists is None and bounds == (0, 1, 2, 0)


class ColumnSketch:
    """Gathers one column part by part."""

    def __init__(self, name: str, *, is_text: bool = False, max_values: int = MAX_VALUES) -> None:
        """`is_text` says that text is not to be taken for numbers even where all of it could be."""
        self._name = name
        self._max_values = max_values
        self._num_rows = self._num_nulls = self._num_items = self._num_infinite = 0
        self._lengths: tuple[int, int, int] | None = None  # lists, longest, empty
        # Sums of differences to the first number, which stay small, and of their squares.
        self._origin: float | None = None
        self._sum = self._sum_squares = 0.0
        self._bounds: tuple[float, float] | None = None
        # What every value so far was; a column is of the first kind that is left.
        self._kinds = ["text"] if is_text else ["integer", "number", "text"]
        self._counts = pl.DataFrame(schema=_COUNTS)
        self._level = 0

    def add(self, part: pl.Series) -> None:
        """Count the rows of a part of the column, the same type every time."""
        self._num_rows += len(part)
        self._num_nulls += part.null_count()
        values = part.drop_nulls()
        if isinstance(part.dtype, pl.List):
            values = self._unpack(values)
        if values.dtype.is_float():
            numbers = values.drop_nans()
            self._num_nulls += len(values) - len(numbers) if self._lengths is None else 0
            values = numbers
        self._num_items += len(values)
        self._add_numbers(values)
        self._add_counts(values)

    def report(self) -> ColumnReport:
        """What was found."""
        kind = self._kinds[0] if self._kinds else "other"
        is_number = kind in ("integer", "number") and self._bounds is not None
        counts = np.sort(self._counts["count"].to_numpy())[::-1]
        num_distinct = self._num_distinct()
        moments = self._moments()
        return ColumnReport(
            name=self._name,
            kind=kind,
            num_rows=self._num_rows,
            num_nulls=self._num_nulls,
            num_distinct=num_distinct,
            is_estimate=self._level > 0,
            minimum=self._bounds[0] if is_number and self._bounds else None,
            maximum=self._bounds[1] if is_number and self._bounds else None,
            mean=moments[0] if is_number else None,
            std=moments[1] if is_number else None,
            top_share=_top_share(counts, num_distinct, self._num_items),
            zipf_exponent=_zipf_exponent(counts),
            lists=self._list_lengths(),
            num_infinite=self._num_infinite if is_number else 0,
        )

    def _unpack(self, lists: pl.Series) -> pl.Series:
        lengths = lists.list.len()
        num_lists, longest, num_empty = self._lengths or (0, 0, 0)
        self._lengths = (
            num_lists + len(lists),
            max([longest, *lengths.top_k(1).to_list()]),
            num_empty + int((lengths == 0).sum()),
        )
        return lists.filter(lengths > 0).explode().drop_nulls()

    def _list_lengths(self) -> ListLengths | None:
        if self._lengths is None:
            return None
        num_lists, longest, num_empty = self._lengths
        return ListLengths(self._num_items / max(1, num_lists), longest, num_empty)

    def _add_numbers(self, values: pl.Series) -> None:
        if not len(values):
            return
        numbers = self._as_numbers(values)
        if numbers is None:
            return
        if "integer" in self._kinds and not _are_whole(numbers):
            self._kinds.remove("integer")
        if numbers.dtype.is_float():
            finite = numbers.filter(numbers.is_finite())
            self._num_infinite += len(numbers) - len(finite)
            numbers = finite
        if not len(numbers):
            return
        low, high = numbers.min(), numbers.max()
        known = self._bounds or (np.inf, -np.inf)
        self._bounds = (min(known[0], _plain(low)), max(known[1], _plain(high)))
        self._add_moments(numbers.cast(pl.Float64))

    def _add_moments(self, numbers: pl.Series) -> None:
        if self._origin is None:
            self._origin = float(numbers[0])
        differences = numbers - self._origin
        self._sum += float(differences.sum())
        self._sum_squares += float((differences * differences).sum())

    def _moments(self) -> tuple[float, float | None]:
        """Mean and standard deviation of all items; zeros where there are none."""
        num_finite = self._num_items - self._num_infinite
        if self._origin is None or not num_finite:
            return 0.0, 0.0
        shift = self._sum / num_finite
        variance = self._sum_squares / num_finite - shift * shift
        # Squares of numbers beyond 1e154 are too large to be added up.
        std = max(0.0, variance) ** 0.5 if math.isfinite(variance) else None
        return self._origin + shift, std

    def _as_numbers(self, values: pl.Series) -> pl.Series | None:
        """The values as numbers, or None where they are none; notes what they are instead."""
        if values.dtype.is_numeric():
            return values
        if values.dtype == pl.Boolean:
            return values.cast(pl.Int64)
        if values.dtype != pl.String:
            self._kinds = []
            return None
        if "number" not in self._kinds:
            return None
        for kind in (pl.Int64, pl.Float64):
            numbers = values.cast(kind, strict=False)
            if not numbers.null_count() and not (
                numbers.dtype.is_float() and numbers.is_nan().any()
            ):
                return numbers
        self._kinds = ["text"]
        return None

    def _add_counts(self, values: pl.Series) -> None:
        hashed = values.hash(seed=0).alias("value")
        fresh = hashed.value_counts(name="count").cast(_COUNTS)
        merged = pl.concat([self._counts, fresh]).group_by("value").agg(pl.col("count").sum())
        self._counts = self._pruned(merged)

    def _pruned(self, counts: pl.DataFrame) -> pl.DataFrame:
        """Keep the most frequent quarter and a sample, which is halved until all fits."""
        if len(counts) <= self._max_values:
            return counts
        counts = counts.sort(["count", "value"], descending=True).with_row_index("rank")
        while True:
            is_kept = self._is_sampled() | (pl.col("rank") < self._max_values // 4)
            counts = counts.filter(is_kept)
            if len(counts) <= self._max_values * 3 // 4:
                return counts.drop("rank")
            self._level += 1

    def _is_sampled(self) -> pl.Expr:
        return pl.col("value") % (1 << self._level) == 0

    def _num_distinct(self) -> int:
        return len(self._counts.filter(self._is_sampled())) << self._level


def _are_whole(numbers: pl.Series) -> bool:
    return numbers.dtype.is_integer()


def _plain(value: Any) -> float:
    return value if isinstance(value, int) else float(value)


def _top_share(counts: np.ndarray, num_distinct: int, num_values: int) -> float | None:
    if not num_values:
        return None
    num_top = max(1, int(num_distinct * TOP_FRACTION))
    return float(counts[:num_top].sum() / num_values)


def _zipf_exponent(counts: np.ndarray) -> float | None:
    """By least squares over the first ranks, evenly in their logarithm; `counts` descend."""
    if len(counts) < _FEWEST_FOR_ZIPF:
        return None
    last = min(len(counts), _MAX_ZIPF_RANK)
    ranks = np.unique(np.geomspace(1, last, 50).astype(np.int64))
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks - 1]), 1)[0]
    return abs(float(slope))
