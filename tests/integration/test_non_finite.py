"""A loss that becomes NaN: the job fails, or goes back and leaves the rows out that did it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import make_config, next_run, train_session
from trainer import failures
from trainer.elastic.faults import VARIABLE
from trainer.events import RowsSkipped, read_record
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir
from trainer.worker import prepare_process, run_worker

POISON = {"kind": "nan", "group": 0, "rank": 1, "step": 13, "phase": "lookup"}
SETTINGS = ("training.max_steps=25", "checkpoint.every_steps=10")


def run_into_nan(config: WorkerConfig) -> tuple[str, str]:
    """The loop on a rank whose loss becomes NaN at step 13; reason and message of its end."""
    os.environ[VARIABLE] = json.dumps([POISON])
    try:
        run_worker(config)
    except failures.WorkerFailure as failure:
        return failure.reason, failure.message
    return "", ""


def fail_then_go_on(config: WorkerConfig, failing: WorkerConfig) -> dict[str, Any]:
    """A job that ends at a NaN; another one that leaves its rows out in its second life."""
    failed = run_into_nan(failing)
    first = run_into_nan(config)
    again = next_run(config)
    prepare_process(again)  # the fault was of the first life
    return {"failed": failed, "first": first, "end": train_session(again)["state"]}


def test_a_nan_fails_the_job_or_costs_it_the_rows_since_the_last_finite_report(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens, tmp_path / "skip", *SETTINGS, "training.on_non_finite=skip"
    )
    failing = replace(
        make_config(small_movielens, tmp_path / "fail", *SETTINGS), attempt_id="job-fail-a0"
    )
    ranks = run_ranks(fail_then_go_on, 4, config, failing)
    reasons = {rank["failed"][0] for rank in ranks}
    assert reasons == {failures.NON_FINITE}
    assert "training.on_non_finite: skip" in ranks[0]["failed"][1]
    assert {rank["first"][0] for rank in ranks} == {failures.ROWS_SKIPPED}
    # Reports come every 5 steps of 4 x 32 rows: the loss was finite at step 10, NaN by 15.
    (skipped,) = _skipped(RunDir(tmp_path / "skip"), config.attempt_id)
    assert (skipped.epoch, skipped.start, skipped.stop) == (0, 1280, 1920)
    for rank in ranks:
        state = rank["end"]
        assert state.step == 25
        assert state.rows_skipped == 640
        assert state.position.row == 25 * 128 + 640
        assert state.rows_trained == 25 * 128


def _skipped(run_dir: RunDir, attempt_id: str) -> list[RowsSkipped]:
    outbox = run_dir.attempt(attempt_id).outbox_dir
    lines = [line for path in outbox.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    records = [read_record(line, now=0.0) for line in lines]
    return [record for record in records if isinstance(record, RowsSkipped)]
