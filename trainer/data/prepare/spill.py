"""Columns of numbers in files, to be read back without a copy."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from numpy.typing import NDArray

Columns = dict[str, NDArray]


def write_columns(path: Path, columns: Columns) -> None:
    """Write numpy arrays of one length, without nulls, as an Arrow file."""
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def map_columns(path: Path) -> Columns:
    """The arrays of `write_columns`, read-only and mapped: only what is used is read."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    return {
        name: column.chunk(0).to_numpy() if column.num_chunks else column.to_numpy()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
