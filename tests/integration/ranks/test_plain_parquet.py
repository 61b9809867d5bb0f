"""Two tasks over Parquet that nobody prepared: raw strings and numbers, weights, missing values."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.ranks import run_ranks
from tests.harness.sessions import open_session, train_session
from trainer.data.inputs import resolve_inputs
from trainer.data.reader import find_data
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.errors import StorageError
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import load_spec

NUM_ROWS = 4000
NUM_CITIES, NUM_BRANDS = 40, 30
LIE_SHARE = 0.3
SPEC = """
name: plain
data: {label: {column: click}, weight_column: importance, batch_size: 100}
features:
  - {name: visits, type: dense, transform: log1p, missing: 0}
  - {name: age, type: dense, transform: standardise, mean: 49, std: 18}
  - {name: city, type: id, table: cities, hashing: {seed: 3}}
  - name: brands
    type: id_list
    table: brands
    vocabulary: &known {path: brands.parquet, min_count: 10}
  - name: seen
    type: sequence
    table: seen
    max_length: 2
    weights_column: seen_for_s
    vocabulary: *known
  - {name: age_band, type: id, column: age, table: ages, bucketize: {boundaries: [25, 40, 60]}}
embedding_tables:
  - {name: cities, num_embeddings: 1000, embedding_dim: 8}
  - {name: brands, embedding_dim: 8}
  - {name: seen, embedding_dim: 8}
  - {name: ages, embedding_dim: 8}
model:
  dense_arch: {layer_sizes: [8]}
  over_arch: {layer_sizes: [16, 2]}
  tasks:
    - {name: click, loss: bce}
    - {name: effect, loss: mse, weight: 0.5, label: {column: effect}, auc_threshold: 1.0}
optimizer:
  sparse: {lr: 0.1}
  dense: {lr: 0.01}
  schedule: {warmup_steps: 8, decay: cosine, min_ratio: 0.1}
parallelism: {workers: 2, shard_group_size: 1}
training: {epochs: 4, report_every_steps: 20, accumulate_steps: 2, clip_norm: 1.0}
checkpoint: {every_steps: 1000}
"""


def write_rows(folder: Path, draw: np.random.Generator) -> None:
    """Rows whose click depends on the city and the brands alone; some have no brand at all.

    Some are lies, of weight 0: who counts them cannot do well.
    """
    folder.mkdir(parents=True)
    city = draw.integers(0, NUM_CITIES, NUM_ROWS)
    counts = draw.integers(0, 4, NUM_ROWS)
    brands = [draw.integers(0, NUM_BRANDS, count) for count in counts]
    is_lie = draw.random(NUM_ROWS) < LIE_SHARE
    effect = np.array([np.sin(ids).sum() for ids in brands]) + 1.5 * np.sin(3.0 * city)
    effect *= np.where(is_lie, -9.0, 1.0)
    table = pa.table(
        {
            "city": pa.array([None if n % 50 == 0 else f"city-{c}" for n, c in enumerate(city)]),
            "brands": pa.array([[f"b{i}" for i in ids] for ids in brands], pa.list_(pa.string())),
            "age": pa.array(draw.integers(18, 80, NUM_ROWS)),
            "visits": pa.array([None if n % 9 == 0 else float(n % 300) for n in range(NUM_ROWS)]),
            "seen": pa.array([[f"b{i}" for i in ids[::-1]] for ids in brands]),
            "seen_for_s": pa.array(
                [[float(i) for i in ids] for ids in brands], pa.list_(pa.float64())
            ),
            "click": (effect > 0).astype(np.int64),
            "effect": effect,
            "importance": np.where(is_lie, 0.0, draw.uniform(0.5, 2, NUM_ROWS)),
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    draw = np.random.default_rng(5)
    write_rows(folder / "train", draw)
    write_rows(folder / "validation", draw)
    known = pa.table(
        {
            "value": [f"b{n}" for n in range(NUM_BRANDS)],
            "index": pa.array(range(1, NUM_BRANDS + 1)),
            "count": [100] * NUM_BRANDS,
        }
    )
    pq.write_table(known, folder / "brands.parquet")
    return folder


def test_raw_columns_train_and_predict_what_depends_on_them(folder: Path, tmp_path: Path) -> None:
    spec = resolve_inputs(load_spec(SPEC, [f"data.path={folder}"]))
    sizes = {table.name: table.num_embeddings for table in spec.embedding_tables}
    assert sizes == {"cities": 1000, "brands": 31, "seen": 31, "ages": 5}
    config = WorkerConfig(spec, tmp_path / "run", "job-plain-a0", 0)
    metrics = run_ranks(train_session, 2, config)[0]["metrics"]
    assert metrics["validation/click/auc"] > 0.95
    assert metrics["validation/click/ne"] < 0.6
    assert metrics["validation/effect/auc"] > 0.95
    assert metrics["validation/effect/rmse"] < 0.6
    assert {"train/loss", "train/click/ne", "train/effect/mae"} <= set(metrics)


def open_changed(config: WorkerConfig, folder: Path) -> list[str]:
    """What a rank finds after rows came into the folders, and says of other changes."""
    for split in ("train", "validation"):
        shutil.copy(folder / split / "rows.parquet", folder / split / "later.parquet")
    session = open_session(config)
    found = [f"{session.shape.num_rows} and {session.validation_source.num_rows}"]
    few = pq.read_table(folder / "brands.parquet").slice(1)
    pq.write_table(few, folder / "brands.parquet")
    pq.write_table(pq.read_table(folder / "train" / "rows.parquet").slice(1), folder / "few")
    for _ in range(2):
        with pytest.raises(StorageError) as refused:
            open_session(config)
        found.append(str(refused.value))
        shutil.copy(folder / "few", folder / "train" / "rows.parquet")
    return found


def test_workers_read_what_the_driver_found_whatever_comes_later_and_refuse_what_has_changed(
    folder: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(folder, tmp_path / "data")
    settings = [f"data.path={data}", "parallelism.workers=1", "parallelism.shard_group_size=1"]
    spec = resolve_inputs(load_spec(SPEC, settings))
    found = find_data(spec)
    config = WorkerConfig(spec, tmp_path / "run", "job-plain-a0", 0, data=found)
    assert LeaseBook.of(spec, found).num_rows_left == NUM_ROWS * spec.training.epochs
    [(sizes, vocabulary, rows)] = run_ranks(open_changed, 1, config, data)
    assert sizes == f"{NUM_ROWS} and {NUM_ROWS}"
    assert "vocabularies or sizes of hashes" in vocabulary
    assert f"{NUM_ROWS - 1:,} rows in" in rows and "is another folder mounted" in rows
