"""The job that both sides of a benchmark train: generated ratings and the demo's DLRM in 1D."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.data.manifest import load_manifest
from trainer.datasets.movielens.prepare import prepare_movielens
from trainer.datasets.movielens.synthetic import generate_movielens
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document
from trainer.spec.resolve import size_tables

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
def prepared_ratings() -> Iterator[Path]:
    """A prepared folder of generated ratings, always the same, gone afterwards."""
    with TemporaryDirectory(prefix="shardloom-bench-data-") as folder:
        source, prepared = Path(folder, "csv"), Path(folder, "prepared")
        generate_movielens(source, num_ratings=NUM_RATINGS, seed=DATA_SEED)
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
    """The checked spec of a document with its table sizes taken from the data."""
    spec = validate_spec(document)
    return size_tables(spec, load_manifest(Path(spec.data.path)).vocab_sizes)
