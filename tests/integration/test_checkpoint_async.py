"""Saves beside the training on real gloo ranks: what they hold, how they fail, what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.integration.checkpoint_cases import Sharding, whole_tables
from tests.integration.gloo import run_ranks
from tests.integration.save_cases import (
    SLOW_S,
    close_in_the_middle,
    save_in_trouble,
    save_while_training,
)
from trainer.elastic.checkpoint import list_committed
from trainer.events import CheckpointCommitted, Metrics
from trainer.run_dir import RunDir

MIXED = Sharding(4, 2, ("data_parallel", "column_wise", "row_wise"), min_partition=8)


def _of_kind(kind: type, said: list[Any]) -> list[Any]:
    return [event for event in said if isinstance(event, kind)]


def test_a_save_holds_its_own_step_while_training_goes_on(tmp_path: Path) -> None:
    ranks = run_ranks(save_while_training, 4, MIXED, tmp_path)
    saved = whole_tables([rank["at_save"] for rank in ranks])
    trained_on = whole_tables([rank["after"] for rank in ranks])
    for name, values in whole_tables([rank["loaded"] for rank in ranks]).items():
        assert torch.equal(values.nan_to_num(), saved[name].nan_to_num()), name
    assert not torch.equal(saved["movies"], trained_on["movies"])
    for name, value in ranks[0]["loaded"]["dense"].items():
        assert torch.equal(value, ranks[0]["at_save"]["dense"][name]), name
    assert ranks[0]["said_meanwhile"] == 0
    said = ranks[0]["said"]
    assert [event.step for event in _of_kind(CheckpointCommitted, said)] == [2]
    (costs,) = _of_kind(Metrics, said)
    assert 0 < costs.values["checkpoint/stall_s"] < SLOW_S < costs.values["checkpoint/write_s"]
    assert not ranks[1]["said"], "rank 0 speaks for all"
    _check_written_once(list_committed(RunDir(tmp_path).checkpoints_dir)[0].path)


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


def test_an_end_waits_for_the_save_under_way(tmp_path: Path) -> None:
    assert run_ranks(close_in_the_middle, 2, tmp_path) == [1, 1]
