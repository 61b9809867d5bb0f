"""Rows of unequal weight train one objective, however many ranks and groups they are shared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import assemble
from tests.integration.test_sequences_and_weights import train_session
from trainer.ray_worker import WorkerConfig
from trainer.spec import validate_spec

NUM_ROWS, NUM_USERS, STEP_ROWS = 64, 8, 32


def write_rows(folder: Path, bad_rows: tuple[int, ...] = ()) -> Path:
    """Rows of which two in each step of 32 weigh a lot, both on the first of two ranks."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=NUM_ROWS).astype(np.float32)
    label = x * 2
    label[list(bad_rows)] = np.nan
    weight = np.where(np.arange(NUM_ROWS) % STEP_ROWS < 2, 5.0, 0.5).astype(np.float32)
    table = {"user": rng.integers(0, NUM_USERS, NUM_ROWS), "x": x, "label": label, "w": weight}
    (folder / "train").mkdir(parents=True)
    pq.write_table(pa.table(table), folder / "train" / "part-0.parquet")
    return folder


def job(data: Path, run_dir: Path, num_ranks: int, **changes: Any) -> WorkerConfig:
    """Two steps over all rows by plain SGD, the same 32 rows a step at any number of ranks."""
    source = {
        "path": str(data),
        "split": {"train": "train", "validation": None},
        "label": {"column": "label"},
        "batch_size": STEP_ROWS // num_ranks,
        "shuffle": False,
    }
    document = {
        "name": "weighed",
        "data": source | changes,
        "features": [
            {"name": "user", "type": "id", "table": "users"},
            {"name": "x", "type": "dense"},
        ],
        "embedding_tables": [{"name": "users", "embedding_dim": 4, "num_embeddings": NUM_USERS}],
        "model": {
            "arch": "dlrm",
            "dense_arch": {"layer_sizes": [4]},
            "over_arch": {"layer_sizes": [1]},
            "tasks": [{"loss": "mse"}],
        },
        "optimizer": {"sparse": {"name": "sgd", "lr": 0.1}, "dense": {"name": "sgd", "lr": 0.1}},
        # Copies of the tables, which start alike at any number of ranks; shards would not.
        "parallelism": {"workers": num_ranks, "shard_group_size": 1, "sync": {"every_steps": 1}},
        "training": {"max_steps": 2},
    }
    return WorkerConfig(validate_spec(document), run_dir, "job-test-a0", 0)


@pytest.mark.parametrize(
    ("bad_rows", "changes"),
    [
        ((), {"weight_column": "w"}),
        ((0, 3, 5, 40), {"on_bad_rows": "quarantine", "max_bad_share": 0.5}),
    ],
)
def test_rows_count_alike_on_one_rank_and_on_two(
    tmp_path: Path, bad_rows: tuple[int, ...], changes: dict[str, Any]
) -> None:
    data = write_rows(tmp_path / "data", bad_rows)
    alone = run_ranks(train_session, 1, job(data, tmp_path / "one", 1, **changes))
    shared = run_ranks(train_session, 2, job(data, tmp_path / "two", 2, **changes))
    for name, value in alone[0]["dense"].items():
        torch.testing.assert_close(shared[0]["dense"][name], value, atol=1e-6, rtol=1e-5, msg=name)
    tables = assemble(alone)
    for name, value in assemble(shared).items():
        torch.testing.assert_close(value, tables[name], atol=1e-6, rtol=1e-5, msg=name)
    assert shared[0]["metrics"]["train/loss"] == pytest.approx(alone[0]["metrics"]["train/loss"])
