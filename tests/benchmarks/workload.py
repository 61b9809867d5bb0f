"""What both sides of a benchmark train: the demo's DLRM on generated ratings, or clicks by Zipf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from tests.harness.small_model import plain_batch
from trainer.data.batches import Batch
from trainer.data.inputs import resolve_inputs
from trainer.datasets.movielens.prepare import prepare_movielens
from trainer.datasets.movielens.synthetic import generate_movielens
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document

EXAMPLE_SPEC = Path(__file__).parents[2] / "examples" / "movielens.yaml"
NUM_RATINGS = 100_000
DATA_SEED = 0
WORLD_SIZE = 4

# Left to itself the planner may choose differently on the two sides.
_SHARDING = {
    "users": "row_wise",
    "movies": "row_wise",
    "genres": "table_wise",
    "tokens": "row_wise",
    "liked_movies": "row_wise",
    "disliked_movies": "table_wise",
}


@contextmanager
def prepared_ratings(num_ratings: int = NUM_RATINGS) -> Iterator[Path]:
    """A prepared folder of generated ratings, always the same, gone afterwards."""
    with TemporaryDirectory(prefix="shardloom-bench-data-") as folder:
        source, prepared = Path(folder, "csv"), Path(folder, "prepared")
        generate_movielens(source, num_ratings=num_ratings, seed=DATA_SEED)
        prepare_movielens(source, prepared)
        yield prepared


def job_document(name: str, data: Path, overrides: list[str]) -> dict[str, Any]:
    """The demo's spec in 1D (one sharding group of all workers), without validation.

    It names the sharding of each table, reads `data`, and has `overrides` on top.
    """
    document = apply_overrides(
        parse_document(EXAMPLE_SPEC.read_text()),
        [
            f"name={name}",
            f"data.path={data}",
            "data.split.validation=null",
            "training.validate_every_steps=null",
            f"parallelism.workers={WORLD_SIZE}",
            f"parallelism.shard_group_size={WORLD_SIZE}",
            "parallelism.sync.every_steps=1",
            "resources.device=cpu",
            "retry.max_failures=0",
            *overrides,
        ],
    )
    for table in document["embedding_tables"]:
        table["constraints"] = {"sharding_types": [_SHARDING[table["name"]]]}
    return document


def resolved_spec(document: dict[str, Any]) -> JobSpec:
    """The checked spec of a document with table sizes and statistics taken from the data."""
    return resolve_inputs(validate_spec(document))


NUM_DENSE = 13
OVER_LAYERS = (64, 1)
CLICKS_SEED = 2026


@dataclass(frozen=True)
class Workload:
    """Criteo-shaped tables and batches; `world_size` ranks in groups of `shard_group_size`."""

    world_size: int
    shard_group_size: int
    num_tables: int = 26
    table_rows: int = 250_000
    embedding_dim: int = 64
    zipf_exponent: float = 1.05
    global_batch_size: int = 4096
    ids_per_feature: int = 1

    @property
    def batch_size(self) -> int:
        return self.global_batch_size // self.world_size

    @property
    def num_replicas(self) -> int:
        """M, the copies of each shard."""
        return self.world_size // self.shard_group_size

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return 64, self.embedding_dim

    @property
    def features(self) -> list[str]:
        """Features of `ids_per_feature` ids a row, each with a table of its own."""
        return [f"feature_{number:02d}" for number in range(self.num_tables)]

    @property
    def tables(self) -> list[str]:
        return [f"table_{number:02d}" for number in range(self.num_tables)]


def clicks_spec(workload: Workload, name: str, **parallelism: Any) -> JobSpec:
    """The job that trains a small DLRM on the workload, tables whole."""
    tables = [
        {
            "name": table,
            "num_embeddings": workload.table_rows,
            "embedding_dim": workload.embedding_dim,
            "constraints": {"sharding_types": ["table_wise"]},
        }
        for table in workload.tables
    ]
    kind = "id" if workload.ids_per_feature == 1 else "id_list"
    features = [
        {"name": feature, "type": kind, "table": table}
        for feature, table in zip(workload.features, workload.tables, strict=True)
    ]
    dense = [{"name": f"dense_{number:02d}", "type": "dense"} for number in range(NUM_DENSE)]
    label = {"column": "click"}
    return validate_spec(
        {
            "name": name,
            "data": {"path": "unused", "label": label, "batch_size": workload.batch_size},
            "features": [*dense, *features],
            "embedding_tables": tables,
            "model": {
                "arch": "dlrm",
                "dense_arch": {"layer_sizes": list(workload.dense_layers)},
                "over_arch": {"layer_sizes": list(OVER_LAYERS)},
                "tasks": [{"name": "click", "loss": "bce"}],
            },
            "parallelism": {
                "workers": workload.world_size,
                "shard_group_size": workload.shard_group_size,
                **parallelism,
            },
        }
    )


def zipf_batches(workload: Workload, rank: int, num_batches: int) -> list[Batch]:
    """Batches of one rank; the k-th most frequent id has a probability like k ** -exponent."""
    draw = np.random.default_rng([CLICKS_SEED, rank])
    frequencies = np.arange(1, workload.table_rows + 1) ** -workload.zipf_exponent
    bounds = np.cumsum(frequencies / frequencies.sum())
    shape = (
        workload.num_tables,
        num_batches,
        workload.batch_size * workload.ids_per_feature,
    )
    ids = np.searchsorted(bounds, draw.random(shape)).clip(max=workload.table_rows - 1)
    for table in range(workload.num_tables):
        # Which ids are the frequent ones is random, as after hashing, and alike on all ranks.
        order = np.random.default_rng([CLICKS_SEED, 1, table])
        ids[table] = order.permutation(workload.table_rows)[ids[table]]
    return [
        clicks_batch(
            workload.features,
            draw.standard_normal((workload.batch_size, NUM_DENSE), dtype=np.float32),
            ids[:, index],
            (draw.random(workload.batch_size) < 0.25).astype(np.float32),
        )
        for index in range(num_batches)
    ]


def clicks_batch(
    features: list[str],
    dense: NDArray[np.float32],
    ids: NDArray[np.int64],
    label: NDArray[np.float32],
) -> Batch:
    """B rows with P ids a feature: dense [B, columns], ids [features, B * P], label [B]."""
    return plain_batch(
        dense=torch.from_numpy(dense),
        sparse=KeyedJaggedTensor(
            keys=features,
            values=torch.from_numpy(np.ascontiguousarray(ids).ravel()),
            lengths=torch.full(
                (len(features) * len(label),), ids.shape[1] // len(label), dtype=torch.int32
            ),
        ),
        label=torch.from_numpy(label)[:, None],
    )
