"""Rows decoded from Parquet into numpy, checked once, and gathered by row without a Python loop.

`RowLayout` says which column is which input of the model; `decode` turns an Arrow table into
`Rows`; `Rows.take` picks rows in any order, all sparse features in one ragged gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.errors import BadValueError, ColumnError, DataError
from trainer.data.ragged import IntArray, offsets_of, ragged_positions
from trainer.spec import JobSpec

FloatArray = NDArray[np.float32]
Locate = Callable[[int], tuple[Path, int]]

_BINARY_WANTED = (
    "0 or 1 (data.label, after its offset and scale), as loss 'bce' needs; "
    "mend the column or use loss 'mse'"
)


@dataclass(frozen=True)
class InputColumn:
    """A column, the spec field that names it, and, where ids are read, how many there may be."""

    field: str
    name: str
    is_list: bool = False
    num_ids: int = 0


@dataclass(frozen=True)
class RowLayout:
    """Columns that a job reads. `offset` and `scale` are None where the label is used as it is.

    `is_binary` says that every label, as the model learns it, must be 0 or 1.
    """

    dense: tuple[InputColumn, ...]
    sparse: tuple[InputColumn, ...]
    label: InputColumn
    offset: InputColumn | None
    scale: InputColumn | None
    is_binary: bool

    @property
    def columns(self) -> tuple[InputColumn, ...]:
        """Every column to read."""
        label = [c for c in (self.label, self.offset, self.scale) if c is not None]
        return (*self.dense, *self.sparse, *label)


def layout_of(spec: JobSpec) -> RowLayout:
    """Columns that a spec reads; its tables must have been through `resolve_tables`."""
    sizes = {table.name: table.num_embeddings for table in spec.embedding_tables}
    if unresolved := [name for name, size in sizes.items() if size == "auto"]:
        raise DataError(f"num_embeddings of table '{unresolved[0]}' is still 'auto'")
    inputs = {
        feature.name: InputColumn(
            field=f"features[{index}].column",
            name=feature.source_column,
            is_list=feature.type in ("id_list", "tokens"),
            num_ids=int(sizes[feature.table]) if feature.table else 0,
        )
        for index, feature in enumerate(spec.features)
    }
    label = spec.data.label
    return RowLayout(
        dense=tuple(inputs[feature.name] for feature in spec.dense_features),
        sparse=tuple(inputs[feature.name] for feature in spec.sparse_features),
        label=InputColumn("data.label.column", label.column),
        offset=_optional("data.label.offset_column", label.offset_column),
        scale=_optional("data.label.scale_column", label.scale_column),
        is_binary=spec.model.task.loss == "bce",
    )


def _optional(field: str, name: str | None) -> InputColumn | None:
    return None if name is None else InputColumn(field, name)


def check_schema(layout: RowLayout, schema: pa.Schema, folder: Path) -> None:
    """Check that every column exists with a fitting type; raises `ColumnError` naming the field."""
    for column in layout.columns:
        if column.name not in schema.names:
            raise ColumnError(
                f"{column.field}: {folder} has no column '{column.name}'; it has "
                f"{', '.join(schema.names)}"
            )
        found = schema.field(column.name).type
        wanted, fits = _type_rule(column, found)
        if not fits:
            raise ColumnError(
                f"{column.field}: column '{column.name}' in {folder} is {found}, not {wanted}"
            )


def _type_rule(column: InputColumn, found: pa.DataType) -> tuple[str, bool]:
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if column.is_list:
        return "a list of integers", is_list and pa.types.is_integer(found.value_type)
    if column.num_ids:
        return "an integer", pa.types.is_integer(found)
    return "a number", pa.types.is_floating(found) or pa.types.is_integer(found)


@dataclass(frozen=True)
class Rows:
    """n decoded rows. F sparse features, D dense ones.

    dense [n, D], label (normalised), offset and scale [n]; `starts` and `lengths` [F, n] are the
    ranges of each feature and row in the flat `ids`.
    """

    dense: FloatArray
    label: FloatArray
    offset: FloatArray
    scale: FloatArray
    ids: IntArray
    starts: IntArray
    lengths: IntArray

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
            ids=self.ids[flat],
            starts=offsets_of(lengths.ravel())[:-1].reshape(lengths.shape),
            lengths=lengths,
        )


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, one after the other, packed feature by feature."""
    if len(parts) == 1:
        return parts[0]
    bases = offsets_of(np.array([len(part.ids) for part in parts]))
    joined = Rows(
        dense=np.concatenate([part.dense for part in parts]),
        label=np.concatenate([part.label for part in parts]),
        offset=np.concatenate([part.offset for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        starts=np.concatenate(
            [part.starts + base for part, base in zip(parts, bases, strict=False)], axis=1
        ),
        lengths=np.concatenate([part.lengths for part in parts], axis=1),
    )
    return joined.take(np.arange(len(joined)))


def decode(table: pa.Table, layout: RowLayout, locate: Locate) -> Rows:
    """Decode and check a table; `locate` tells file and row of a row of this table.

    Raises `BadValueError` for nulls, ids out of range, NaN or infinite numbers, a scale that is
    not above 0, or a label other than 0 and 1 where the loss is `bce`.
    """
    columns = _Columns(table, locate)
    num_rows = len(table)
    offset = columns.numbers(layout.offset) if layout.offset else np.zeros(num_rows, np.float32)
    scale = columns.numbers(layout.scale) if layout.scale else np.ones(num_rows, np.float32)
    if layout.scale:
        columns.refuse(scale <= 0, scale, layout.scale, "a scale above 0")
    label = (columns.numbers(layout.label) - offset) / scale
    if layout.is_binary:
        columns.refuse((label != 0) & (label != 1), label, layout.label, _BINARY_WANTED)
    dense = np.empty((num_rows, len(layout.dense)), dtype=np.float32)
    for index, column in enumerate(layout.dense):
        dense[:, index] = columns.numbers(column)
    lists = [columns.ids(column) for column in layout.sparse]
    bases = offsets_of(np.array([len(ids) for ids, _ in lists]))
    return Rows(
        dense=dense,
        label=label,
        offset=offset,
        scale=scale,
        ids=np.concatenate([ids for ids, _ in lists]),
        starts=np.stack(
            [offsets[:-1] + base for (_, offsets), base in zip(lists, bases, strict=False)]
        ),
        lengths=np.stack([np.diff(offsets) for _, offsets in lists]),
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
        array = self._array(column)
        if column.is_list:
            offsets = array.offsets.to_numpy().astype(np.int64)
            items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            offsets = offsets - offsets[0]
        else:
            items, offsets = array, np.arange(len(array) + 1, dtype=np.int64)
        if items.null_count:
            position = pc.index(items.is_null(), True).as_py()
            raise self._fault(_owner(offsets, position), column, None, "an id")
        ids = items.cast(pa.int64(), safe=False).to_numpy()
        # One pass for both bounds: a negative id is huge when read as unsigned.
        is_bad = ids.view(np.uint64) >= np.uint64(column.num_ids)
        if is_bad.any():
            position = int(is_bad.argmax())
            wanted = f"an id of the table ({column.field}): 0 to {column.num_ids - 1}"
            raise self._fault(_owner(offsets, position), column, ids[position].item(), wanted)
        return ids, offsets

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
