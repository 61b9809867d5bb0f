"""Arrow tables decoded into numpy rows, every value checked once on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.columns import InputColumn, LabelColumns, RowLayout
from trainer.data.errors import BadValueError
from trainer.data.ragged import IntArray, last_items, offsets_of
from trainer.data.rows import FloatArray, Rows

Locate = Callable[[int], tuple[Path, int]]

_BINARY_WANTED = (
    "0 or 1 (data.label, after its offset and scale), as loss 'bce' needs; "
    "mend the column or use loss 'mse'"
)


def decode(table: pa.Table, layout: RowLayout, locate: Locate) -> Rows:
    """Decode and check a table; `locate` tells file and row of a row of this table.

    Raises `BadValueError` for nulls, ids out of range, NaN or infinite numbers, a scale that is
    not above 0, a row's weight below 0, a list of weights that is not as long as its ids, or a
    label other than 0 and 1 where the loss is `bce`.
    """
    columns = _Columns(table, locate)
    labels = [_label(columns, label, len(table)) for label in layout.labels]
    label, offset, scale = (np.stack(parts, axis=1) for parts in zip(*labels, strict=True))
    dense = np.empty((len(table), len(layout.dense)), dtype=np.float32)
    for index, column in enumerate(layout.dense):
        dense[:, index] = columns.numbers(column)
    row_weight = _row_weight(columns, layout, len(table))
    return Rows(dense, label, offset, scale, row_weight, *_sparse(columns, layout))


def _label(
    columns: _Columns, label: LabelColumns, num_rows: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """One task's label (normalised), offset and scale, each [n]."""
    offset = columns.numbers(label.offset) if label.offset else np.zeros(num_rows, np.float32)
    scale = columns.numbers(label.scale) if label.scale else np.ones(num_rows, np.float32)
    if label.scale:
        columns.refuse(scale <= 0, scale, label.scale, "a scale above 0")
    values = (columns.numbers(label.value) - offset) / scale
    if label.is_binary:
        columns.refuse((values != 0) & (values != 1), values, label.value, _BINARY_WANTED)
    return values, offset, scale


def _row_weight(columns: _Columns, layout: RowLayout, num_rows: int) -> FloatArray:
    """How much each row counts [n]."""
    if layout.row_weight is None:
        return np.ones(num_rows, np.float32)
    weight = columns.numbers(layout.row_weight)
    columns.refuse(weight < 0, weight, layout.row_weight, "a weight of 0 or above")
    return weight


def _sparse(
    columns: _Columns, layout: RowLayout
) -> tuple[IntArray, IntArray, IntArray, FloatArray | None]:
    """Flat ids, starts and lengths [F, n], and weights of the ids of all sparse columns.

    A sequence's lists are cut by where they start; ids before that stay in place unread.
    """
    lists = [columns.ids(column) for column in layout.sparse]
    bases = offsets_of(np.array([len(ids) for ids, _ in lists]))
    places = [
        last_items(offsets, column.max_length)
        for column, (_, offsets) in zip(layout.sparse, lists, strict=True)
    ]
    weights = [
        columns.weights(column, offsets)
        for column, (_, offsets) in zip(layout.sparse, lists, strict=True)
        if layout.weights
    ]
    return (
        np.concatenate([ids for ids, _ in lists]),
        np.stack([starts + base for (starts, _), base in zip(places, bases, strict=False)]),
        np.stack([lengths for _, lengths in places]),
        np.concatenate(weights) if weights else None,
    )


class _Columns:
    """Columns of one table as numpy, each checked on the way."""

    def __init__(self, table: pa.Table, locate: Locate) -> None:
        self._table = table
        self._locate = locate

    def refuse(
        self, is_bad: NDArray[np.bool_], values: NDArray, column: InputColumn, wanted: str
    ) -> None:
        """Raise `BadValueError` for the first row marked as bad, if any."""
        if is_bad.any():
            row = int(is_bad.argmax())
            raise self._fault(row, column, values[row].item(), wanted)

    def numbers(self, column: InputColumn) -> FloatArray:
        """A dense column as float32, without null, NaN or infinity."""
        values = self._array(column).cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
        self.refuse(~np.isfinite(values), values, column, "a finite number")
        return values

    def ids(self, column: InputColumn) -> tuple[IntArray, IntArray]:
        """Flat ids and offsets [n + 1] of an id or id list column, every id within its table."""
        items, offsets = self._items(column, "an id")
        ids = items.cast(pa.int64(), safe=False).to_numpy()
        # One pass for both bounds: a negative id is huge when read as unsigned.
        is_bad = ids.view(np.uint64) >= np.uint64(column.num_ids)
        wanted = f"an id of the table ({column.field}): 0 to {column.num_ids - 1}"
        self._refuse_item(is_bad, ids, offsets, column, wanted)
        return ids, offsets

    def weights(self, column: InputColumn, id_offsets: IntArray) -> FloatArray:
        """A finite weight for each id of `column`, whose lists lie at `id_offsets`; else 1."""
        source = column.weights
        if source is None:
            return np.ones(int(id_offsets[-1]), np.float32)
        items, offsets = self._items(source, f"a weight ({source.field})")
        found, wanted = np.diff(offsets), np.diff(id_offsets)
        if (is_bad := found != wanted).any():
            row = int(is_bad.argmax())
            reason = (
                f"the length of column '{column.name}', whose ids it weighs: {wanted[row]} "
                f"({source.field})"
            )
            raise self._fault(row, source, found[row].item(), reason)
        weights = items.cast(pa.float32(), safe=False).to_numpy()
        is_bad = ~np.isfinite(weights)
        self._refuse_item(is_bad, weights, offsets, source, f"a finite weight ({source.field})")
        return weights

    def _items(self, column: InputColumn, wanted: str) -> tuple[pa.Array, IntArray]:
        """Flat items, none of them null, and offsets [n + 1]; a scalar is a list of one."""
        array = self._array(column)
        if column.is_list:
            offsets = array.offsets.to_numpy().astype(np.int64)
            items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            offsets = offsets - offsets[0]
        else:
            items, offsets = array, np.arange(len(array) + 1, dtype=np.int64)
        if items.null_count:
            position = pc.index(items.is_null(), True).as_py()
            raise self._fault(_owner(offsets, position), column, None, wanted)
        return items, offsets

    def _refuse_item(
        self,
        is_bad: NDArray[np.bool_],
        items: NDArray,
        offsets: IntArray,
        column: InputColumn,
        wanted: str,
    ) -> None:
        if is_bad.any():
            position = int(is_bad.argmax())
            raise self._fault(_owner(offsets, position), column, items[position].item(), wanted)

    def _array(self, column: InputColumn) -> pa.Array:
        array = self._table.column(column.name).combine_chunks()
        if array.null_count:
            row = pc.index(array.is_null(), True).as_py()
            raise self._fault(row, column, None, "a value")
        return array

    def _fault(self, row: int, column: InputColumn, value: object, wanted: str) -> BadValueError:
        path, row_in_file = self._locate(row)
        return BadValueError(path, f"row {row_in_file}", column.name, value, wanted)


def _owner(offsets: IntArray, position: int) -> int:
    return int(np.searchsorted(offsets, position, side="right")) - 1
