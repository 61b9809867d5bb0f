"""What lies in a folder: digests to compare, records of an attempt, Parquet, pickles."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.protocol.events import EventModel, read_record
from trainer.protocol.run_dir import AttemptDir


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def records_in(attempt: AttemptDir, *kinds: type[EventModel]) -> list[Any]:
    """Records of these kinds that the streams of an attempt hold, stream by stream."""
    lines = [line for path in attempt.stream_paths() for line in path.read_bytes().splitlines()]
    return [r for r in (read_record(line, now=0.0) for line in lines) if isinstance(r, kinds)]


def replace_values(path: Path, column: str, values: Mapping[int, Any]) -> None:
    """Write a Parquet file again, in row groups as before, with `values` by row in a column.

    The manifest of prepared data then has its new size.
    """
    table, group_rows = pq.read_table(path), pq.read_metadata(path).row_group(0).num_rows
    held = enumerate(table[column].to_pylist())
    replaced = [values.get(row, value) for row, value in held]
    found = pa.array(replaced, table.schema.field(column).type)
    table = table.set_column(table.schema.get_field_index(column), column, found)
    size_bytes, manifest = path.stat().st_size, path.parents[1] / "manifest.json"
    pq.write_table(table, path, row_group_size=group_rows)
    if manifest.is_file():
        size, new_size = (f'"size_bytes": {n}' for n in (size_bytes, path.stat().st_size))
        manifest.write_text(manifest.read_text().replace(size, new_size))


class Call:
    """Unpickled it is what `function` returns; so do early Pythons 3.11 write members of enums."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call
