"""Which columns of the data are which inputs of the model, and whether their types fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from trainer.data.errors import ColumnError, DataError, TableTooSmallError
from trainer.data.transforms import DenseRule, IdEncoder, dense_rule_of, encoder_of
from trainer.spec import EmbeddingTableSpec, FeatureSpec, JobSpec

AS_IT_IS = DenseRule()


@dataclass(frozen=True)
class InputColumn:
    """A column and the spec field that names it.

    `num_ids` says how many ids there may be (0: the column holds numbers, not ids), and `encoder`
    makes them where the column holds raw values. Of a sequence only the last `max_length` ids
    count; `weights` is the column of the ids' weights, if any. `rule` is for dense features.
    """

    field: str
    name: str
    is_list: bool = False
    num_ids: int = 0
    max_length: int | None = None
    weights: InputColumn | None = None
    encoder: IdEncoder | None = None
    rule: DenseRule = AS_IT_IS


@dataclass(frozen=True)
class LabelColumns:
    """A task's label; `offset` and `scale` are None where it is used as it is.

    `is_binary` says that every label, as the model learns it, must be 0 or 1.
    """

    value: InputColumn
    offset: InputColumn | None
    scale: InputColumn | None
    is_binary: bool

    @property
    def columns(self) -> tuple[InputColumn, ...]:
        """Every column of the label."""
        return tuple(c for c in (self.value, self.offset, self.scale) if c is not None)


@dataclass(frozen=True)
class RowLayout:
    """Columns that a job reads: `labels` has one entry for each task, `row_weight` may be None."""

    dense: tuple[InputColumn, ...]
    pooled: tuple[InputColumn, ...]
    sequences: tuple[InputColumn, ...]
    labels: tuple[LabelColumns, ...]
    row_weight: InputColumn | None

    @property
    def sparse(self) -> tuple[InputColumn, ...]:
        """Columns of ids, in the order in which they are packed."""
        return self.pooled + self.sequences

    @property
    def weights(self) -> tuple[InputColumn, ...]:
        """Columns of weights."""
        return tuple(column.weights for column in self.sparse if column.weights)

    @property
    def columns(self) -> tuple[InputColumn, ...]:
        """Every column to read."""
        labels = [column for label in self.labels for column in label.columns]
        row_weight = [self.row_weight] if self.row_weight else []
        return (*self.dense, *self.sparse, *self.weights, *labels, *row_weight)


def layout_of(spec: JobSpec) -> RowLayout:
    """Columns that a spec reads; its tables must have been through `resolve_tables`.

    Raises a `DataError` for a vocabulary that cannot be read, or is larger than its table.
    """
    sizes = {table.name: _num_ids(table) for table in spec.embedding_tables}
    folder = Path(spec.data.path)
    inputs = {
        feature.name: _sparse_column(feature, f"features[{index}]", sizes[feature.table], folder)
        if feature.table
        else _dense_column(feature, f"features[{index}]")
        for index, feature in enumerate(spec.features)
    }
    return RowLayout(
        dense=tuple(inputs[feature.name] for feature in spec.dense_features),
        pooled=tuple(inputs[feature.name] for feature in spec.pooled_features),
        sequences=tuple(inputs[feature.name] for feature in spec.sequence_features),
        labels=tuple(_label_columns(spec, index) for index in range(len(spec.model.tasks))),
        row_weight=_optional("data.weight_column", spec.data.weight_column),
    )


def _label_columns(spec: JobSpec, index: int) -> LabelColumns:
    """Columns of the label of task number `index`."""
    task = spec.model.tasks[index]
    label, path = task.label or spec.data.label, "data.label"
    if task.label:
        path = f"model.tasks[{index}].label"
    return LabelColumns(
        value=InputColumn(f"{path}.column", label.column),
        offset=_optional(f"{path}.offset_column", label.offset_column),
        scale=_optional(f"{path}.scale_column", label.scale_column),
        is_binary=task.loss == "bce",
    )


def _num_ids(table: EmbeddingTableSpec) -> int:
    if table.num_ids is None:
        raise DataError(f"num_embeddings of table '{table.name}' is still 'auto'")
    return table.num_ids


def _dense_column(feature: FeatureSpec, path: str) -> InputColumn:
    return InputColumn(f"{path}.column", feature.source_column, rule=dense_rule_of(feature))


def _sparse_column(feature: FeatureSpec, path: str, num_ids: int, folder: Path) -> InputColumn:
    encoder = encoder_of(feature, num_ids, folder)
    if encoder is not None and encoder.num_ids > num_ids:
        raise TableTooSmallError(
            f"{path}: its vocabulary makes ids 0 to {encoder.num_ids - 1}, but table "
            f"'{feature.table}' has {num_ids} rows; raise num_embeddings, or use 'auto'"
        )
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
