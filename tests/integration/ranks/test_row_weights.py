"""Rows of unequal weight train one objective, however many ranks, groups and steps share them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.harness.elastic import ElasticHarness
from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble, load_session, train_session
from tests.harness.small_model import dlrm_spec
from tests.harness.wait import scaled
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec

NUM_ROWS, NUM_USERS, STEP_ROWS = 64, 8, 32


def write_rows(folder: Path, bad_rows: tuple[int, ...] = (), num_ranks: int = 1) -> Path:
    """Rows of which two in each step of 32 weigh a lot, both on the first of two ranks.

    They lie so that `num_ranks` ranks, each reading its own part, take the same 32 in a step.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=NUM_ROWS).astype(np.float32)
    label = x * 2
    label[list(bad_rows)] = np.nan
    weight = np.where(np.arange(NUM_ROWS) % STEP_ROWS < 2, 5.0, 0.5).astype(np.float32)
    table = {"user": rng.integers(0, NUM_USERS, NUM_ROWS), "age": x, "label": label, "w": weight}
    (folder / "train").mkdir(parents=True)
    parts = np.arange(NUM_ROWS).reshape(-1, num_ranks, STEP_ROWS // num_ranks).transpose(1, 0, 2)
    pq.write_table(pa.table(table).take(parts.ravel()), folder / "train" / "part-0.parquet")
    return folder


def job(data: Path, run_dir: Path, num_ranks: int, **changes: Any) -> WorkerConfig:
    """Two steps of 32 rows over all rows by plain SGD."""
    source = {
        "path": str(data),
        "split": {"train": "train", "validation": None},
        "label": {"column": "label"},
        "batch_size": STEP_ROWS // num_ranks,
        "shuffle": False,
    }
    spec = dlrm_spec(
        [{"name": "users", "embedding_dim": 4, "num_embeddings": NUM_USERS}],
        [{"name": "user", "type": "id", "table": "users"}],
        {"sparse": {"name": "sgd", "lr": 0.1}, "dense": {"name": "sgd", "lr": 0.1}},
        # Copies of the tables, which start alike at any number of ranks; shards would not.
        {"workers": num_ranks, "shard_group_size": 1, "sync": {"every_steps": 1}},
        batch_size=STEP_ROWS // num_ranks,
        over_arch=(1,),
        data=source | changes,
        training={"max_steps": 2},
    )
    return WorkerConfig(spec, run_dir, "job-test-a0", 0)


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
    data = [write_rows(tmp_path / f"data-{ranks}", bad_rows, ranks) for ranks in (1, 2)]
    alone = run_ranks(train_session, 1, job(data[0], tmp_path / "one", 1, **changes))
    shared = run_ranks(train_session, 2, job(data[1], tmp_path / "two", 2, **changes))
    assert_same_dense(shared[0], alone[0])
    torch.testing.assert_close(assemble(shared), assemble(alone), atol=1e-6, rtol=1e-5)
    assert shared[0]["metrics"]["train/loss"] == pytest.approx(alone[0]["metrics"]["train/loss"])


def frozen(config: WorkerConfig, **sections: Any) -> WorkerConfig:
    """The job with tables that never change, as those learn from each batch by itself."""
    document = config.spec.model_dump(mode="json", exclude_unset=True)
    document["optimizer"]["sparse"]["lr"] = 1e-30
    for name, changes in sections.items():
        document[name] = document.get(name, {}) | changes
    return replace(config, spec=validate_spec(document))


def assert_same_dense(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    torch.testing.assert_close(found["dense"], wanted["dense"], atol=1e-6, rtol=1e-5)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data")


def large_batches(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """One rank that takes 32 rows a step; it moves the dense part by more than rounding."""
    config = frozen(job(data, run_dir, 1, **changes))
    (trained,) = run_ranks(train_session, 1, config)
    return trained


def test_ranks_that_accumulate_train_as_on_one_large_batch(data: Path, tmp_path: Path) -> None:
    whole = large_batches(data, tmp_path / "whole", weight_column="w")
    # Two ranks of 4 rows, four steps to a window. Two heavy rows are in the first of each.
    two = write_rows(tmp_path / "two", num_ranks=2)
    parts = frozen(
        job(two, tmp_path / "parts", 2, batch_size=4, weight_column="w"),
        training={"max_steps": 8, "accumulate_steps": 4, "report_every_steps": 4},
        checkpoint={"every_steps": 4},
    )
    for rank in run_ranks(train_session, 2, parts):
        assert_same_dense(rank, whole)


def test_the_short_last_step_of_an_epoch_counts_for_its_rows_alone(
    data: Path, tmp_path: Path
) -> None:
    whole = large_batches(data, tmp_path / "whole", batch_size=NUM_ROWS)
    # Steps of 48 and 16 rows.
    parts = frozen(
        job(data, tmp_path / "parts", 2, batch_size=24),
        training={"max_steps": 2, "accumulate_steps": 2},
        checkpoint={"every_steps": 2},
    )
    assert whole["state"].step == 1
    for rank in run_ranks(train_session, 2, parts):
        assert_same_dense(rank, whole)


@pytest.mark.slow
def test_groups_that_accumulate_train_as_on_one_large_batch(data: Path, tmp_path: Path) -> None:
    whole = large_batches(data, tmp_path / "whole", weight_column="w")
    assert whole["state"].step == NUM_ROWS // STEP_ROWS
    config = frozen(
        job(data, tmp_path / "run", 2, batch_size=4, weight_column="w"),
        # A lease is 16 rows of a group: its four steps are a window.
        parallelism={"placement": "inter_host", "sync": {"every_steps": 4}},
        training={"max_steps": 8, "accumulate_steps": 4, "report_every_steps": 4},
        checkpoint={"every_steps": 4},
        recovery={
            "start_grace_s": scaled(30),
            "heartbeat_timeout_s": scaled(4),
            "exchange_timeout_s": scaled(4),
        },
    )
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        harness.wait_to_end()
    (saved,) = run_ranks(load_session, 1, frozen(job(data, tmp_path / "run", 1)))
    assert_same_dense(saved, whole)
