"""Small data sets and specs shared by the data tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.files import replace_values
from trainer.data import reader
from trainer.data.manifest import load_manifest
from trainer.data.parquet import ParquetSource
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.datasets.movielens.synthetic import generate_movielens
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import size_tables

SPARSE = {
    "user_id": "id",
    "movie_id": "id",
    "genres": "id_list",
    "tokens": "tokens",
    "history_liked": "id_list",
}
DENSE = ("year", "user_activity")


@pytest.fixture(scope="session")
def csv_folder(tmp_path_factory) -> Path:
    """2000 generated ratings as csv."""
    folder = tmp_path_factory.mktemp("generated") / "csv"
    generate_movielens(folder, num_ratings=2000, seed=7)
    return folder


@pytest.fixture(scope="session")
def prepared(csv_folder, tmp_path_factory) -> Path:
    """The generated ratings, prepared in 3 parts of several row groups."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    options = MovieLensOptions(num_partitions=3, row_group_rows=128)
    prepare_movielens(csv_folder, out, options=options)
    return out


@pytest.fixture
def make_spec(prepared) -> Callable[..., JobSpec]:
    """A function that makes a spec over the prepared folder; `batch_size`, `epochs`, `shuffle`."""

    def make(batch_size: int = 16, epochs: int = 1, shuffle: bool = True, **document) -> JobSpec:
        base = {
            "name": "job",
            "data": {
                "path": str(prepared),
                "batch_size": batch_size,
                "shuffle": shuffle,
                "label": {
                    "column": "rating",
                    "offset_column": "user_mean",
                    "scale_column": "user_scale",
                },
            },
            "features": [
                *({"name": n, "type": t, "table": f"{n}_table"} for n, t in SPARSE.items()),
                *({"name": name, "type": "dense"} for name in DENSE),
            ],
            "embedding_tables": [{"name": f"{n}_table", "embedding_dim": 4} for n in SPARSE],
            "model": {
                "dense_arch": {"layer_sizes": [4]},
                "over_arch": {"layer_sizes": [1]},
                "tasks": [{"loss": "mse"}],
            },
            "parallelism": {"shard_group_size": 1},
            "training": {"epochs": epochs, "seed": 3},
        }
        return size_tables(validate_spec(base | document), load_manifest(prepared).vocab_sizes)

    return make


@pytest.fixture
def train(prepared, make_spec) -> ParquetSource:
    return reader.open_source(make_spec(), prepared / "train")


@pytest.fixture(params=[0, 2**30], ids=["windows", "whole"])
def read_both_ways(request, monkeypatch) -> None:
    """Splits are decoded window by window, then whole."""
    monkeypatch.setattr(reader, "CACHE_BYTES", request.param)


@pytest.fixture
def spoil(prepared, tmp_path) -> Callable[[str, int, Any], Path]:
    """A function that copies the training part with one value of its second file replaced."""

    def replace_value(column: str, row: int, value: Any) -> Path:
        folder = shutil.copytree(prepared / "train", tmp_path / "train")
        replace_values(folder / "part-00001.parquet", column, {row: value})
        return folder

    return replace_value
