"""Saves beside the training, damaged checkpoints and broken storage, on real gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.harness.ranks import run_ranks
from tests.harness.sessions import ask_to_stop, make_config
from tests.integration.ranks.checkpoint_cases import Sharding, whole_tables
from tests.integration.ranks.save_cases import (
    DAMAGE,
    SLOW_S,
    check_damage,
    close_in_the_middle,
    look_at_damage,
    open_unwritable,
    save_after_another_took_over,
    save_in_trouble,
    save_while_training,
    save_with_file_limit,
    start_on_unlike_mounts,
    stop_slowly,
    sweep_beside_another_group,
    train_over_a_failed_best_save,
    train_over_a_failed_save,
)
from trainer.checkpoint.files import list_committed
from trainer.failures import EndReason
from trainer.protocol.events import CheckpointCommitted, Metrics
from trainer.protocol.run_dir import RunDir

ONE_RANK = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
MIXED = Sharding(4, 2, ("data_parallel", "column_wise", "row_wise"), min_partition=8)


def _of_kind(kind: type, said: list[Any]) -> list[Any]:
    return [event for event in said if isinstance(event, kind)]


def test_a_save_holds_its_own_step_while_training_goes_on(tmp_path: Path) -> None:
    ranks = run_ranks(save_while_training, 4, MIXED, tmp_path)
    saved = whole_tables([rank["at_save"] for rank in ranks])
    trained_on = whole_tables([rank["after"] for rank in ranks])
    loaded = whole_tables([rank["loaded"] for rank in ranks])
    torch.testing.assert_close(loaded, saved, atol=0, rtol=0, equal_nan=True)
    assert not torch.equal(saved["movies"], trained_on["movies"])
    dense = [ranks[0][when]["dense"] for when in ("loaded", "at_save")]
    torch.testing.assert_close(*dense, atol=0, rtol=0)
    assert ranks[0]["said_meanwhile"] == 0
    said = ranks[0]["said"]
    assert [event.step for event in _of_kind(CheckpointCommitted, said)] == [2]
    (costs,) = _of_kind(Metrics, said)
    assert 0 < costs.values["checkpoint/stall_s"] < SLOW_S < costs.values["checkpoint/write_s"]
    assert not ranks[1]["said"], "rank 0 speaks for all"
    _check_written_once(list_committed(RunDir(tmp_path).checkpoints_dir)[0].path)
    staged = [piece for rank in ranks for piece in rank["staged"]]
    assert len(staged) == len(set(staged)), "memory is taken for what a rank writes"


def _check_written_once(folder: Path) -> None:
    """Files hold each piece once, and all ranks wrote some."""
    pieces = FileSystemReader(folder).read_metadata().storage_data.values()
    written = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert sum(piece.length for piece in pieces) == sum(written.values())
    assert {name[:4] for name in written} == {"__0_", "__1_", "__2_", "__3_"}


def test_a_save_waits_for_the_one_before_and_a_failed_one_is_said(tmp_path: Path) -> None:
    first, second = run_ranks(save_in_trouble, 2, tmp_path)
    assert min(first["waited_s"], second["waited_s"]) > SLOW_S / 2
    (note,) = first["notes"]
    assert "step-00000003-a0-r0 could not be written: OSError" in note
    assert "MB free at" in note
    assert second["notes"] == []
    for rank in (first, second):
        assert "step-00000005-a0-r0 could not be written" in rank["message"]
    committed = [event.step for event in _of_kind(CheckpointCommitted, first["said"])]
    assert committed == [1, 2, 4]
    folders = sorted(path.name for path in RunDir(tmp_path).checkpoints_dir.iterdir())
    assert folders == ["step-00000002-a0-r0", "step-00000004-a0-r0"]


def test_a_save_that_failed_is_made_again_at_a_sync_where_no_gradients_are_held(
    small_movielens: Path, tmp_path: Path
) -> None:
    settings = (
        *("checkpoint.every_steps=12", "checkpoint.keep_last=9", "checkpoint.asynchronous=false"),
        "training.max_steps=24",
    )
    sync = ("parallelism.sync.every_steps=3", "parallelism.dense=every_step")
    windows = (
        *("training.accumulate_steps=2", "training.report_every_steps=2"),
        "training.validate_every_steps=24",
    )
    config = make_config(small_movielens, tmp_path / "run", *settings, *sync, *windows)
    first, *_ = run_ranks(train_over_a_failed_save, 4, config, 12)
    assert first == [18, 24], "the save at step 12 failed: syncs are at 15, 18, windows end at 18"


def test_a_best_model_whose_save_failed_is_not_what_is_to_be_beaten(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        "parallelism.shard_group_size=1",
        *("parallelism.workers=2", "training.max_steps=16", "training.validate_every_steps=4"),
        *("checkpoint.every_steps=6", "checkpoint.keep_last=9", "checkpoint.asynchronous=false"),
    )
    found = {4: 3.0, 8: 1.0, 12: 2.0, 16: 2.5}
    first, second = run_ranks(train_over_a_failed_best_save, 2, config, 8, found)
    assert first == second
    assert [(each.step, each.best) for each, _ in first if each.is_best] == [(4, 3.0), (12, 2.0)]
    assert {each.best for each, _ in first if each.step > 12} == {2.0}
    earlier = {each.best for each, _ in first if each.step < 12}
    assert earlier == {3.0}, "also where one was saved later"
    told = {each.step: value for each, value in first}
    assert told == {4: 3.0, 6: None, 12: 2.0, 16: 2.5}, "what was found of another says nothing"


@pytest.mark.parametrize(("is_asked", "step"), [(True, 6), (False, 8)])
def test_a_stop_and_an_end_wait_for_their_save_longer_than_for_a_rank(
    small_movielens: Path, tmp_path: Path, is_asked: bool, step: int
) -> None:
    settings = ("resources.collective_timeout_s=1", "training.max_steps=8")
    config = make_config(small_movielens, tmp_path, *ONE_RANK, *settings)
    ((steps, num_beats),) = run_ranks(stop_slowly, 1, config, 2.0, is_asked)
    assert steps == [step]
    assert num_beats > 5, "so that it does not count as hanging"


def test_workers_whose_save_for_a_stop_fails_train_on_until_one_is_made(
    small_movielens: Path, tmp_path: Path
) -> None:
    two = ("parallelism.workers=2", "parallelism.shard_group_size=2", "parallelism.sync=null")
    config = make_config(small_movielens, tmp_path, *two, "checkpoint.every_steps=1000")
    files = ask_to_stop(config)
    assert run_ranks(train_over_a_failed_save, 2, config, 6) == [[11], [11]], "after a report each"
    assert files.stopping_path(0).exists()


def test_workers_whose_run_folder_another_attempt_took_save_and_clear_away_nothing(
    tmp_path: Path,
) -> None:
    (notes, refusal), (_, other) = run_ranks(save_after_another_took_over, 2, tmp_path)
    assert [each.commit.step for each in list_committed(RunDir(tmp_path).checkpoints_dir)] == [1]
    (note,) = notes
    for message in (note, refusal, other):
        assert "is job-t-a1's by now" in message


def test_an_end_waits_for_the_save_under_way(tmp_path: Path) -> None:
    assert run_ranks(close_in_the_middle, 2, tmp_path) == [1, 1]


def test_any_damage_makes_the_checkpoint_before_count_and_is_said(tmp_path: Path) -> None:
    first, second = run_ranks(look_at_damage, 2, tmp_path)
    check_damage(first)
    assert [found["steps"] for found in second] == [[1, 1]] * len(DAMAGE)


def test_a_file_that_cannot_grow_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    first, second = run_ranks(save_with_file_limit, 2, tmp_path, fresh=True)
    (note,) = first["notes"]
    assert "step-00000002-a0-r0 could not be written" in note
    assert "Earlier checkpoints are untouched" in note
    assert first["step"] == second["step"] == 1


def test_storage_that_takes_no_files_is_refused_at_the_start_on_every_rank(tmp_path: Path) -> None:
    RunDir(tmp_path).checkpoints_dir.touch()  # no folder: not even root may write there
    messages = run_ranks(open_unwritable, 2, tmp_path)
    assert len(set(messages)) == 1
    assert "checkpoints cannot be written" in messages[0]
    assert "make it writable" in messages[0]


def test_a_host_that_lacks_the_mount_is_named_and_damages_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(start_on_unlike_mounts, 3, tmp_path)
    for lone, few, unseen in ranks:
        assert (lone.reason, lone.blamed_host) == (EndReason.STORAGE_ERROR, "host-0")
        assert lone.message.startswith("host-1 does not see what host-0 writes to run/checkpoints")
        assert few.blamed_host == "host-1"
        assert "step-00000001-a0-r0 is not on" in unseen
    folder = tmp_path / "host-0/run/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-00000001-a0-r0"]


def test_a_group_leaves_what_another_may_be_writing(tmp_path: Path) -> None:
    (left,) = run_ranks(sweep_beside_another_group, 1, tmp_path)
    assert left == ["step-00000001-a0-r0-g0i0"]
