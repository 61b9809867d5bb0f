"""Damaged checkpoints and broken storage: the one before is used, and it is said."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gloo import run_ranks
from tests.integration.save_cases import (
    DAMAGE,
    look_at_damage,
    open_where_nothing_can_be_written,
    save_with_file_limit,
    sweep_beside_another_group,
)
from trainer.events import CheckpointDeleted, Note
from trainer.run_dir import RunDir


def test_any_damage_makes_the_checkpoint_before_count_and_is_said(tmp_path: Path) -> None:
    first, second = run_ranks(look_at_damage, 2, tmp_path)
    assert [found["kind"] for found in first] == list(DAMAGE)
    for found in first:
        assert found["step"] == 1, found["kind"]
        assert len(found["folders"]) == (1 if found["kind"] == "missing marker" else 2)
        if found["kind"] == "missing marker":
            assert not found["said"], "an unfinished save is no news"
            continue
        assert "damaged-step-00000002-a0-r0" in found["folders"], found["kind"]
        (note,) = [event for event in found["said"] if isinstance(event, Note)]
        assert note.level == "error"
        assert "step-00000002-a0-r0 is damaged" in note.message
        deleted = [event.step for event in found["said"] if isinstance(event, CheckpointDeleted)]
        assert deleted == [2], found["kind"]
    assert [found["step"] for found in second] == [1] * len(DAMAGE)


def test_a_file_that_cannot_grow_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    first, second = run_ranks(save_with_file_limit, 2, tmp_path)
    (note,) = first["notes"]
    assert "step-00000002-a0-r0 could not be written" in note
    assert "Earlier checkpoints are untouched" in note
    assert first["step"] == second["step"] == 1


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose checkpoints cannot be written, not even by root."""
    folder = RunDir(tmp_path).checkpoints_dir
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield tmp_path
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs, and root may write anywhere")
    yield tmp_path
    subprocess.run(["umount", str(folder)], check=True)


def test_read_only_storage_is_refused_at_the_start_on_every_rank(read_only_folder: Path) -> None:
    messages = run_ranks(open_where_nothing_can_be_written, 2, read_only_folder)
    assert len(set(messages)) == 1
    assert "checkpoints cannot be written" in messages[0]
    assert "make it writable" in messages[0]


def test_a_group_leaves_what_another_may_be_writing(tmp_path: Path) -> None:
    (left,) = run_ranks(sweep_beside_another_group, 1, tmp_path)
    assert left == ["step-00000001-a0-r0-g0i0"]
