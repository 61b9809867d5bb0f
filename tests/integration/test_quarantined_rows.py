"""A real session over data with bad rows: it trains, and tells which rows it left out."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import make_config, train_session
from trainer.events import Metrics, RowsQuarantined, read_record
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir

SETTINGS = (
    "training.epochs=1",
    "parallelism.workers=2",
    "parallelism.shard_group_size=1",
    "data.on_bad_rows=quarantine",
)


@pytest.fixture
def spoilt(small_movielens: Path, tmp_path: Path) -> Path:
    """A copy whose first training file has no rating in rows 5 and 6 and a bad year in row 9."""
    folder = shutil.copytree(small_movielens, tmp_path / "spoilt")
    path = folder / "train" / "part-00000.parquet"
    table = pq.read_table(path)
    for name, values in {"rating": {5: None, 6: None}, "year": {9: float("inf")}}.items():
        index = table.schema.get_field_index(name)
        column = table.column(name).to_pylist()
        for row, value in values.items():
            column[row] = value
        kind = table.schema.field(index).type
        table = table.set_column(index, name, pa.array(column, kind))
    pq.write_table(table, path, row_group_size=pq.read_metadata(path).row_group(0).num_rows)
    return folder


def told_rows(config: WorkerConfig) -> Counter[tuple[str, str]]:
    """Rows told of by file and reason, over all ranks."""
    told: Counter[tuple[str, str]] = Counter()
    streams = RunDir(config.run_dir).attempt(config.attempt_id).root.rglob("*.jsonl")
    for line in (line for path in streams for line in path.read_bytes().splitlines()):
        record = read_record(line, 0)
        if isinstance(record, RowsQuarantined):
            told[Path(record.file).parent.name, record.reason] += record.count
    return told


def test_a_bad_held_out_row_is_counted_once_however_often_it_is_read(
    spoilt: Path, small_movielens: Path, tmp_path: Path
) -> None:
    shutil.rmtree(spoilt / "validation")
    shutil.copytree(spoilt / "train", spoilt / "validation")
    shutil.rmtree(spoilt / "train")
    shutil.copytree(small_movielens / "train", spoilt / "train")
    often = ("training.max_steps=12", "training.validate_every_steps=4")
    config = make_config(
        small_movielens, tmp_path / "run", f"data.path={spoilt}", *SETTINGS, *often
    )
    run_ranks(train_session, 2, config)
    assert told_rows(config) == {
        ("validation", "column 'rating' is not a value"): 2,
        ("validation", "column 'year' is not a finite number"): 1,
    }


def test_bad_rows_cost_themselves_and_are_told_by_file_and_reason(
    spoilt: Path, small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path / "run", f"data.path={spoilt}", *SETTINGS)
    ranks = run_ranks(train_session, 2, config)
    assert all(value == value for value in ranks[0]["metrics"].values()), "no NaN anywhere"
    streams = RunDir(tmp_path / "run").attempt(config.attempt_id).root.rglob("*.jsonl")
    records = [read_record(line, 0) for path in streams for line in path.read_bytes().splitlines()]
    told: Counter[tuple[str, str]] = Counter()
    for record in records:
        if isinstance(record, RowsQuarantined):
            told[Path(record.file).name, record.reason] += record.count
    assert told == {
        ("part-00000.parquet", "column 'rating' is not a value"): 2,
        ("part-00000.parquet", "column 'year' is not a finite number"): 1,
    }
    counts = [
        record.values["data/quarantined_rows"]
        for record in records
        if isinstance(record, Metrics) and "data/quarantined_rows" in record.values
    ]
    assert sum(counts) == 3
