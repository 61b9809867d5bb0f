"""The job domain's resize on real gloo ranks: workers save when asked, fewer of them go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import make_config, next_run, train_session
from trainer.data.manifest import load_manifest
from trainer.elastic import stop_request
from trainer.elastic.checkpoint import list_committed
from trainer.elastic.stop_request import StopRequest
from trainer.run_dir import RunDir


def test_workers_that_are_asked_to_stop_save_and_fewer_train_every_row_that_is_left(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        "training.epochs=1",
        "checkpoint.every_steps=1000",
        "parallelism.workers={min: 2, max: 4}",
    )
    files = RunDir(tmp_path).attempt(config.attempt_id)
    files.root.mkdir(parents=True)
    stop_request.ask(files, StopRequest(run_index=0, cause="request"))
    four = replace(config, spec=config.spec.with_workers(4))
    stopped = run_ranks(train_session, 4, four)
    assert stop_request.has_stopped(files, 0)
    report_step = config.spec.training.report_every_steps
    assert {rank["state"].step for rank in stopped} == {report_step}
    (saved,) = list_committed(RunDir(tmp_path).checkpoints_dir)
    assert saved.commit.step == report_step

    two = next_run(replace(config, spec=config.spec.with_workers(2)))
    resumed = run_ranks(train_session, 2, two)
    assert not stop_request.has_stopped(files, 1), "the request was for the run before"
    num_rows = load_manifest(small_movielens).splits["train"].num_rows
    assert {rank["state"].rows_trained for rank in resumed} == {num_rows}
