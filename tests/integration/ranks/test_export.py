"""A job that was trained on real ranks, exported, and served over HTTP: the same predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.harness.chaos import elastic_config
from tests.harness.elastic import ElasticHarness
from tests.harness.ranks import run_ranks
from tests.harness.sessions import make_config, open_session
from tests.harness.wait import free_port, scaled, wait_for
from trainer.checkpoint.files import list_committed
from trainer.data.batches import ValidationBatches
from trainer.data.decode import layout_of as columns_of
from trainer.data.parquet import ParquetSource
from trainer.data.reader import encodings_digest
from trainer.export.exporter import export
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.training.worker import train

SHORT = ("training.max_steps=20", "checkpoint.every_steps=20", "training.validate_every_steps=20")
IN_SHARDS = ("parallelism.workers=2", "parallelism.shard_group_size=2", "parallelism.sync=null")


def train_and_predict(config: WorkerConfig) -> dict[str, Any]:
    """Train to the end; what this rank's model predicts in stars for its share of the rows."""
    session = open_session(config)
    metrics = train(session)
    spec, folder = config.spec, Path(config.spec.data.path) / "validation"
    source = ParquetSource(folder, [column.name for column in columns_of(spec).columns])
    found = []
    session.model.eval()
    for batch, _ in ValidationBatches(source, spec, session.groups.rank, session.world_size):
        with torch.no_grad():
            outputs = session.model(batch)[1]
        stars = outputs * batch.label_scale + batch.label_offset
        label = batch.label * batch.label_scale + batch.label_offset
        rows = torch.cat([stars, label], dim=1)[batch.weight > 0]
        found.append(rows.numpy())
    return {"rows": np.concatenate(found), "metrics": metrics}


def score_over_http(folder: Path, questions: list[dict[str, Any]]) -> list[list[float]]:
    """Answers of `shardloom serve` to some bodies of /v1/predict."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "service.cli", "serve", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:

        def answers() -> bool:
            assert process.poll() is None, "the scorer ended"
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/healthz", timeout=scaled(2)).is_success
            return False

        try:
            wait_for(answers, "an answer of the scorer", 60)
            said = [
                httpx.post(f"{url}/v1/predict", json=each, timeout=scaled(60)) for each in questions
            ]
        finally:
            process.terminate()
    assert [answer.status_code for answer in said] == [200] * len(said), said[-1].text
    return [[row["rating"] for row in answer.json()["predictions"]] for answer in said]


def inputs_of(folder: Path, table: pa.Table) -> list[dict[str, Any]]:
    """The rows of a table as an exported model takes them."""
    names = [each["name"] for each in json.loads((folder / "features.json").read_text())["inputs"]]
    return table.select(names).to_pylist()


def test_a_trained_job_is_exported_and_served_with_the_same_predictions(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path / "run", *SHORT, *IN_SHARDS)
    ranks = run_ranks(train_and_predict, 2, config)
    spec_path = RunDir(tmp_path / "run").attempt("job-test-a0").spec_path
    spec_path.write_text(config.spec.model_dump_json())
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "service.cli", "export", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, "--to", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rmse" in done.stdout
    for saved in list_committed(RunDir(tmp_path / "run").checkpoints_dir):
        assert saved.commit.row_order.encodings == encodings_digest(config.spec)

    table = pq.read_table(small_movielens / "validation")
    rows = inputs_of(folder, table)
    first, rest = score_over_http(folder, [{"rows": rows[:100]}, {"rows": rows[100:]}])
    served = np.array(first + rest)
    # Ranks took shares of the rows; the label tells which rows are which no better than sorting.
    trained = np.concatenate([rank["rows"] for rank in ranks])
    assert len(trained) == len(served) == len(table)
    np.testing.assert_allclose(np.sort(served), np.sort(trained[:, 0]), rtol=0, atol=2e-3)
    rmse = float(np.sqrt(np.mean((served - table["rating"].to_numpy()) ** 2)))
    assert rmse == pytest.approx(ranks[0]["metrics"]["validation/rmse"], abs=2e-4)
    report = json.loads((folder / "report.json").read_text())
    assert report["recorded_metrics"]["validation/rmse"] == pytest.approx(rmse, abs=2e-4)
    assert report["tasks"]["rating"]["max_abs_error"] < 2e-3
    assert report["num_rows"] == len(table)


@pytest.mark.slow
def test_a_job_whose_groups_are_failure_domains_is_exported_as_it_was_validated(
    small_movielens: Path, tmp_path: Path
) -> None:
    # Two groups of two ranks: tables in shards, copies that meet at syncs.
    config = elastic_config(small_movielens, tmp_path / "run", 2, 2, "training.epochs=1")
    with ElasticHarness(config, tmp_path / "harness", 2) as harness:
        harness.wait_to_end()
    run_dir = RunDir(tmp_path / "run")
    spec_path = run_dir.attempt(config.attempt_id).spec_path
    spec_path.write_text(config.spec.model_dump_json())
    report = export(run_dir, tmp_path / "out", quantize="none")
    assert config.spec.parallelism.failure_domain == "replica_group"
    assert report.tasks["rating"].max_abs_error < 1e-4
    recorded = report.recorded_metrics["validation/rmse"]
    assert report.tasks["rating"].export_metric == pytest.approx(recorded, abs=1e-4)
