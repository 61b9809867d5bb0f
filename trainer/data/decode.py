"""Which columns of the data are which inputs of the model, and whether their types fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.quarantine import FaultMarks
from trainer.data.ragged import IntArray, offsets_of, ragged_positions
from trainer.data.rows import FloatArray, IdLists, Rows, SparseIds, concat_lists
from trainer.data.transforms import IdEncoder, dense_values, encoder_of, is_text
from trainer.errors import BadValueError, ColumnError, missing_column
from trainer.spec.data import FeatureSpec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import check_size
from trainer.storage import Location


@dataclass(frozen=True)
class InputColumn:
    """A column and the spec field that names it.

    `num_ids` says how many ids there may be (0: the column holds numbers, not ids), and `encoder`
    makes them where the column holds raw values. Of a sequence only the last `max_length` ids
    count; `weights` is the column of the ids' weights, if any. `dense` says how numbers change.
    """

    field: str
    name: str
    is_list: bool = False
    num_ids: int = 0
    max_length: int | None = None
    weights: InputColumn | None = None
    encoder: IdEncoder | None = None
    dense: FeatureSpec | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether a number takes the place of null and NaN."""
        return self.dense is not None and self.dense.missing is not None

    @property
    def mend(self) -> str:
        """What to change for a value that training refuses."""
        feature = self.field.removesuffix(".column")
        if self.dense is not None and not self.is_replaced:
            mend = f"set {feature}.missing, which replaces null and NaN"
        elif self.num_ids:
            mend = f"give {feature} hashing or a vocabulary, or its table more num_embeddings"
        else:
            mend = "mend it"
        return f"{mend}, or leave such rows out by data.on_bad_rows: quarantine"


@dataclass(frozen=True)
class LabelColumns:
    """A task's label; `offset` and `scale` are None where it is used as it is.

    `is_binary` says that every label, as the model learns it, must be 0 or 1.
    """

    value: InputColumn
    offset: InputColumn | None
    scale: InputColumn | None
    is_binary: bool


@dataclass(frozen=True)
class RowLayout:
    """Columns that a job reads: `labels` has one entry for each task, `row_weight` may be None.

    `sparse` are those of ids, in the order in which they are packed: pooled ones, then sequences.
    """

    dense: tuple[InputColumn, ...]
    sparse: tuple[InputColumn, ...]
    labels: tuple[LabelColumns, ...]
    row_weight: InputColumn | None

    @property
    def columns(self) -> tuple[InputColumn, ...]:
        """All of them, one for each use."""
        weights = [column.weights for column in self.sparse]
        labels = [c for label in self.labels for c in (label.value, label.offset, label.scale)]
        found = (*self.dense, *self.sparse, *weights, *labels, self.row_weight)
        return tuple(column for column in found if column is not None)


def layout_of(spec: JobSpec) -> RowLayout:
    """Columns that a spec reads; its tables must have been through `size_tables`.

    Raises a `DataError` for a vocabulary that cannot be read, or is larger than its table.
    """
    sizes = {table.name: table.num_ids for table in spec.embedding_tables}
    folder = Location.parse(spec.data.path)
    inputs = {
        feature.name: _sparse_column(feature, f"features[{index}]", sizes[feature.table], folder)
        if feature.table
        else InputColumn(f"features[{index}].column", feature.source_column, dense=feature)
        for index, feature in enumerate(spec.features)
    }
    return RowLayout(
        dense=tuple(inputs[feature.name] for feature in spec.dense_features),
        sparse=tuple(inputs[f.name] for f in (*spec.pooled_features, *spec.sequence_features)),
        labels=tuple(_label_columns(spec, index) for index in range(len(spec.model.tasks))),
        row_weight=_optional("data.weight_column", spec.data.weight_column),
    )


def _label_columns(spec: JobSpec, index: int) -> LabelColumns:
    task = spec.model.tasks[index]
    label = task.label or spec.data.label
    path = f"model.tasks[{index}].label" if task.label else "data.label"
    return LabelColumns(
        value=InputColumn(f"{path}.column", label.column),
        offset=_optional(f"{path}.offset_column", label.offset_column),
        scale=_optional(f"{path}.scale_column", label.scale_column),
        is_binary=task.is_binary,
    )


def _sparse_column(
    feature: FeatureSpec, path: str, num_ids: int | None, folder: Location
) -> InputColumn:
    assert num_ids is not None, "tables are sized before rows are read"
    encoder = encoder_of(feature, num_ids, folder)
    if encoder is not None:
        # A vocabulary may have been written anew since, and that of an export is a file of its own.
        check_size(feature, path, encoder.num_ids, num_ids)
    weights = feature.weights_column
    return InputColumn(
        field=f"{path}.column",
        name=feature.source_column,
        is_list=feature.type in ("id_list", "tokens", "sequence"),
        num_ids=num_ids,
        max_length=feature.length_limit if feature.is_sequence else None,
        weights=InputColumn(f"{path}.weights_column", weights, is_list=True) if weights else None,
        encoder=encoder,
    )


