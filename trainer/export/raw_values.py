"""Values as they stood in the raw files, made ids by the vocabularies of the prepared data.

Preparing replaced them once for training; who scores has the raw ones, such as a movie's own
number. Hashing, buckets and vocabularies that a *feature* names need nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trainer.data.transforms import VocabularyEncoder, load_vocabulary
from trainer.export.errors import BadRow
from trainer.export.values import array_of

_FOLDER = "vocab"


def known_vocabularies(folder: Path) -> list[str]:
    """Names of the vocabularies in an export's folder of them."""
    return sorted(path.stem for path in (folder / _FOLDER).glob("*.parquet"))


def with_ids(
    rows: Sequence[Mapping[str, Any]], raw: Mapping[str, str], folder: Path
) -> list[dict[str, Any]]:
    """Rows in which the columns of `raw` hold ids; it names the vocabulary of each column.

    What a vocabulary does not know is id 0. Raises `BadRow` for a vocabulary that is not in
    `folder`, and for values of another kind than its own.
    """
    found = [dict(row) for row in rows]
    for column, name in raw.items():
        if name not in (known := known_vocabularies(folder)):
            listed = ", ".join(known) or "none"
            raise BadRow(0, column, f"there is no vocabulary '{name}'; there are: {listed}")
        _encode(found, column, load_vocabulary(folder / _FOLDER / f"{name}.parquet"))
    return found


def _encode(rows: Sequence[dict[str, Any]], column: str, encoder: VocabularyEncoder) -> None:
    """Replace the values of one column, all looked up at once."""
    places = [place for place, row in enumerate(rows) if row.get(column) is not None]
    cells = [rows[place][column] for place in places]
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells]
    ids = iter(_ids([item for items in lists for item in items], column, encoder))
    for place, cell, items in zip(places, cells, lists, strict=True):
        taken = [next(ids) for _ in items]
        rows[place][column] = taken if isinstance(cell, list) else taken[0]


def _ids(items: list[Any], column: str, encoder: VocabularyEncoder) -> list[int]:
    if not items:
        return []
    try:
        values = array_of(items)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise BadRow(0, column, f"has values of several kinds, not {encoder.wanted}") from None
    if not (pa.types.is_null(values.type) or encoder.accepts(values.type)):
        raise BadRow(0, column, f"has {values.type} values, not {encoder.wanted} as its vocabulary")
    return encoder.encode(values).tolist()
