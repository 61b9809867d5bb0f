"""Going on from a checkpoint: data that changed, and checkpoints that count no more."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from tests.unit.trainer.export.export_case import spec_document
from trainer.checkpoint import remote_io, resume, save_load
from trainer.checkpoint.files import (
    CheckpointGone,
    Commit,
    CommittedCheckpoint,
    RowOrder,
    checkpoints_of,
    matches,
    read_commit,
    remove_folder,
    write_marker,
)
from trainer.checkpoint.manager import CheckpointManager, resumed_state, state_of
from trainer.checkpoint.resume import Restored, find_source
from trainer.checkpoint.save_load import CheckpointMismatch
from trainer.coordination.messages import EpochRows
from trainer.data.manifest import Manifest, write_manifest
from trainer.data.parquet import ParquetSource
from trainer.data.position import DataPosition
from trainer.data.reader import encodings_digest, order_digest
from trainer.errors import StorageError
from trainer.protocol.events import CheckpointCommitted
from trainer.protocol.outbox import EventWriter
from trainer.protocol.requests import Rewind, read_rewind
from trainer.protocol.run_dir import RunDir, file_record
from trainer.spec import validate_spec
from trainer.spec.training import WarmStartSpec

WRITTEN = RowOrder(90, "as it was")
CHANGED = RowOrder(110, "another")


def commit(epoch: int, row: int, **more: object) -> Commit:
    """A marker of a run that stands at `row` of `epoch`, of 90 rows."""
    place = Commit(5, epoch, row, 90 * epoch + row, 2, 1, "intra_host", 0.0, 2.0, WRITTEN)
    return replace(place, **more)


BEGUN = EpochRows(epoch=0, done=((8, 16),))
DONE, NEXT = EpochRows(epoch=0, done=((0, 90),)), EpochRows(epoch=1, done=((3, 5),))


@pytest.mark.parametrize(
    "inside",
    [
        commit(0, 50),
        commit(1, 1),
        commit(0, 0, open_epochs=(BEGUN,)),
        commit(0, 90, open_epochs=(DONE, NEXT)),
        commit(0, 0, open_epochs=(NEXT,)),
    ],
)
def test_half_an_epoch_of_other_rows_is_refused(inside: Commit) -> None:
    assert resumed_state(inside, WRITTEN) == state_of(inside)
    with pytest.raises(CheckpointMismatch, match=r"90 rows then, 110 now.*warm_start"):
        resumed_state(inside, CHANGED)


def test_between_epochs_other_rows_are_taken_from_their_start() -> None:
    for between in (commit(0, 90), commit(1, 0)):
        assert resumed_state(between, CHANGED).position == DataPosition(epoch=1)


def test_ids_that_stand_for_other_values_are_refused_between_epochs_too() -> None:
    old, new = RowOrder(90, "as it was", "ids"), RowOrder(90, "as it was", "other ids")
    for place in (commit(0, 50, row_order=old), commit(1, 0, row_order=old)):
        assert resumed_state(place, old) == state_of(place)
        with pytest.raises(CheckpointMismatch, match="prepared anew, with other vocabularies"):
            resumed_state(place, new)
    # An early marker does not say.
    assert resumed_state(commit(0, 50), replace(WRITTEN, encodings="ids")) == state_of(
        commit(0, 50)
    )


def test_ids_have_a_digest_of_their_vocabularies_and_of_what_they_are_hashed_by(
    tmp_path: Path,
) -> None:
    words = {"name": "word", "type": "id", "table": "users", "vocabulary": {}}
    document = spec_document(tmp_path)
    spec = validate_spec(document | {"features": [*document["features"], words]})
    (tmp_path / "vocab").mkdir()
    content = {"source": "s", "splits": {}, "columns": {}, "statistics": {}}
    found, ab, ba = [], ["a", "b"], ["b", "a"]
    for num_buckets, values, seed in ((10, ab, 0), (11, ab, 0), (11, ba, 0), (11, ba, 1)):
        vocabulary = pa.table({"value": values, "index": [1, 2]})
        pq.write_table(vocabulary, tmp_path / "vocab" / "word.parquet")
        made = {"vocab_sizes": {"user": num_buckets}, "options": {"seed": seed}, **content}
        write_manifest(tmp_path, Manifest(**made))
        assert encodings_digest(spec) == encodings_digest(spec)
        found.append(encodings_digest(spec))
    (tmp_path / "manifest.json").unlink()
    assert len({*found, encodings_digest(spec)}) == 5


def digest(
    folder: Path, group_rows: int = 10, seed: int = 0, shuffle: bool = True, **names: int
) -> str:
    """Of a folder with files of so many rows each."""
    folder.mkdir()
    for name, num_rows in names.items():
        table = pa.table({"x": list(range(num_rows))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=group_rows)
    document = spec_document(folder) | {"training": {"seed": seed}}
    document["data"]["shuffle"] = shuffle
    return order_digest(ParquetSource(folder, ["x"]), validate_spec(document))


def test_a_warm_start_from_data_with_other_vocabularies_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(WRITTEN, encodings="those of yesterday")
    found = CommittedCheckpoint(tmp_path / "step-5", commit(0, 50, row_order=made))
    monkeypatch.setattr(resume, "warm_start", lambda *_: found)
    checkpoints = SimpleNamespace(newest=lambda: None, group=None, runs_dir=tmp_path)

    def restored(row_order: RowOrder, tables: tuple[str, ...] | None = None) -> Restored:
        warm = SimpleNamespace(warm_start=WarmStartSpec(path=str(tmp_path), tables=tables))
        return resume.restore(SimpleNamespace(checkpoint=warm), checkpoints, row_order, None, None)

    assert restored(made).level == "info"
    today = replace(CHANGED, encodings="those of today")
    assert restored(today).level == "warning"
    assert "other vocabularies" in restored(today).message
    assert restored(today, tables=("users",)).level == "info", "they were chosen"


def test_moments_that_are_loaded_become_as_large_as_those_of_the_replicas_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, optimizers = CommittedCheckpoint(tmp_path, commit(0, 50, moment_scale=2.0)), Mock()
    monkeypatch.setattr(resume, "load_state", optimizers.load)
    monkeypatch.setattr(resume, "load_packed", lambda *_: {})
    spec: Any = SimpleNamespace(moment_scale=6.0)
    checkpoints: Any = SimpleNamespace(newest=lambda: found, group=None)
    resume.restore(spec, checkpoints, WRITTEN, Mock(), optimizers)
    assert [name for name, *_ in optimizers.mock_calls] == ["load", "rescale_moments"]
    optimizers.rescale_moments.assert_called_once_with(3.0)


def test_a_checkpoint_that_stays_but_cannot_be_loaded_is_not_tried_again(tmp_path: Path) -> None:
    found = CommittedCheckpoint(tmp_path, commit(0, 50))
    load = Mock(side_effect=[CheckpointGone(), None])
    with pytest.raises(CheckpointGone):
        resume._load_first(lambda: found, load)


@pytest.mark.usefixtures("one_rank")
def test_a_description_that_storage_does_not_give_during_a_load_is_no_fault_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_load.save(tmp_path, {"weight": torch.ones(3)})
    away = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(remote_io, "read_untrusted", Mock(side_effect=away))
    with pytest.raises(StorageError, match=r"cannot be read .*Stale file handle"):
        save_load.load(tmp_path, {"weight": torch.zeros(3)})


def test_whatever_moves_rows_changes_the_digest(tmp_path: Path) -> None:
    before = digest(tmp_path / "a", one=30, two=20)
    assert digest(tmp_path / "elsewhere", one=30, two=20) == before
    others = {
        digest(tmp_path / "b", one=30, two=20, more=20),
        digest(tmp_path / "f", shuffle=False, one=30, two=20),
        digest(tmp_path / "c", one=30, three=20),
        digest(tmp_path / "d", group_rows=5, one=30, two=20),
        digest(tmp_path / "e", seed=1, one=30, two=20),
    }
    assert len(others | {before}) == 6


CHOSEN = Rewind(checkpoint="step-00000200-a1-r0", attempt_index=3)


def test_a_rewind_leaves_what_earlier_attempts_saved_later() -> None:
    later = ("step-00000300-a1-r0", "step-00000300-a2-r1-g0i0", "step-00000200-a2-r0")
    for name in (*later, "step-00000100-a2-r0"):
        assert CHOSEN.supersedes(name)
    # The chosen one counts, those before, those of the new line, and what is no checkpoint.
    kept = ("step-00000200-a1-r0", "step-00000100-a0-r0", "step-00000300-a3-r0")
    for name in (*kept, "step-00000250-a4-r0", "damaged-step-00000300-a1-r0", "ray"):
        assert not CHOSEN.supersedes(name)


def test_without_a_readable_choice_the_newest_counts(tmp_path: Path) -> None:
    path = tmp_path / "rewind.json"
    assert read_rewind(path) is None
    path.write_text("{")
    assert read_rewind(path) is None
    path.write_text(CHOSEN.model_dump_json())
    assert read_rewind(path) == CHOSEN
    (tmp_path / "link").symlink_to(path)
    assert read_rewind(tmp_path / "link") is None


def test_a_choice_that_storage_does_not_give_is_not_passed_over(
    tmp_path: Path, saved: list[Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = OSError(errno.ESTALE, "stale")
    monkeypatch.setattr("trainer.protocol.requests.read_untrusted", Mock(side_effect=stale))
    with pytest.raises(OSError, match="stale"):
        find_source(tmp_path, tmp_path / "runs")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_warm_start_takes_no_checkpoint_that_a_rewind_left_behind(
    tmp_path: Path, is_apart: bool
) -> None:
    names = ("step-00000100-a1-r0", "step-00000200-a1-r0", "step-00000300-a2-r0")
    run_dir = RunDir(tmp_path / "runs" / "job-1")
    folder = checkpoints_of(run_dir.root, str(tmp_path / "apart") if is_apart else None)
    for name in names:
        (folder / name).mkdir(parents=True)
        write_marker(folder / name, commit(1, 0))
    run_dir.root.mkdir(parents=True, exist_ok=True)
    assert find_source(folder.parent, run_dir.runs_dir).path.name == names[2]
    run_dir.rewind_path.write_text(CHOSEN.model_dump_json())
    for path in (folder.parent, folder):
        assert find_source(path, run_dir.runs_dir).path.name == CHOSEN.checkpoint
    # By its own path it can be had.
    assert find_source(folder / names[2], run_dir.runs_dir).path.name == names[2]


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    """Two whole checkpoints."""
    folders = [tmp_path / f"step-0000000{step}-a1-r0" for step in (1, 2)]
    return [save_file(folder) for folder in folders]


def save_file(folder: Path) -> Path:
    """A whole checkpoint there."""
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"abc")
    write_marker(folder, commit(1, 0, files={"file": file_record(folder / "file")}))
    return folder


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_one_rank_lists_and_another_does_not_see_is_not_passed_over(
    saved: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matches_without_mount(folder: Path, *file: Any) -> bool:
        if folder == saved[1]:
            raise CheckpointGone(folder.name)
        return matches(folder, *file)

    monkeypatch.setattr(save_load, "matches", matches_without_mount)
    with pytest.raises(CheckpointGone):
        find_source(tmp_path, tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_is_removed_while_it_is_checked_is_followed_by_the_one_before(
    saved: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matches_after_retention(*file: Any) -> bool:
        remove_folder(saved[1])
        return matches(*file)

    monkeypatch.setattr(save_load, "matches", matches_after_retention)
    found, damaged = save_load.newest_intact(tmp_path)
    assert found and (found.path, damaged) == (saved[0], [])


def manager_of(run_dir: RunDir, said: list[Any]) -> CheckpointManager:
    """As the only rank of attempt 3 of a job has it."""
    spec = validate_spec(spec_document(run_dir.root))
    attempt = {"attempt_id": "job-1-a3", "group": None}
    config: Any = SimpleNamespace(run_dir=run_dir.root, spec=spec, **attempt)
    cpu = torch.device("cpu")
    groups: Any = SimpleNamespace(rank=0, sites=(), device=cpu, long_timeout_group=None)
    return CheckpointManager(config, groups, said.append, WRITTEN)


def tell_of(saved: Path, run_dir: RunDir, attempt_id: str) -> None:
    told = CheckpointCommitted(time=0, step=100, path=str(saved), size_bytes=3, duration_s=1)
    EventWriter(run_dir.attempt(attempt_id).stream_path("workers-0")).write(told)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("damage", [remove_folder, lambda chosen: (chosen / "file").unlink()])
def test_a_rewind_to_what_is_gone_or_damaged_begins_nowhere_else(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_dir = RunDir(tmp_path / "job-1")
    names = ("step-00000100-a1-r0", CHOSEN.checkpoint, "step-00000300-a1-r0")
    before, chosen, later = [run_dir.checkpoints_dir / name for name in names]
    for folder in (before, chosen, later):
        save_file(folder)
    run_dir.rewind_path.write_text(CHOSEN.model_dump_json())
    checkpoints = manager_of(run_dir, [])
    assert checkpoints.newest().path == chosen
    damage(chosen)
    for _ in range(2):
        with pytest.raises(CheckpointMismatch, match=f"{chosen.name}, .* is gone or damaged"):
            checkpoints.newest()
    assert read_commit(later)
    new = save_file(run_dir.checkpoints_dir / "step-00000210-a3-r0")
    assert checkpoints.newest().path == new
    # Once there was one after the rewind, retention may have removed the chosen one.
    tell_of(new, run_dir, "job-1-a3")
    (new / "file").unlink()
    assert checkpoints.newest().path == before


@pytest.mark.usefixtures("one_rank")
def test_a_job_that_has_saved_does_not_begin_anew_where_its_storage_is_not_mounted(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path / "job-1")
    assert manager_of(run_dir, []).newest() is None
    saved = save_file(run_dir.checkpoints_dir / "step-00000100-a2-r0")
    tell_of(saved, run_dir, "job-1-a2")
    mounted = run_dir.checkpoints_dir.rename(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is empty, though the job has saved"):
        manager_of(run_dir, []).newest()
    run_dir.checkpoints_dir.rmdir()
    mounted.rename(run_dir.checkpoints_dir)
    (saved / "file").write_bytes(b"abd")
    for _ in range(2):
        assert manager_of(run_dir, []).newest() is None, "damaged and set aside, but there"