def _optional(field: str, name: str | None) -> InputColumn | None:
    return None if name is None else InputColumn(field, name)


def check_schema(layout: RowLayout, schema: pa.Schema, folder: Location | str) -> None:
    """Check that every column exists with a fitting type; raises `ColumnError` naming the field."""
    for column in layout.columns:
        if column.name not in schema.names:
            raise ColumnError(
                f"{column.field}: {missing_column(folder, column.name, schema.names)}"
            )
        if schema.names.count(column.name) > 1:
            raise ColumnError(
                f"{column.field}: {folder} has several columns '{column.name}'; rename all but one"
            )
        found = schema.field(column.name).type
        wanted, fits = _type_rule(column, found)
        if not fits:
            raise ColumnError(
                f"{column.field}: column '{column.name}' in {folder} is {found}, not {wanted}; "
                f"{_type_mend(column, found)}"
            )


# A number of this kind falls into other buckets before it is rounded: float32(3.3) < 3.3.
FLOAT32 = "float32"


def raw_kind(found: pa.DataType) -> str:
    """What a column of raw values holds: `string`, `integer`, `number` or `float32`."""
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        found = found.value_type
    if pa.types.is_integer(found):
        return "integer"
    if pa.types.is_float32(found):
        return FLOAT32
    return "number" if pa.types.is_floating(found) else "string"


def check_kinds(
    layout: RowLayout, schema: pa.Schema, folder: Location | str, kinds: Mapping[str, str | None]
) -> None:
    """Check that text and numbers to make ids of are text and numbers in training, too.

    A hash gives "1" another id than 1. `kinds` are those of training by column (`raw_kind`), as far
    as they are known. Raises `ColumnError` naming the field.
    """
    for column in layout.sparse:
        kind, found = kinds.get(column.name), schema.field(column.name).type
        if column.encoder is None or kind is None:
            continue
        if (raw_kind(found) == "string") != (kind == "string"):
            raise ColumnError(
                f"{column.field}: column '{column.name}' in {folder} is {found}, but in the "
                f"training data it holds {'text' if kind == 'string' else 'numbers'}, of which "
                "other ids are made; store it as it is there"
            )


def _type_rule(column: InputColumn, found: pa.DataType) -> tuple[str, bool]:
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if column.encoder is not None and column.is_list:
        wanted = f"a list of values, each {column.encoder.wanted}"
        return wanted, is_list and column.encoder.accepts(found.value_type)
    if column.encoder is not None:
        return column.encoder.wanted, column.encoder.accepts(found)
    if column.is_list and column.num_ids:
        return "a list of integers", is_list and pa.types.is_integer(found.value_type)
    if column.is_list:
        return "a list of floats", is_list and pa.types.is_floating(found.value_type)
    if column.num_ids:
        return "an integer", pa.types.is_integer(found)
    return "a number", pa.types.is_floating(found) or pa.types.is_integer(found)


def _type_mend(column: InputColumn, found: pa.DataType) -> str:
    """What to change for a column whose type does not fit."""
    feature = column.field.removesuffix(".column")
    is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
    if column.num_ids and column.is_list != is_list:
        return f"set {feature}.type to {'id_list or sequence' if is_list else 'id'}"
    items = found.value_type if is_list else found
    if column.num_ids and column.encoder is None and is_text(items):
        return f"give {feature} hashing or a vocabulary, which make ids of text"
    if column.dense is not None and is_text(found):
        return "store numbers, or make it a feature of type id with hashing or a vocabulary"
    is_input = column.num_ids or column.dense is not None or column.is_list
    return "store it as such" if is_input else "store numbers, for two classes 0 and 1"


# Arrow tables decoded into numpy rows, every value checked once on the way.

Locate = Callable[[int], tuple[str, int]]
_BoolArray = NDArray[np.bool_]
# Ids of tables of up to this many rows are kept in 32 bits.
_NUM_NARROW_IDS = 2**31
_BINARY_WANTED = (
    "0 or 1 (data.label, after its offset and scale), as loss 'bce' needs and 'mse' does not"
)


