"""Prepared Criteo columns, and the Parquet files that gathered buckets become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.data.prepare.criteo_format import DENSE_NAMES, ID_NAMES, LABEL
from trainer.data.prepare.criteo_ids import IdEncoder
from trainer.data.prepare.criteo_runs import Buckets, Cells, Runs, dense_of, ids_of, labels_of
from trainer.data.prepare.journal import Facts
from trainer.data.prepare.vocabulary import UNKNOWN

COLUMN_TYPES = {
    LABEL: "float32",
    **dict.fromkeys(DENSE_NAMES, "float32"),
    **dict.fromkeys(ID_NAMES, "int64"),
}
SCHEMA = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMN_TYPES.items()])
_ENCODED_ROWS = 131_072


def transform_counts(counts: NDArray[np.float64], *, keep_sign: bool) -> NDArray[np.float32]:
    """log(1 + count) of counts [n, 13]; NaN (not given) becomes 0.

    A negative count becomes 0 or, with `keep_sign`, -log(1 - count).
    """
    given = np.nan_to_num(counts)
    sizes = np.abs(given) if keep_sign else np.maximum(given, 0)
    logarithms = np.log1p(sizes)
    return (np.copysign(logarithms, given) if keep_sign else logarithms).astype(np.float32)


@dataclass(frozen=True)
class PartitionWriter:
    """Writes partitions of prepared rows. `encoders` [26] turn raw ids into table rows."""

    runs: Runs
    buckets: Buckets
    encoders: Sequence[IdEncoder]
    row_group_rows: int

    def write(self, buckets: Sequence[int], path: Path) -> Facts:
        """Write all rows of `buckets`; gives numbers of `rows`, `row_groups`, `clicks`, `unknown`.

        Memory is that of one bucket twice.
        """
        clicks = unknown = rows = 0
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            for bucket in buckets:
                cells = self._in_final_order(bucket)
                rows += cells.shape[1]
                clicks += int(labels_of(cells).sum())
                unknown += self._append(writer, cells)
        row_groups = pq.read_metadata(path).num_row_groups
        return {"rows": rows, "row_groups": row_groups, "clicks": clicks, "unknown": unknown}

    def _in_final_order(self, bucket: int) -> Cells:
        cells = self.runs.bucket(bucket)
        if bucket >= self.buckets.training_buckets:
            return cells
        order = np.random.default_rng([self.buckets.seed, 1, bucket]).permutation(cells.shape[1])
        return cells[:, order]

    def _append(self, writer: pq.ParquetWriter, cells: Cells) -> int:
        """Append whole row groups, the last one of a bucket may be short; gives unknown ids."""
        step = max(1, _ENCODED_ROWS // self.row_group_rows) * self.row_group_rows
        unknown = 0
        for start in range(0, cells.shape[1], step):
            part = cells[:, start : start + step]
            ids = [
                encoder.encode(ids_of(part, column)) for column, encoder in enumerate(self.encoders)
            ]
            unknown += sum(int((column == UNKNOWN).sum()) for column in ids)
            dense = [dense_of(part, column) for column in range(len(DENSE_NAMES))]
            table = pa.table([labels_of(part), *dense, *ids], schema=SCHEMA)
            writer.write_table(table, row_group_size=self.row_group_rows)
        return unknown
