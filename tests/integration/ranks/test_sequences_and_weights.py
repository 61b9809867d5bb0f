"""Sequence and weighted features, half-precision tables, bce and dcn_v2 in whole sessions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.conftest import REPO
from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble, assert_alike, next_run, train_restored
from trainer.checkpoint.save_load import list_committed
from trainer.data.manifest import load_manifest
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import load_spec, validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import size_tables

pytestmark = pytest.mark.slow


EXAMPLE = REPO / "examples" / "movielens-sequence.yaml"
# The disliked history becomes every rated movie, weighed by how the user rated it.
WEIGHTED = (
    "features[5].column=history_movies",
    "features[5].weights_column=history_ratings",
)
SHORT = (
    "data.batch_size=32",
    "training.max_steps=12",
    "training.report_every_steps=5",
    "training.validate_every_steps=12",
    "checkpoint.every_steps=6",
    "optimizer.schedule.warmup_steps=2",
    "parallelism.divergence_check.every_syncs=1",
)


def example_config(data: Path, run_dir: Path) -> WorkerConfig:
    """The example with weights, on small data."""
    spec = load_spec(EXAMPLE.read_text(), [f"data.path={data}", *SHORT, *WEIGHTED])
    return WorkerConfig(
        size_tables(spec, load_manifest(data).vocab_sizes), run_dir, "job-test-a0", 0
    )


def test_the_sequence_example_with_weights_resumes_to_the_same_result(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(small_movielens, tmp_path)
    straight = run_ranks(train_restored, 4, config)
    halfway, end = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert (halfway.commit.step, end.commit.step) == (6, 12)
    shutil.rmtree(end.path)
    resumed = run_ranks(train_restored, 4, next_run(config))
    assert resumed[0]["resumed_step"] == 6
    assert resumed[0]["state"].position == straight[0]["state"].position
    assert_alike(resumed, straight)
    moved = set.union(*(rank["moved"] for rank in straight))
    assert moved == {"users", "movies", "genres", "tokens", "liked_movies", "disliked_movies"}
    (query,) = [v for name, v in straight[0]["dense"].items() if name.endswith("query")]
    assert query.abs().sum() > 0, "the query starts at 0 and must have learned"
    assert straight[0]["metrics"]["validation/rmse"] < 2


NUM_ITEMS = 40


def write_binary_data(folder: Path) -> None:
    """Rows whose label is 1 where the weighted values of their items, hidden here, sum above 0."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=NUM_ITEMS)
    for split, num_rows in (("train", 4096), ("validation", 1024)):
        items = [rng.integers(0, NUM_ITEMS, rng.integers(1, 6)) for _ in range(num_rows)]
        weights = [rng.choice([0.5, 1.0, 2.0], len(ids)) for ids in items]
        sums = [values[ids] @ weight for ids, weight in zip(items, weights, strict=True)]
        table = pa.table(
            {
                "items": pa.array([ids.tolist() for ids in items], pa.list_(pa.int64())),
                "weights": pa.array([w.tolist() for w in weights], pa.list_(pa.float32())),
                "noise": rng.normal(size=num_rows).astype(np.float32),
                "clicked": (np.array(sums) > 0).astype(np.int64),
            }
        )
        (folder / split).mkdir(parents=True)
        pq.write_table(table, folder / split / "part-0.parquet", row_group_size=1024)


def binary_spec(data: Path, arch: str, item: dict[str, Any], data_type: str) -> JobSpec:
    """Two replicas of one shard that learn `clicked` from one sparse feature."""
    return validate_spec(
        {
            "name": "clicks",
            "data": {"path": str(data), "label": {"column": "clicked"}, "batch_size": 64},
            "features": [
                {"name": "noise", "type": "dense"},
                {"name": "items", "table": "catalogue", **item},
            ],
            "embedding_tables": [
                {
                    "name": "catalogue",
                    "num_embeddings": NUM_ITEMS,
                    "embedding_dim": 8,
                    "data_type": data_type,
                }
            ],
            "model": {
                "arch": arch,
                "dense_arch": {"layer_sizes": [8]},
                "over_arch": {"layer_sizes": [16, 1]},
                "tasks": [{"name": "click", "loss": "bce"}],
            },
            "optimizer": {"sparse": {"lr": 0.2}, "dense": {"lr": 0.01}},
            "parallelism": {"workers": 2, "shard_group_size": 1, "sync": {"every_steps": 4}},
            "training": {"epochs": 3, "report_every_steps": 32},
            "checkpoint": {"every_steps": 1000},
        }
    )


@pytest.mark.parametrize(
    ("arch", "item", "data_type", "least_auc"),
    [
        ("dlrm", {"type": "id_list", "weights_column": "weights"}, "fp32", 0.9),
        ("dcn_v2", {"type": "sequence", "max_length": 6}, "fp16", 0.8),
    ],
)
def test_a_bce_job_learns_a_binary_label(
    tmp_path: Path, arch: str, item: dict[str, Any], data_type: str, least_auc: float
) -> None:
    write_binary_data(tmp_path / "data")
    spec = binary_spec(tmp_path / "data", arch, item, data_type)
    config = WorkerConfig(spec, tmp_path / "run", "job-test-a0", 0)
    ranks = run_ranks(train_restored, 2, config)
    assert ranks[0]["metrics"]["validation/auc"] > least_auc
    assert ranks[0]["metrics"]["validation/ne"] < 0.8
    wanted = torch.float16 if data_type == "fp16" else torch.float32
    assert ranks[0]["dtypes"] == {"catalogue": wanted}
    assemble(ranks)  # which wants the two copies to be equal
