"""Criteo from raw files to a trained model."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
import torch
import yaml

from tests.conftest import REPO
from tests.harness.ranks import run_ranks
from tests.harness.sessions import config_of, open_session
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import SCHEMA
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
from trainer.datasets.inspect import inspect_data
from trainer.datasets.profile import find_data
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import load_spec
from trainer.training.worker import train

pytestmark = pytest.mark.slow


EXAMPLE = (REPO / "examples" / "criteo-dlrm.yaml").read_text()
DCN = ("model.arch=dcn_v2", "model.interaction_arch={num_layers: 2, low_rank_dim: 32}")
SHORT = (
    "data.batch_size=256",
    "parallelism.workers=2",
    "parallelism.shard_group_size=1",
    "training.validate_every_steps=1000",
    "checkpoint.every_steps=1000",
)


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """30 000 rows of two days, compressed."""
    folder = tmp_path_factory.mktemp("criteo") / "raw"
    options = CriteoGeneratorOptions(num_rows=30_000, max_ids=50, num_days=2, gzip=True)
    generate_criteo(folder, options)
    return folder


def train_example(overrides: tuple[str, ...], data: Path, run_dir: Path) -> dict[str, float]:
    """Train the whole example on one rank of a session; its final metrics."""
    torch.set_num_threads(1)
    spec = load_spec(EXAMPLE, [f"data.path={data}", *SHORT, *overrides])
    return train(open_session(config_of(spec, run_dir)))


@pytest.mark.parametrize("overrides", [(), DCN], ids=["dlrm", "dcn_v2"])
def test_an_example_learns_what_the_teacher_knows(tmp_path, overrides):
    raw, data = tmp_path / "raw", tmp_path / "data"
    options = CriteoGeneratorOptions(num_rows=60_000, max_ids=20)
    teacher = generate_criteo(raw, options)["parts"]["last_tenth"]
    prepare_criteo([raw], data, options=CriteoOptions(num_partitions=4))
    metrics, _ = run_ranks(train_example, 2, overrides, data, tmp_path / "run", timeout_s=200)
    assert metrics["validation/logloss"] == pytest.approx(metrics["validation/loss"], rel=1e-5)
    assert metrics["validation/calibration"] == pytest.approx(1, abs=0.15)
    # Nobody beats the teacher; most of what it knows is learned.
    assert teacher["ne"] < metrics["validation/ne"] < teacher["ne"] + 0.35 * (1 - teacher["ne"])
    assert 0.5 < metrics["validation/auc"] < teacher["auc"]


def train_suggested(data: Path, run_dir: Path) -> dict[str, float]:
    """Train DCN v2 on raw columns, with the features and tables that are suggested."""
    torch.set_num_threads(1)
    (found,) = find_data([str(data / "train")])
    parts = yaml.safe_load(inspect_data(found).suggestion.yaml())
    dim = parts["embedding_tables"][0]["embedding_dim"]
    document = yaml.safe_load(EXAMPLE) | parts
    layers = f"model.dense_arch.layer_sizes=[64, {dim}]"
    spec = load_spec(yaml.safe_dump(document), [f"data.path={data}", layers, *SHORT, *DCN])
    return train(open_session(WorkerConfig(spec, run_dir, "job-test-a0", 0)))


def test_raw_columns_in_parquet_are_trained_on_as_inspect_suggests(raw, tmp_path):
    for split, day in (("train", "day_0"), ("validation", "day_1")):
        clicks = pl.read_csv(
            raw / f"{day}.gz", separator="\t", has_header=False, schema=SCHEMA, quote_char=None
        )
        (tmp_path / "data" / split).mkdir(parents=True)
        clicks.write_parquet(tmp_path / "data" / split / "part.parquet", row_group_size=2000)
    metrics, _ = run_ranks(train_suggested, 2, tmp_path / "data", tmp_path / "run", timeout_s=200)
    # 15 000 rows teach little; what counts is that raw values arrive where they should.
    assert metrics["validation/ne"] < 0.985
