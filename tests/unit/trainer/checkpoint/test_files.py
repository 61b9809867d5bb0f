"""Commit markers and retention: what exists, what is garbage, what may go."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.files import (
    CheckpointGone,
    Commit,
    CommittedCheckpoint,
    RowOrder,
    beyond_retention,
    list_committed,
    matches,
    read_commit,
    remove_folder,
    remove_uncommitted,
    write_marker,
)
from trainer.checkpoint.manager import TrainState, state_of
from trainer.coordination.messages import EpochRows, Ledger
from trainer.data.position import position_of
from trainer.errors import StorageError
from trainer.protocol.run_dir import COMMIT_MARKER, FileRecord, file_record
from trainer.spec.training import CheckpointSpec


def commit(step: int, is_best: bool = False) -> Commit:
    return Commit(
        step=step,
        epoch=0,
        row=step * 8,
        rows_trained=step * 8,
        world_size=4,
        shard_group_size=2,
        placement="intra_host",
        time=float(step),
        moment_scale=2.0,
        row_order=RowOrder(80, "a digest", "another"),
        is_best=is_best,
        metrics={"validation/rmse": 0.9},
        files={"__0_0.distcp": FileRecord(3, "abc")},
    )


def add(folder: Path, step: int, is_best: bool = False) -> Path:
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    write_marker(path, commit(step, is_best))
    return path


def test_a_folder_without_a_whole_marker_does_not_exist(tmp_path: Path) -> None:
    kept, begun, damaged = add(tmp_path, 1), tmp_path / "step-00000002", add(tmp_path, 3)
    begun.mkdir()
    (damaged / COMMIT_MARKER).write_text('{"step": 3, "epo')
    assert [found.commit.step for found in list_committed(tmp_path)] == [1]
    assert list_committed(tmp_path / "nowhere") == []
    assert remove_uncommitted(tmp_path) == [damaged]
    assert sorted(tmp_path.iterdir()) == [kept, damaged]
    remove_folder(kept)
    assert list(tmp_path.iterdir()) == [damaged]


def test_a_checkpoint_that_is_half_deleted_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = add(tmp_path, 1)
    monkeypatch.setattr("trainer.checkpoint.files.shutil.rmtree", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        remove_folder(saved)
    assert saved.exists() and list_committed(tmp_path) == []


def test_files_of_a_deleted_checkpoint_that_stay_are_told_and_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = add(tmp_path, 1)
    (saved / "__0_0.distcp").touch()
    with monkeypatch.context() as busy:
        busy.setattr(os, "rmdir", Mock(side_effect=OSError(errno.EBUSY, "busy")))
        remove_folder(saved)
    assert f"files of {saved} cannot be removed" in caplog.text
    assert list_committed(tmp_path) == []
    remove_uncommitted(tmp_path)
    assert not saved.exists()


def test_a_file_that_a_network_disk_does_not_give_is_neither_damaged_nor_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = add(tmp_path, 7)

    def away(path: Path, *_args: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr("trainer.checkpoint.files.read_untrusted", away)
    with pytest.raises(StorageError, match=r"step-00000007 cannot be read .*Stale file handle"):
        list_committed(tmp_path)
    with pytest.raises(StorageError):
        remove_uncommitted(tmp_path)
    monkeypatch.setattr(Path, "open", away)
    with pytest.raises(StorageError):
        matches(saved, "__0_0.distcp", FileRecord(3, "abc"))


def test_what_is_missing_or_no_file_is_damage_where_its_marker_is_there(tmp_path: Path) -> None:
    saved = add(tmp_path, 7)
    assert not matches(saved, "__0_0.distcp", FileRecord(3, "abc"))
    os.mkfifo(saved / "pipe")
    for name in ("pipe", "../step-00000007/pipe", "/dev/zero", ".."):
        assert not matches(saved, name, FileRecord(3, "abc"))
    outside = tmp_path / "outside"
    outside.touch()
    assert not matches(saved, "../outside", file_record(outside))
    with pytest.raises(CheckpointGone, match=r"step-8 is not on .*neither __0_0\.distcp"):
        matches(tmp_path / "step-8", "__0_0.distcp", FileRecord(3, "abc"))


def test_a_marker_that_an_nfs_client_does_not_see_yet_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, cut_off = add(tmp_path, 7), tmp_path / "step-00000008"
    cut_off.mkdir()
    looked_at, exists = saved.stat().st_mtime_ns, Path.exists

    def remembered(path: Path) -> bool:
        """What the client knows of a folder until it has changed it."""
        is_new = path.name == COMMIT_MARKER and path.parent.stat().st_mtime_ns == looked_at
        return exists(path) and not is_new

    monkeypatch.setattr(Path, "exists", remembered)
    remove_uncommitted(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [COMMIT_MARKER, saved.name]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_marker_with_a_flipped_bit_is_as_good_as_none(place: float, bit: int) -> None:
    with TemporaryDirectory() as folder:
        path = add(Path(folder), 7)
        content = bytearray((path / COMMIT_MARKER).read_bytes())
        content[int(place * len(content))] ^= 1 << bit
        (path / COMMIT_MARKER).write_bytes(content)
        assert read_commit(path) is None
        assert remove_uncommitted(Path(folder)) == [path]


@pytest.mark.parametrize("content", [json.dumps(asdict(commit(7))), "[]"])
def test_a_marker_without_a_checksum_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / COMMIT_MARKER).write_text(content)
    assert read_commit(tmp_path) is None


def test_where_no_open_epoch_is_named_the_rows_before_the_position_are_done() -> None:
    assert state_of(commit(7)).ledger.open_epochs == (EpochRows(epoch=0, done=((0, 56),)),)


def test_a_marker_of_a_newer_version_is_read_without_what_that_added(tmp_path: Path) -> None:
    known = replace(commit(7), row_order=RowOrder(9, "digest"))
    document = asdict(known) | {"added": 1}
    document["row_order"]["added"] = 2
    document["sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    (tmp_path / COMMIT_MARKER).write_text(json.dumps(document))
    assert read_commit(tmp_path) == known


spans = st.lists(st.integers(0, 99), unique=True, max_size=8).map(
    lambda bounds: tuple(zip(*[iter(sorted(bounds))] * 2, strict=False))
)


@given(st.lists(spans, max_size=3), st.integers(0, 9))
def test_rows_done_out_of_turn_come_back_with_the_marker(epochs: list[Any], commits: int) -> None:
    open_epochs = tuple(EpochRows(epoch=5 + n, done=done) for n, done in enumerate(epochs) if done)
    position = position_of(Ledger(epoch=5, open_epochs=open_epochs))
    state = TrainState(step=3, reached=position, rows_trained=7, commit=commits, rows_skipped=2)
    place = {"epoch": position.epoch, "row": position.row, "open_epochs": state.ledger.open_epochs}
    saved = replace(commit(3), rows_trained=7, commit=commits, rows_skipped=2, **place)
    with TemporaryDirectory() as folder:
        write_marker(Path(folder), saved)
        found = read_commit(Path(folder))
    assert found is not None
    assert state_of(found) == state
    assert state_of(found).ledger == state.ledger


def test_what_an_earlier_attempt_or_run_saved_is_older_whatever_its_step(tmp_path: Path) -> None:
    names = ["step-00000300-a0-r1", "step-00000200-a1-r0", "step-00000110-a1-r1-g1i0"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        write_marker(tmp_path / name, commit(int(name[5:13])))
    assert [each.path.name for each in list_committed(tmp_path)] == names


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4), st.booleans())
def test_retention_keeps_the_newest_and_the_best(
    best_flags: list[bool], keep_last: int, keep_best: bool
) -> None:
    committed = [
        CommittedCheckpoint(Path(str(step)), replace(commit(step), is_best=is_best))
        for step, is_best in enumerate(best_flags)
    ]
    policy = CheckpointSpec(keep_last=keep_last, keep_best=keep_best)
    removed = beyond_retention(committed, policy)
    kept = [checkpoint for checkpoint in committed if checkpoint not in removed]
    assert kept[-keep_last:] == committed[-keep_last:]
    best = [checkpoint for checkpoint in committed if checkpoint.commit.is_best][-1:]
    assert not keep_best or set(map(id, best)) <= set(map(id, kept))
    assert len(kept) <= keep_last + 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 40))
def test_retention_keeps_one_for_each_multiple(
    gaps: list[int], keep_last: int, keep_every: int
) -> None:
    steps = list(accumulate(gaps))
    policy = CheckpointSpec(keep_last=keep_last, keep_best=False, keep_every_steps=keep_every)
    kept: list[CommittedCheckpoint] = []
    for step in steps:  # as a run does: after every save
        kept.append(CommittedCheckpoint(Path(str(step)), commit(step)))
        removed = beyond_retention(kept, policy)
        kept = [checkpoint for checkpoint in kept if checkpoint not in removed]
    found = [checkpoint.commit.step for checkpoint in kept]
    assert set(found) >= {step for step in steps if step % keep_every == 0}
    for multiple in range(keep_every, steps[-1] + 1, keep_every):
        reached = [step for step in steps if multiple <= step < multiple + keep_every]
        assert not reached or reached[0] in found
    assert len(found) <= keep_last + steps[-1] // keep_every
