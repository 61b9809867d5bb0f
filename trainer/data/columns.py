"""Which columns of the data are which inputs of the model, and whether their types fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from trainer.data.errors import ColumnError, DataError
from trainer.spec import FeatureSpec, JobSpec


@dataclass(frozen=True)
class InputColumn:
    """A column and the spec field that names it.

    `num_ids` says how many ids there may be (0: the column holds numbers, not ids); of a sequence
    only the last `max_length` ids count; `weights` is the column of the ids' weights, if any.
    """

    field: str
    name: str
    is_list: bool = False
    num_ids: int = 0
    max_length: int | None = None
    weights: InputColumn | None = None


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
    """Columns that a spec reads; its tables must have been through `resolve_tables`."""
    sizes = {table.name: table.num_ids for table in spec.embedding_tables}
    if unresolved := [name for name, size in sizes.items() if size is None]:
        raise DataError(f"num_embeddings of table '{unresolved[0]}' is still 'auto'")
    inputs = {
        feature.name: _input_column(
            feature, f"features[{index}]", sizes[feature.table] or 0 if feature.table else 0
        )
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


def _input_column(feature: FeatureSpec, path: str, num_ids: int) -> InputColumn:
    weights = feature.weights_column
    return InputColumn(
        field=f"{path}.column",
        name=feature.source_column,
        is_list=feature.type in ("id_list", "tokens", "sequence"),
        num_ids=num_ids,
        max_length=feature.length_limit if feature.is_sequence else None,
        weights=InputColumn(f"{path}.weights_column", weights, is_list=True) if weights else None,
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
    if column.is_list and column.num_ids:
        return "a list of integers", is_list and pa.types.is_integer(found.value_type)
    if column.is_list:
        return "a list of floats", is_list and pa.types.is_floating(found.value_type)
    if column.num_ids:
        return "an integer", pa.types.is_integer(found)
    return "a number", pa.types.is_floating(found) or pa.types.is_integer(found)
