"""`data inspect`, without its looks: data sets to reports that a table or JSON can show."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from trainer.data.errors import CorruptFileError, TooFewRowsError
from trainer.data.inspect_columns import ColumnReport, ColumnSketch
from trainer.data.inspect_source import DataSet
from trainer.data.inspect_spec import Suggestion, suggest
from trainer.data.manifest import Manifest
from trainer.data.prepare.criteo_format import ID_NAMES
from trainer.data.storage import Location

_CHUNK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class DataReport:
    """What one data set holds."""

    data: DataSet
    num_rows: int
    columns: tuple[ColumnReport, ...]
    suggestion: Suggestion

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`; None for numbers that JSON does not know."""
        document = {
            "title": self.data.title,
            "format": self.data.text.text if self.data.text else "parquet",
            "num_files": len(self.data.files),
            "size_bytes": self.data.size_bytes,
            "num_rows": self.num_rows,
            "columns": [asdict(column) for column in self.columns],
            "manifest": self.data.manifest.model_dump() if self.data.manifest else None,
            "suggested": asdict(self.suggestion),
        }
        plain: dict[str, Any] = _without_non_finite(document)
        return plain


def _without_non_finite(value: Any) -> Any:
    """The value with None for infinities and NaN, at any depth."""
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspect_data(data: DataSet, on_rows: Callable[[int], object] = lambda _: None) -> DataReport:
    """Read a data set once; `on_rows` hears of every part's rows. Raises a `DataError`."""
    texts = ID_NAMES if data.text and data.text.is_criteo else ()
    sketches = {name: ColumnSketch(name, is_text=name in texts) for name in data.columns}
    num_rows = 0
    for batch in data.batches():
        for name, sketch in sketches.items():
            sketch.add(batch[name])
        num_rows += len(batch)
        on_rows(len(batch))
    if not num_rows:
        raise TooFewRowsError(f"{data.title} holds no rows")
    columns = tuple(sketch.report() for sketch in sketches.values())
    return DataReport(data, num_rows, columns, suggest(columns, data.manifest))


def verify_folder(folder: Location, manifest: Manifest) -> int:
    """As `manifest.verify_checksums`, for a folder anywhere."""
    files = (entry for split in manifest.splits.values() for entry in split.files)
    wanted = {entry.path: entry.sha256 for entry in files}
    wanted |= {entry.path: entry.sha256 for entry in manifest.vocabularies.values()}
    for path, sha256 in wanted.items():
        file = folder / path
        if (found := _sha256(file)) != sha256:
            raise CorruptFileError(
                f"{file} is damaged: its sha256 is {found}, not {sha256} as when it was written; "
                "copy or prepare the data again"
            )
    return len(wanted)


def _sha256(file: Location) -> str:
    digest = hashlib.sha256()
    with file.open_input() as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
