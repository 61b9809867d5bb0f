"""The MovieLens transformer example on gloo ranks: 2D equals 1D, resume, early stopping."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.harness.elastic import ElasticHarness
from tests.harness.elastic_checks import check_copies
from tests.harness.ranks import run_ranks
from tests.harness.sessions import assert_alike, config_of, next_run, told, train_session
from tests.harness.wait import scaled
from trainer.checkpoint.files import list_committed
from trainer.layout.cost import cpu_cluster
from trainer.protocol.events import Metrics, Note, Progress, WorkersStarted
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document

pytestmark = pytest.mark.slow


EXAMPLE = REPO / "examples" / "movielens-transformer.yaml"
PLAIN_SGD = (
    "data.batch_size=16",
    "model.transformer.dropout=0.2",
    "optimizer={sparse: {name: sgd, lr: 0.05}, dense: {name: sgd, lr: 0.05}}",
    "parallelism.sync.every_steps=1",
    "training.report_every_steps=4",
    "checkpoint.every_steps=4",
)


def example_config(data: Path, run_dir: Path, *overrides: str) -> WorkerConfig:
    """The example on small data, with histories of five movies."""
    document = apply_overrides(parse_document(EXAMPLE.read_text()), [f"data.path={data}"])
    document["training"].pop("early_stopping", None)
    (history,) = (f for f in document["features"] if f["type"] == "sequence")
    history["max_length"] = 5
    return config_of(validate_spec(apply_overrides(document, overrides)), run_dir)


def resumed_step(run_dir: Path) -> int:
    return told(run_dir, WorkersStarted)[-1].resumed_step


def go_on(halfway: Path, data: Path, run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """What four ranks hold after four more steps."""
    shutil.copytree(halfway, run_dir)
    wanted = (*PLAIN_SGD, "training.max_steps=8", *overrides)
    ranks = run_ranks(train_session, 4, next_run(example_config(data, run_dir, *wanted)))
    assert resumed_step(run_dir) == 4
    assert {rank["state"].step for rank in ranks} == {8}
    return ranks


def assert_is_predicted(started: WorkersStarted, spec: JobSpec) -> None:
    """The workers told what the planner says of the tables as they lie."""
    found = started.prediction
    assert found is not None and found.samples_per_s > 0
    assert {len(held) for held in found.memory_bytes.values()} == {started.shard_group_size}
    held = sum(found.memory_bytes["tables"]) + sum(found.memory_bytes["optimizer"])
    assert held == spec.table_bytes
    assert found.step_s["sync"] > 0


def test_2d_equals_1d_and_a_resumed_run_the_one_without_a_break(
    small_movielens: Path, tmp_path: Path
) -> None:
    halfway = tmp_path / "halfway"
    config = example_config(small_movielens, halfway, *PLAIN_SGD, "training.max_steps=8")
    cluster = cpu_cluster(workers_per_host=4, memory_bytes=2**31)
    whole = run_ranks(train_session, 4, replace(config, cluster=vars(cluster)))
    started = told(halfway, WorkersStarted)[-1]
    assert_is_predicted(started, config.spec)
    for found in list_committed(RunDir(halfway).checkpoints_dir):
        if found.commit.step > 4:
            shutil.rmtree(found.path)
    in_2d = go_on(halfway, small_movielens, tmp_path / "2d")
    assert_alike(in_2d, whole)
    moved = set.union(*(rank["moved"] for rank in whole))
    spec = example_config(small_movielens, tmp_path).spec
    assert moved == {table.name for table in spec.embedding_tables}, "every table learns"
    dense = in_2d[0]["dense"]
    assert any("history_encoder.encoder" in name for name in dense)
    in_1d = go_on(halfway, small_movielens, tmp_path / "1d", "parallelism.shard_group_size=4")
    assert_alike(in_1d, in_2d)
    assert in_2d[0]["metrics"]["validation/auc"] == in_2d[3]["metrics"]["validation/auc"]


TWO_COPIES = ("parallelism.workers=2", "parallelism.shard_group_size=1")
STANDING_STILL = (
    "training.epochs=50",
    "training.max_steps=null",
    "training.accumulate_steps=2",
    "training.clip_norm=0.5",
    "training.report_every_steps=20",
    "training.validate_every_steps=8",
    "training.early_stopping={patience: 2, min_delta: 9}",
    "checkpoint.every_steps=1000",
    "checkpoint.keep_best=false",
)


def test_a_run_whose_validation_stands_still_ends_and_stays_ended(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(small_movielens, tmp_path, *TWO_COPIES, *STANDING_STILL)
    ranks = run_ranks(train_session, 2, config)
    assert {rank["state"].step for rank in ranks} == {24}, "the first sets the mark, two follow"
    assert ranks[0]["metrics"]["train/loss"] > 0
    (saved,) = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert saved.commit.step == 24
    ending = "early stopping at step 24: 2 validations in a row"
    assert any(ending in note.message for note in told(tmp_path, Note))
    progress = told(tmp_path, Progress)[-1]
    assert (progress.step, progress.total_steps) == (24, 24)
    reported = [each.step for each in told(tmp_path, Metrics) if "train/loss" in each.values]
    assert reported == [20, 24], "also what came after the last report that was due"
    timed = [each.step for each in told(tmp_path, Metrics) if "speed/rows_per_s" in each.values]
    assert timed == [20], "the rest is too short to say how fast the job was"
    again = run_ranks(train_session, 2, next_run(config))
    assert resumed_step(tmp_path) == 24
    assert {rank["state"].step for rank in again} == {24}
    patient = ("training.early_stopping={patience: 3, min_delta: 9}",)
    more = example_config(small_movielens, tmp_path, *TWO_COPIES, *STANDING_STILL, *patient)
    longer = run_ranks(train_session, 2, replace(more, run_index=2))
    assert {rank["state"].step for rank in longer} == {32}, "the count came with the checkpoint"


def test_independent_groups_accumulate_and_end_early_together(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(
        small_movielens,
        tmp_path / "run",
        "data.batch_size=16",
        *TWO_COPIES,
        "parallelism.placement=inter_host",
        f"recovery.heartbeat_timeout_s={scaled(4)}",
        f"recovery.exchange_timeout_s={scaled(4)}",
        *STANDING_STILL,
    )
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        harness.wait_to_end()
        committed = harness.of("committed")
    last = max(committed, key=lambda record: record["commit"])
    assert last["plateau"]["num_validations"] == 2
    assert last["metrics"]["validation/rmse"] > 0
    assert check_copies(committed) > 0
    newest = list_committed(RunDir(tmp_path / "run").checkpoints_dir)[-1]
    assert newest.commit.plateau is not None
    assert newest.commit.plateau.num_validations == 2
