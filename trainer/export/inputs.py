"""Rows to score, from dicts or an Arrow table to the arrays that the program takes.

What decodes training data decodes these rows, so that both mean the same. Labels are not asked
for; what a label was normalised by is, because predictions are given in the label's own unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.columns import InputColumn, RowLayout, layout_of
from trainer.data.decode import decode
from trainer.data.errors import BadValueError
from trainer.data.rows import Rows, concat_rows
from trainer.export.errors import BadRow
from trainer.spec import JobSpec

PAD_ROWS = 2
"""Rows with one id 0 in each feature behind those to score: no size is ever 0 or 1."""

_LABEL = InputColumn("label", "__label__")
_REQUEST = Path("request")


def scoring_layout(spec: JobSpec) -> RowLayout:
    """The columns to read of rows without labels."""
    layout = layout_of(spec)
    labels = tuple(replace(each, value=_LABEL, is_binary=False) for each in layout.labels)
    return replace(layout, labels=labels, row_weight=None)


def input_columns(layout: RowLayout) -> dict[str, InputColumn]:
    """What a row to score has, by name, in order; columns that several features read once."""
    return {column.name: column for column in layout.columns if column is not _LABEL}


def rows_of_table(table: pa.Table, layout: RowLayout) -> Rows:
    """Decode a table of rows to score; raises `BadRow` for the first cell that is wrong."""
    columns = input_columns(layout)
    if missing := [name for name in columns if name not in table.column_names]:
        raise BadRow(0, missing[0], f"there is no such column; needed are {', '.join(columns)}")
    labels = pa.array(np.zeros(len(table), np.float32))
    table = table.select(list(columns)).append_column(_LABEL.name, labels)
    try:
        return decode(table, layout, lambda row: (_REQUEST, row))
    except BadValueError as error:
        is_missing = error.value is None
        problem = "is missing or null" if is_missing else str(error).split(": ", 1)[-1]
        raise BadRow(int(error.place.rpartition(" ")[2]), error.column, problem) from error


def table_of_dicts(rows: Sequence[Mapping[str, Any]], layout: RowLayout) -> pa.Table:
    """Rows as an Arrow table; a list that is missing or null is an empty one.

    Raises `BadRow` for a column that nobody reads, one that is missing, or a value of the wrong
    kind.
    """
    columns = input_columns(layout)
    for index, row in enumerate(rows):
        if unknown := row.keys() - columns.keys():
            raise BadRow(index, min(unknown), f"is no input; inputs are {', '.join(columns)}")
    return pa.table({name: _array(rows, column) for name, column in columns.items()})


def _array(rows: Sequence[Mapping[str, Any]], column: InputColumn) -> pa.Array:
    values = [_value(row, column) for row in rows]
    try:
        return pa.array(values, _type(column))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        index = next(i for i, value in enumerate(values) if not _fits(value, column))
        raise BadRow(
            index, column.name, f"{values[index]!r} is not {wanted_kind(column)}"
        ) from None


def _value(row: Mapping[str, Any], column: InputColumn) -> Any:
    value = row.get(column.name)
    return [] if value is None and column.is_list else value


def _fits(value: Any, column: InputColumn) -> bool:
    try:
        pa.array([value], _type(column))
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _type(column: InputColumn) -> pa.DataType:
    item = pa.int64() if column.num_ids else pa.float64()
    return pa.list_(item) if column.is_list else item


def wanted_kind(column: InputColumn) -> str:
    """What a value of `column` is, in words."""
    if column.num_ids:
        return "a list of integers" if column.is_list else "an integer"
    return "a list of numbers" if column.is_list else "a number"


def program_arrays(rows: Rows, spec: JobSpec) -> Iterator[NDArray[Any]]:
    """`rows` and `PAD_ROWS` more as the program takes them (`trainer.export.program`)."""
    packed = concat_rows([rows, _padding(rows)])
    num_pooled = len(spec.pooled_features)
    yield packed.dense
    cut = int(packed.lengths[:num_pooled].sum())
    if num_pooled:
        yield packed.ids[:cut]
        yield packed.lengths[:num_pooled].ravel().astype(np.int32)
        if spec.is_weighted:
            yield _weights(packed)[:cut]
    if spec.sequence_features:
        yield packed.ids[cut:]
        yield packed.lengths[num_pooled:].ravel().astype(np.int32)
        if spec.has_weighted_sequences:
            yield _weights(packed)[cut:]


def _weights(packed: Rows) -> NDArray[np.float32]:
    assert packed.weights is not None, "a layout with weights decodes them"
    return packed.weights


def _padding(rows: Rows) -> Rows:
    num_features, num_dense = len(rows.lengths), rows.dense.shape[1]
    num_ids, num_tasks = num_features * PAD_ROWS, rows.label.shape[1]
    return Rows(
        dense=np.zeros((PAD_ROWS, num_dense), np.float32),
        label=np.zeros((PAD_ROWS, num_tasks), np.float32),
        offset=np.zeros((PAD_ROWS, num_tasks), np.float32),
        scale=np.ones((PAD_ROWS, num_tasks), np.float32),
        row_weight=np.zeros(PAD_ROWS, np.float32),
        ids=np.zeros(num_ids, np.int64),
        starts=np.arange(num_ids).reshape(num_features, PAD_ROWS),
        lengths=np.ones((num_features, PAD_ROWS), np.int64),
        weights=None if rows.weights is None else np.ones(num_ids, np.float32),
    )
