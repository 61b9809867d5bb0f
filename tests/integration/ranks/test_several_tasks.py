"""Two tasks, weighted rows, accumulation and clipping in one session on real ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble, next_run, train_restored
from trainer.checkpoint.save_load import list_committed
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

pytestmark = pytest.mark.slow


NUM_ITEMS = 30
LIE_SHARE = 0.4


def write_data(folder: Path) -> None:
    """Rows with the value of an item, hidden here, and whether it is above 0; some are lies.

    Lies, inverted labels, have weight 0: who counts them cannot do well.
    """
    rng = np.random.default_rng(3)
    values = rng.normal(size=NUM_ITEMS)
    for split, num_rows in (("train", 2048), ("validation", 512)):
        items = rng.integers(0, NUM_ITEMS, num_rows)
        is_lie = rng.random(num_rows) < LIE_SHARE
        value = np.where(is_lie, -9.0, 1.0) * values[items]
        table = pa.table(
            {
                "item": items,
                "noise": rng.normal(size=num_rows).astype(np.float32),
                "value": value.astype(np.float32),
                "clicked": (value > 0).astype(np.int64),
                "trust": np.where(is_lie, 0.0, rng.uniform(0.5, 2.0, num_rows)),
            }
        )
        (folder / split).mkdir(parents=True)
        pq.write_table(table, folder / split / "part-0.parquet", row_group_size=512)


def spec_of(data: Path) -> JobSpec:
    """Two copies of one shard that learn both labels."""
    return validate_spec(
        {
            "name": "clicks",
            "data": {
                "path": str(data),
                "label": {"column": "clicked"},
                "weight_column": "trust",
                "batch_size": 32,
            },
            "features": [
                {"name": "noise", "type": "dense"},
                {"name": "item", "type": "id", "table": "catalogue"},
            ],
            "embedding_tables": [
                {"name": "catalogue", "num_embeddings": NUM_ITEMS, "embedding_dim": 8}
            ],
            "model": {
                "arch": "dcn_v2",
                "dense_arch": {"layer_sizes": [8]},
                "over_arch": {"layer_sizes": [16, 2]},
                "tasks": [
                    {"name": "click", "loss": "bce", "metrics": ["logloss", "auc", "calibration"]},
                    {
                        "name": "value",
                        "loss": "mse",
                        "weight": 0.5,
                        "label": {"column": "value"},
                        "auc_threshold": 1.0,
                    },
                ],
            },
            "optimizer": {
                "sparse": {"lr": 0.2},
                "dense": {"lr": 0.02},
                "schedule": {"warmup_steps": 8, "decay": "cosine", "min_ratio": 0.1},
            },
            "parallelism": {"workers": 2, "shard_group_size": 1, "sync": {"every_steps": 4}},
            "training": {
                "epochs": 4,
                "report_every_steps": 32,
                "accumulate_steps": 2,
                "clip_norm": 1.0,
            },
            "checkpoint": {"every_steps": 64, "keep_last": 9},
        }
    )


def test_both_tasks_learn_from_the_rows_that_count_and_go_on_after_a_break(
    tmp_path: Path,
) -> None:
    write_data(tmp_path / "data")
    config = WorkerConfig(spec_of(tmp_path / "data"), tmp_path / "run", "job-test-a0", 0)
    straight = run_ranks(train_restored, 2, config)
    metrics = straight[0]["metrics"]
    assert metrics["validation/click/auc"] > 0.97
    assert metrics["validation/click/logloss"] < 0.3
    assert metrics["validation/click/calibration"] == pytest.approx(1, abs=0.1)
    assert metrics["validation/value/auc"] > 0.97
    assert metrics["validation/value/rmse"] < 0.5
    assert {"train/loss", "train/click/logloss", "train/value/mae"} <= set(metrics)
    assert straight[0]["state"].best <= metrics["validation/click/logloss"]
    for found in list_committed(RunDir(tmp_path / "run").checkpoints_dir):
        if found.commit.step > 64:
            (found.path / "COMMIT.json").unlink()
    resumed = run_ranks(train_restored, 2, next_run(config))
    assert resumed[0]["resumed_step"] == 64
    expected = assemble(straight)
    for name, table in assemble(resumed).items():
        np.testing.assert_allclose(table, expected[name], atol=1e-5, err_msg=name)
    assert resumed[0]["metrics"] == pytest.approx(metrics, rel=1e-3)