def decode(
    table: pa.Table, layout: RowLayout, locate: Locate, marks: FaultMarks | None = None
) -> Rows:
    """Decode and check a table; `locate` tells file and row of a row of this table.

    Bad are nulls (but a list that is null is empty), ids out of range, NaN or infinite numbers, a
    scale that is not above 0, a row's weight below 0, a list of weights that is not as long as its
    ids, and a label other than 0 and 1 where the loss is `bce`. The first raises `BadValueError`;
    with `marks` such rows are marked there, weigh nothing and hold harmless values.
    """
    found, lists, start = _undecoded(layout, len(table)), [], 0
    of_lists = [column for column in layout.sparse if column.is_list]
    # Part by part as they were read: joining a column's parts first would copy each value twice.
    for part in table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]:
        columns = _Columns(part, start, locate, marks)
        _fill(found.slice(start, start + len(part)), columns, layout)
        lists.append([_id_lists(columns, column) for column in of_lists])
        start += len(part)
    faults = None if marks is None else marks.faults
    if faults is not None:
        found.row_weight[faults > 0] = 0
    joined = tuple(concat_lists(parts) for parts in zip(*lists, strict=True))
    return replace(found, sparse=replace(found.sparse, lists=joined), faults=faults)


def _undecoded(layout: RowLayout, num_rows: int) -> Rows:
    """Memory for `num_rows` rows; lists of ids are still missing."""
    singles = [column for column in layout.sparse if not column.is_list]
    is_narrow = all(column.num_ids <= _NUM_NARROW_IDS for column in singles)
    labels = (num_rows, len(layout.labels))
    return Rows(
        dense=np.empty((num_rows, len(layout.dense)), np.float32),
        label=np.empty(labels, np.float32),
        offset=np.zeros(labels, np.float32),
        scale=np.ones(labels, np.float32),
        row_weight=np.ones(num_rows, np.float32),
        sparse=SparseIds(
            is_single=tuple(not column.is_list for column in layout.sparse),
            singles=np.empty((num_rows, len(singles)), np.int32 if is_narrow else np.int64),
            lists=(),
        ),
    )


def _fill(rows: Rows, columns: _Columns, layout: RowLayout) -> None:
    """Decode all but the lists of ids into `rows`."""
    for task, label in enumerate(layout.labels):
        _fill_label(rows, task, columns, label)
    for place, column in enumerate(layout.dense):
        rows.dense[:, place] = columns.numbers(column)
    if layout.row_weight is not None:
        weight = columns.numbers(layout.row_weight)
        wanted = "a weight of 0 or above"
        rows.row_weight[:] = columns.refuse(weight < 0, weight, layout.row_weight, wanted)
    singles = (column for column in layout.sparse if not column.is_list)
    for place, column in enumerate(singles):
        rows.sparse.singles[:, place], _ = columns.ids(column)


def _fill_label(rows: Rows, task: int, columns: _Columns, label: LabelColumns) -> None:
    """One task's label (normalised), offset and scale."""
    values = columns.numbers(label.value, is_wide=label.offset is not None)
    with np.errstate(over="ignore"):
        if label.offset:
            offset = columns.numbers(label.offset, is_wide=True)
            rows.offset[:, task] = offset
            values = (values - offset).astype(np.float32)
        if label.scale:
            found = columns.numbers(label.scale)
            found = columns.refuse(found <= 0, found, label.scale, "a scale above 0", safe=1)
            rows.scale[:, task] = found
            values = values / found
    is_bad = ~np.isfinite(values)
    values = columns.refuse(is_bad, values, label.value, "finite after its offset and scale")
    if label.is_binary:
        is_bad = (values != 0) & (values != 1)
        values = columns.refuse(is_bad, values, label.value, _BINARY_WANTED)
    rows.label[:, task] = values


def _id_lists(columns: _Columns, column: InputColumn) -> IdLists:
    ids, offsets = columns.ids(column)
    assert offsets is not None, "lists have offsets"
    weights = columns.weights(column, offsets) if column.weights else None
    found = IdLists(ids, offsets, weights)
    return found if column.max_length is None else found.last(column.max_length)


