"""A job whose data and checkpoints lie on S3, by the CLI on a real Ray, while the store is busy."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from service.schemas.jobs import JobDetail
from tests.conftest import EXAMPLE_SPEC
from tests.harness.object_store import ObjectStore, run_object_store
from tests.harness.stack import Stack
from tests.harness.wait import wait_for
from tests.integration.ranks.test_export import inputs_of, score_over_http
from trainer.protocol.run_dir import COMMIT_MARKER, RunDir
from trainer.storage import Location

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVERY = 20
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")
# Each kind of trouble now and then; what it does in masses is in test_checkpoint_s3.
TROUBLE: dict[str, Any] = {"rates": {"503": 0.03, "500": 0.02, "cut": 0.02, "reset": 0.01}}


@pytest.fixture
def store(stack: Stack) -> Iterator[ObjectStore]:
    """After the stack: neither service nor Ray have credentials for it in their environment."""
    with run_object_store() as store:
        yield store


def output_of(process: subprocess.Popen[str], timeout_s: float = 120) -> str:
    output, messages = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output + messages
    return output + messages


def run_command(store: ObjectStore) -> list[str]:
    changes = (
        f"data.path={store.url('movielens')}",
        f"checkpoint.path={store.url('runs')}",
        f"checkpoint.every_steps={EVERY}",
        "name=on-s3",
        "data.batch_size=32",
        "training.epochs=3",
        "training.report_every_steps=1",
        "training.validate_every_steps=1000",
        "parallelism.workers=2",
        "parallelism.shard_group_size=1",
    )
    sets = [word for change in changes for word in ("--set", change)]
    secrets = [word for name in SECRETS for word in ("--secret", name)]
    return ["run", str(EXAMPLE_SPEC), *sets, *secrets]


def job_of(stack: Stack, name: str) -> JobDetail:
    def newest() -> JobDetail | None:
        found = list(stack.client.iter_jobs(name=name))
        return stack.client.get_job(found[0].id) if found else None

    return wait_for(newest, f"job {name}", limit_s=60)


def ask_by_ids_and_by_raw_values(folder: Path, table: Any) -> list[dict[str, Any]]:
    """The same rows twice: as they were prepared, and with the raw numbers of their movies."""
    rows = inputs_of(folder, table)
    known = pq.read_table(folder / "vocabularies" / "vocab" / "movie_id.parquet").to_pylist()
    numbers = {entry["index"]: entry["value"] for entry in known}
    raw = [row | {"movie_id": numbers[row["movie_id"]]} for row in rows]
    return [{"rows": rows}, {"rows": raw, "raw": {"movie_id": "movie_id"}}]


def test_data_and_checkpoints_on_s3_through_a_kill_to_served_predictions(
    stack: Stack, store: ObjectStore, small_movielens: Path, tmp_path: Path
) -> None:
    csv = small_movielens.parent / "csv"
    prepare = ["data", "prepare", "movielens", str(csv), store.url("movielens")]
    with stack.shardloom(*prepare) as preparing:
        output_of(preparing)
    with (
        store.failing(**TROUBLE) as seen,
        stack.shardloom(*run_command(store)) as following,
    ):
        job = job_of(stack, "on-s3")
        reached = stack.wait_for_step(job.id, 2 * EVERY + 5, limit_s=240)
        os.kill(stack.pid(reached, "rank-1"), signal.SIGKILL)
        assert "training completed" in output_of(following, timeout_s=240)
    assert sum(seen.counts[fault] for fault in TROUBLE["rates"]) > 3, seen.counts

    runs = stack.timeline(job.id, "workers_started")
    assert [run["run_index"] for run in runs] == [0, 1]
    # One save may have been under way, whose marker was not written then.
    assert runs[1]["resumed_step"] >= max(EVERY, reached.progress.step - 2 * EVERY)
    run_dir = RunDir(Path(reached.run_dir))
    assert not run_dir.checkpoints_dir.exists(), "nothing lies on run storage"
    saved = stack.client.checkpoints(job.id)
    folder = Location.parse(store.url("runs")) / job.id / "checkpoints"
    markers = [file for file in folder.list(recursive=True) if file.name == COMMIT_MARKER]
    assert sorted(each.path for each in saved) == sorted(str(file.parent) for file in markers)
    with stack.shardloom("checkpoints", job.id) as listing:
        listed = output_of(listing)
    assert all(str(each.step) in listed for each in saved)

    exported = tmp_path / "export"
    with stack.shardloom("export", job.id, "--to", str(exported)) as exporting:
        output_of(exporting)
    table = pq.read_table(small_movielens / "validation")
    # 0 is what the vocabulary does not know.
    rows = table.filter(pc.greater(table["movie_id"], 0)).slice(0, 50)
    by_ids, by_raw = score_over_http(exported, ask_by_ids_and_by_raw_values(exported, rows))
    assert by_raw == by_ids
    assert len(set(by_ids)) > 10
