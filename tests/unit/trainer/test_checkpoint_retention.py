"""Commit markers and retention: what exists, what is garbage, what may go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainer.elastic.checkpoint import (
    CommittedCheckpoint,
    list_committed,
    remove_checkpoint,
    remove_uncommitted,
    superseded,
)
from trainer.elastic.marker import Commit, FileRecord, file_record, read_commit, write_marker
from trainer.run_dir import COMMIT_MARKER


def commit(step: int, is_best: bool = False) -> Commit:
    """A marker of a small run."""
    return Commit(
        step=step,
        epoch=0,
        row=step * 8,
        rows_trained=step * 8,
        world_size=4,
        shard_group_size=2,
        placement="intra_host",
        time=float(step),
        is_best=is_best,
        metrics={"validation/rmse": 0.9},
        files={"__0_0.distcp": FileRecord(3, "abc")},
    )


def add(folder: Path, step: int, is_best: bool = False) -> Path:
    """A committed checkpoint on disk."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_marker(path, commit(step, is_best))
    return path


def test_a_marker_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_marker(tmp_path, commit(7))
    assert read_commit(tmp_path) == commit(7)
    assert commit(7).size_bytes == 3


def test_a_folder_without_a_marker_does_not_exist(tmp_path: Path) -> None:
    add(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    assert [found.commit.step for found in list_committed(tmp_path)] == [1]


def test_a_torn_marker_is_as_good_as_none(tmp_path: Path) -> None:
    path = add(tmp_path, 1)
    (path / COMMIT_MARKER).write_text('{"step": 1, "epo')
    assert list_committed(tmp_path) == []


def test_a_run_without_checkpoints_lists_none(tmp_path: Path) -> None:
    assert list_committed(tmp_path / "nowhere") == []


def test_only_garbage_is_swept(tmp_path: Path) -> None:
    kept = add(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    remove_uncommitted(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_removed_checkpoint_is_gone(tmp_path: Path) -> None:
    remove_checkpoint(add(tmp_path, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_has_another_record(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    before = file_record(path)
    path.write_bytes(b"abd")
    assert file_record(path) != before


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4), st.booleans())
def test_retention_keeps_the_newest_and_the_best(
    best_flags: list[bool], keep_last: int, keep_best: bool
) -> None:
    committed = [
        CommittedCheckpoint(Path(str(step)), replace(commit(step), is_best=is_best))
        for step, is_best in enumerate(best_flags)
    ]
    removed = superseded(committed, keep_last, keep_best)
    kept = [checkpoint for checkpoint in committed if checkpoint not in removed]
    assert kept[-keep_last:] == committed[-keep_last:]
    best = [checkpoint for checkpoint in committed if checkpoint.commit.is_best][-1:]
    assert not keep_best or set(map(id, best)) <= set(map(id, kept))
    assert len(kept) <= keep_last + 1
