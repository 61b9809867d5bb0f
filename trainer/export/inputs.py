"""Rows to score, from dicts or an Arrow table to the arrays that the program takes.

What decodes training data decodes these rows, so that both mean the same. Labels are not asked
for; what a label was normalised by is, because predictions are given in the label's own unit.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.data.columns import InputColumn, RowLayout, check_schema, layout_of
from trainer.data.decode import decode
from trainer.data.errors import BadValueError
from trainer.data.rows import Rows, concat_rows
from trainer.export.errors import BadRow
from trainer.export.values import array_of
from trainer.spec import JobSpec

PAD_ROWS = 2
"""Rows with one id 0 in each feature behind those to score: no size is ever 0 or 1."""

_LABEL = InputColumn("label", "__label__")
_REQUEST = Path("request")


def scoring_layout(spec: JobSpec, vocabularies: Path) -> RowLayout:
    """The columns to read of rows without labels; `vocabularies` is the export's folder of them.

    Raises a `DataError` where one is missing.
    """
    there = spec.data.model_copy(update={"path": str(vocabularies)})
    layout = layout_of(spec.model_copy(update={"data": there}))
    labels = tuple(replace(each, value=_LABEL, is_binary=False) for each in layout.labels)
    return replace(layout, labels=labels, row_weight=None)


def input_columns(layout: RowLayout) -> dict[str, InputColumn]:
    """What a row to score has, by name, in order; columns that several features read once."""
    return {column.name: column for column in layout.columns if column is not _LABEL}


def rows_of_table(table: pa.Table, layout: RowLayout) -> Rows:
    """Decode a table of rows to score.

    Raises `BadRow` for the first cell that is wrong, and `ColumnError` for a type that is.
    """
    columns = input_columns(layout)
    if missing := [name for name in columns if name not in table.column_names]:
        raise BadRow(0, missing[0], f"there is no such column; needed are {', '.join(columns)}")
    check_schema(replace(layout, labels=()), table.schema, Path("the table"))
    labels = pa.array(np.zeros(len(table), np.float32))
    table = table.select(list(columns)).append_column(_LABEL.name, labels)
    try:
        return decode(table, layout, lambda row: (_REQUEST, row))
    except BadValueError as error:
        is_missing = error.value is None
        problem = "is missing or null" if is_missing else str(error).split(": ", 1)[-1]
        raise BadRow(int(error.place.rpartition(" ")[2]), error.column, problem) from error


def table_of_dicts(
    rows: Sequence[Mapping[str, Any]], layout: RowLayout, kinds: Mapping[str, str] | None = None
) -> pa.Table:
    """Rows as an Arrow table; a list that is missing or null is an empty one.

    `kinds` says which columns of raw values were of strings, integers or numbers in training:
    what is hashed must be of the same type again. Raises `BadRow` for a column that nobody reads,
    one that is missing, or a value of the wrong kind.
    """
    columns = input_columns(layout)
    for index, row in enumerate(rows):
        if unknown := row.keys() - columns.keys():
            raise BadRow(index, min(unknown), f"is no input; inputs are {', '.join(columns)}")
    known = kinds or {}
    return pa.table({name: _array(rows, c, known.get(name)) for name, c in columns.items()})


def _array(rows: Sequence[Mapping[str, Any]], column: InputColumn, kind: str | None) -> pa.Array:
    values = [_value(row, column) for row in rows]
    types = _types(column, kind)
    for each in types:
        if (array := _converted(values, each)) is not None:
            return array
    index = _first_misfit(values, types)
    problem = f"{values[index]!r} is not {wanted_kind(column, kind)}"
    raise BadRow(index, column.name, problem)


def _first_misfit(values: list[Any], types: list[pa.DataType]) -> int:
    """Index of the first value that is not like those before it, or fits nowhere.

    No longer prefix of the values fits where one does not.
    """

    def fits(num_values: int) -> bool:
        return any(_converted(values[:num_values], each) is not None for each in types)

    return bisect.bisect_left(range(1, len(values)), True, key=lambda num: not fits(num))


def _value(row: Mapping[str, Any], column: InputColumn) -> Any:
    value = row.get(column.name)
    return [] if value is None and column.is_list else value


def _converted(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    """`values` as `kind`; None where they are of another kind, or not all of one."""
    try:
        # By what they are: asked for integers, Arrow would cut off the decimals.
        found = array_of(values)
        return _cast(found, kind) if _is_like(found.type, kind) else None
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if kind in _WIDER:
        array = array.cast(_WIDER[kind], safe=False)
    # Integers that a float rounds are no fault: training's were rounded, too.
    return array.cast(kind, safe=not _is_float(kind))


def _is_float(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind)


def _is_like(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(found):
        return True
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and _is_like(found.value_type, wanted.value_type)
    if pa.types.is_floating(wanted):
        return pa.types.is_integer(found) or pa.types.is_floating(found)
    if pa.types.is_integer(wanted):
        return pa.types.is_integer(found)
    return found == wanted


_RAW_TYPES = {
    "string": (pa.string(),),
    # Hashes of 64 bits need all of an uint64.
    "integer": (pa.int64(), pa.uint64()),
    "number": (pa.float64(),),
}
# A number of this kind falls into other buckets before it is rounded: float32(3.3) < 3.3.
FLOAT32 = "float32"
_KNOWN_TYPES = _RAW_TYPES | {FLOAT32: (pa.float32(),)}
_WIDER = {pa.float32(): pa.float64(), pa.list_(pa.float32()): pa.list_(pa.float64())}


def _types(column: InputColumn, kind: str | None) -> list[pa.DataType]:
    """Arrow types that a column may have, the first that fits counts."""
    if column.encoder is None:
        items = [pa.int64() if column.num_ids else pa.float64()]
    elif kind in _KNOWN_TYPES:
        items = [*_KNOWN_TYPES[kind]]
    else:
        known = chain.from_iterable(_RAW_TYPES.values())
        items = [each for each in known if column.encoder.accepts(each)]
    return [pa.list_(item) for item in items] if column.is_list else items


def raw_kind(found: pa.DataType) -> str:
    """Which of the kinds of `table_of_dicts` a column of training data has."""
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        found = found.value_type
    if pa.types.is_integer(found):
        return "integer"
    if pa.types.is_float32(found):
        return FLOAT32
    return "number" if pa.types.is_floating(found) else "string"


def wanted_kind(column: InputColumn, kind: str | None = None) -> str:
    """What a value of `column` is, in words."""
    if column.encoder is not None:
        kind = "number" if kind == FLOAT32 else kind
        article = "an" if kind == "integer" else "a"
        item = f"{article} {kind}" if kind else column.encoder.wanted
        return f"a list, each {item}" if column.is_list else item
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
