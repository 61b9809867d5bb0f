"""Criteo from raw files to a trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import REPO
from tests.harness.ranks import run_ranks
from tests.harness.sessions import config_of, open_session
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
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
