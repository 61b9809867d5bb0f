"""The rows that all sides of the loader benchmark read: Criteo's columns and a list of ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec import KeyedJaggedTensor

from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import size_tables

NUM_DENSE = 13
NUM_IDS = 26
TABLE_ROWS = 100_000
DENSE = [f"int_{number}" for number in range(NUM_DENSE)]
IDS = [f"cat_{number}" for number in range(NUM_IDS)]
HISTORY = "history"
LABEL = "label"
COLUMNS = [LABEL, *DENSE, *IDS, HISTORY]
KEYS = [*IDS, HISTORY]
MAX_HISTORY = 20
BATCH_SIZE = 2048
ROWS_PER_FILE = 131_072
ROWS_PER_GROUP = 32_768
SEED = 7


def write_rows(folder: Path, num_files: int, rows_per_file: int = ROWS_PER_FILE) -> int:
    """Write Parquet files, always the same; returns the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        table = _table(np.random.default_rng([SEED, number]), rows_per_file)
        pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=ROWS_PER_GROUP)
    return num_files * rows_per_file


def write_joined(folder: Path, target: Path) -> None:
    """Write one file with the rows of all files in `folder`."""
    tables = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    pq.write_table(pa.concat_tables(tables), target, row_group_size=ROWS_PER_GROUP)


def _table(draw: np.random.Generator, num_rows: int) -> pa.Table:
    """One file: log-normal counts, Zipf ids, histories of 0 to `MAX_HISTORY` ids."""
    dense = np.log1p(draw.lognormal(1, 2, (NUM_DENSE, num_rows))).astype(np.float32)
    lengths = draw.integers(0, MAX_HISTORY + 1, num_rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    history = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(_ids(draw, offsets[-1])))
    columns = {
        LABEL: (draw.random(num_rows) < 0.25).astype(np.float32),
        **dict(zip(DENSE, dense, strict=True)),
        **{name: _ids(draw, num_rows) for name in IDS},
        HISTORY: history,
    }
    return pa.table(columns)


def _ids(draw: np.random.Generator, count: int) -> np.ndarray:
    return (draw.zipf(1.2, count) % TABLE_ROWS).astype(np.int64)


def spec_over(folder: Path | str) -> JobSpec:
    """A DLRM on the rows in `folder`, on one worker."""
    document = {
        "name": "loader",
        "data": {
            "path": str(folder),
            "split": {"train": ".", "validation": None},
            "batch_size": BATCH_SIZE,
            "label": {"column": LABEL},
        },
        "features": [
            *({"name": name, "type": "dense"} for name in DENSE),
            *({"name": name, "type": "id", "table": name} for name in IDS),
            {"name": HISTORY, "type": "id_list", "table": HISTORY},
        ],
        "embedding_tables": [
            {"name": name, "num_embeddings": TABLE_ROWS, "embedding_dim": 16} for name in KEYS
        ],
        "model": {
            "dense_arch": {"layer_sizes": [64, 16]},
            "over_arch": {"layer_sizes": [64, 1]},
            "tasks": [{"name": "click", "loss": "bce"}],
        },
        "parallelism": {"workers": 1, "shard_group_size": 1},
    }
    return size_tables(validate_spec(document), {})


class Checksum:
    """What batches hold, whatever the order of their rows: sums, exact but for the dense ones."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._ids: dict[str, int] = dict.fromkeys(KEYS, 0)
        self._num_ids = 0
        self._floats = torch.zeros(NUM_DENSE + 1, dtype=torch.float64)

    def add(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, label: torch.Tensor) -> None:
        """Count one batch: dense [B, 13], the keys of `KEYS`, label [B, 1]."""
        assert sparse.keys() == KEYS
        assert dense.dtype == label.dtype == torch.float32
        assert sparse.values().dtype == torch.int64
        assert label.shape == (len(dense), 1)
        self.num_rows += len(dense)
        self._num_ids += len(sparse.values())
        for key, jagged in sparse.to_dict().items():
            self._ids[key] += int(jagged.values().sum())
        self._floats[:NUM_DENSE] += dense.sum(0, dtype=torch.float64)
        self._floats[NUM_DENSE] += label.sum(dtype=torch.float64)

    def summary(self) -> list[float]:
        """Equal for equal rows; the dense sums are rounded, as their order differs."""
        floats = [round(value, 1) for value in self._floats.tolist()]
        return [self.num_rows, self._num_ids, *self._ids.values(), *floats]