@dataclass
class _Columns:
    """Columns of one part of a table as numpy, each checked on the way.

    What is bad raises, or its row is marked and a harmless value takes its place. The first row of
    `part` is number `start` of its table.
    """

    part: pa.RecordBatch
    start: int
    locate: Locate
    marks: FaultMarks | None

    def refuse(
        self,
        is_bad: _BoolArray,
        values: NDArray,
        column: InputColumn,
        wanted: str,
        *,
        safe: int = 0,
        offsets: IntArray | None = None,
    ) -> NDArray:
        """Values with `safe` in place of those marked as bad, if that does not raise.

        One for each row, or as many as lie between its `offsets` [n + 1].
        """
        if not is_bad.any():
            return values
        places = np.flatnonzero(is_bad)
        self._refuse(_owners(offsets, places), column, values[places[0]].item(), wanted)
        return np.where(is_bad, values.dtype.type(safe), values)

    def numbers(self, column: InputColumn, *, is_wide: bool = False) -> NDArray[np.floating]:
        """A column of numbers without null, NaN or infinity, as float32; float64 if `is_wide`."""
        array = self._array(column, may_be_null=column.is_replaced)
        values = dense_values(array, column.dense, is_wide=is_wide)
        with np.errstate(over="ignore"):  # too large for float32: refused below
            is_finite = np.isfinite(values.astype(np.float32, copy=False))
        return self.refuse(~is_finite, values, column, "a finite number")

    def ids(self, column: InputColumn) -> tuple[IntArray, IntArray | None]:
        """Flat ids, every one within its table, and offsets [n + 1] of lists; None for one each."""
        if column.encoder is not None:
            items, offsets = self._items(column, None)
            return column.encoder.encode(items), offsets
        items, offsets = self._items(column, "an id")
        if items.type != pa.int64():
            items = items.cast(pa.int64(), safe=False)
        ids = items.to_numpy()
        # One pass for both bounds: a negative id is huge when read as unsigned.
        unsigned = ids.view(np.uint64)
        if not len(ids) or unsigned.max() < column.num_ids:
            return ids, offsets
        is_bad = unsigned >= np.uint64(column.num_ids)
        wanted = f"an id of the table ({column.field}): 0 to {column.num_ids - 1}"
        return self.refuse(is_bad, ids, column, wanted, offsets=offsets), offsets

    def weights(self, column: InputColumn, id_offsets: IntArray) -> FloatArray:
        """A finite weight for each id of `column`, whose lists lie at `id_offsets`."""
        source = column.weights
        assert source is not None
        items, offsets = self._items(source, f"a weight ({source.field})")
        assert offsets is not None, "weights are lists"
        weights = items.cast(pa.float32(), safe=False).to_numpy()
        if (np.diff(offsets) != np.diff(id_offsets)).any():
            weights = self._weights_that_fit(column, weights, offsets, id_offsets)
            offsets = id_offsets
        wanted = f"a finite weight ({source.field})"
        return self.refuse(~np.isfinite(weights), weights, source, wanted, offsets=offsets)

    def _weights_that_fit(
        self, column: InputColumn, weights: FloatArray, offsets: IntArray, id_offsets: IntArray
    ) -> FloatArray:
        """Weights of the rows that have one for each id, and 1 for the ids of others."""
        source = column.weights
        assert source is not None
        found, wanted = np.diff(offsets), np.diff(id_offsets)
        rows = np.flatnonzero(found != wanted)
        reason = (
            f"the length of column '{column.name}', whose ids it weighs: {wanted[rows[0]]} "
            f"({source.field})"
        )
        self._refuse(rows, source, found[rows[0]].item(), reason, "as long as its ids")
        fitting = np.where(found == wanted, wanted, 0)
        filled = np.ones(int(id_offsets[-1]), np.float32)
        filled[ragged_positions(id_offsets[:-1], fitting)] = weights[
            ragged_positions(offsets[:-1], fitting)
        ]
        return filled

    def _items(self, column: InputColumn, wanted: str | None) -> tuple[pa.Array, IntArray | None]:
        """Flat items, and offsets [n + 1] of lists; None where each row has one.

        Null items are bad where something is `wanted`.
        """
        array = self._array(column, may_be_null=wanted is None and not column.is_list)
        items, offsets = array, None
        if column.is_list:
            offsets = array.offsets.to_numpy().astype(np.int64)
            items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            offsets = offsets - offsets[0]
        if items.null_count and wanted is not None:
            is_null = items.is_null().to_numpy(zero_copy_only=False)
            owners = _owners(offsets, np.flatnonzero(is_null))
            self._refuse(owners, column, None, wanted)
            items = items.fill_null(0)
        return items, offsets

    def _array(self, column: InputColumn, *, may_be_null: bool = False) -> pa.Array:
        """A whole column; null only where it may be. A list that is null is an empty one."""
        array = self.part.column(column.name)
        if not array.null_count or may_be_null:
            return array
        if column.is_list:
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
            offsets = pa.array(offsets_of(lengths.astype(np.int64)))
            return pa.LargeListArray.from_arrays(offsets, array.flatten())
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        self._refuse(np.flatnonzero(is_null), column, None, "a value")
        return array if column.encoder is not None else array.fill_null(0)

    def _refuse(
        self, rows: IntArray, column: InputColumn, value: object, wanted: str, short: str = ""
    ) -> None:
        """Mark `rows` as bad, or raise for the first of them, which holds `value`."""
        if self.marks is None:
            path, row_in_file = self.locate(self.start + int(rows[0]))
            place = f"row {row_in_file}"
            raise BadValueError(path, place, column.name, value, wanted, column.mend)
        self.marks.add(self.start + rows, f"column '{column.name}' is not {short or wanted}")


def _owners(offsets: IntArray | None, positions: IntArray) -> IntArray:
    """Rows that the items at `positions` are of."""
    if offsets is None:
        return positions
    return np.searchsorted(offsets, positions, side="right") - 1
