"""Durable checkpoints: torch.distributed.checkpoint files, and a marker written last.

A checkpoint *exists* once its COMMIT.json is on storage (`trainer.elastic.marker`); a folder
without one is garbage of a save that was cut off. That storage is a disk or an object store
(`trainer.elastic.checkpoint_folder`), which is the same to all that is here. What is in the files,
and how any sharding loads what any other saved, is the business of
`trainer.elastic.training_state`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils.serialization import config as serialization_config

from trainer.data.errors import DataError, SourceMissingError, StorageError, StorageRefusedError
from trainer.data.storage import Location
from trainer.elastic.checkpoint_folder import (
    FAULTS,
    Folder,
    explain,
    find_folders,
    has_marker,
    make_writable,
    record_of,
    remove_folder,
    set_aside,
    size_of,
)
from trainer.elastic.checkpoint_io import RemoteWriter, reader_for
from trainer.elastic.marker import Commit, FileRecord, file_record, read_commit, write_marker

__all__ = [
    "CheckpointError",
    "CheckpointMisfit",
    "CheckpointRefused",
    "CommittedCheckpoint",
    "folder_name",
    "is_intact",
    "list_committed",
    "list_with_bad_marker",
    "load",
    "newest_intact",
    "prepare_folder",
    "remove_uncommitted",
    "save",
    "set_aside",
    "step_of",
    "superseded",
    "write_commit",
]

logger = logging.getLogger(__name__)

_METADATA_FILE = ".metadata"

Result = TypeVar("Result")


class CheckpointError(Exception):
    """A save or a load failed; the message names folder, cause and mend."""


class CheckpointMisfit(CheckpointError):
    """A checkpoint holds other tables, another model or other optimizers than the job."""


class CheckpointRefused(CheckpointError):
    """Storage refuses checkpoints for a reason that no retry helps: credentials, bucket."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that exists."""

    path: Folder
    commit: Commit


def folder_name(step: int, run_label: str) -> str:
    """Name of the checkpoint that the workers of `run_label` write at `step`."""
    return f"step-{step:08d}-{run_label}"


def step_of(name: str) -> int:
    """The step in a name that `folder_name` gave, also of a damaged checkpoint; 0 in others."""
    found = re.match(r"step-(\d+)", name)
    return int(found[1]) if found else 0


def list_committed(
    checkpoints_dir: Folder, is_left_out: Callable[[str], bool] = lambda name: False
) -> list[CommittedCheckpoint]:
    """Checkpoints that exist, oldest step first, but for those whose name `is_left_out`.

    Raises `StorageError` where remote storage is away, as all does that looks for checkpoints.
    """
    found = []
    for folder in find_folders(checkpoints_dir):
        if is_left_out(folder.name):
            continue
        commit = read_commit(folder)
        if commit is not None:
            found.append(CommittedCheckpoint(folder, commit))
    return sorted(found, key=lambda found: (found.commit.step, found.commit.time))


def list_with_bad_marker(checkpoints_dir: Folder) -> list[Folder]:
    """Folders that have a marker which cannot be read."""
    return [
        folder
        for folder in find_folders(checkpoints_dir)
        if has_marker(folder) and read_commit(folder) is None
    ]


def superseded(
    committed: Sequence[CommittedCheckpoint],
    keep_last: int,
    keep_best: bool,
    keep_every_steps: int | None = None,
) -> list[CommittedCheckpoint]:
    """Which of `committed` (oldest first) retention removes.

    The newest `keep_last` stay, the best one, and the first at or after each multiple of
    `keep_every_steps`: at that multiple exactly, wherever a checkpoint falls on it.
    """
    kept = list(committed[-keep_last:])
    if keep_best:
        kept += [checkpoint for checkpoint in committed if checkpoint.commit.is_best][-1:]
    if keep_every_steps:
        kept += _first_of_each(committed, keep_every_steps)
    return [checkpoint for checkpoint in committed if checkpoint not in kept]


def _first_of_each(
    committed: Sequence[CommittedCheckpoint], every_steps: int
) -> list[CommittedCheckpoint]:
    first: dict[int, CommittedCheckpoint] = {}
    for checkpoint in committed:
        first.setdefault(checkpoint.commit.step // every_steps, checkpoint)
    return [checkpoint for multiple, checkpoint in first.items() if multiple > 0]


def remove_uncommitted(
    checkpoints_dir: Folder, is_garbage: Callable[[str], bool] = lambda name: True
) -> None:
    """Delete folders of saves that were cut off, of those whose name `is_garbage`."""
    for folder in find_folders(checkpoints_dir):
        if is_garbage(folder.name) and not has_marker(folder):
            remove_folder(folder)


def save(
    folder: Folder,
    state: dict[str, Any],
    planner: SavePlanner | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, FileRecord]:
    """Write `state` to `folder` and return its files. Collective over `group` (default: all ranks).

    A `planner` of its own may bring the tensors along; `state` is then empty. `group` spans all
    ranks. Raises `CheckpointError` on every rank when any of them failed; the folder is then
    removed. An error of the group itself is a RuntimeError, on any rank.
    """
    try:
        # A third of a save's CPU time, for what SHA-256 finds as well.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            if isinstance(folder, Location):
                writer = RemoteWriter(folder)
                dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
                return _gather_records(lambda: writer.records, group)
            dcp.save(state, checkpoint_id=folder, planner=planner, process_group=group)
        return _gather_records(lambda: _records_on_disk(folder), group)
    except (CheckpointException, *FAULTS) as error:
        _discard(folder, error)


def write_commit(folder: Folder, commit: Commit, group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 puts the marker in place. Collective; raises `CheckpointError` on every rank."""
    try:
        of_first(lambda: write_marker(folder, commit), group)
    except FAULTS as error:
        _discard(folder, error)


def of_first(look: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What rank 0 finds, on every rank; storage that failed it fails them all. Collective.

    The others wait as long as `group` lets them, which should be longer than storage is waited for.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = look()
        except FAULTS as error:
            box[1] = _as_storage_fault(error)
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _as_storage_fault(error: BaseException) -> BaseException:
    # What a checkpoint lacks was there when it was looked at: no fault of the user's data.
    return StorageError(str(error)) if isinstance(error, SourceMissingError) else error


def _discard(folder: Folder, error: BaseException) -> NoReturn:
    cause = explain(folder.parent, _cause(error))
    message = f"checkpoint {folder.name} could not be written: {cause}"
    if dist.get_rank() == 0:
        with suppress(*FAULTS):  # garbage without a marker; the next attempt clears it away
            remove_folder(folder)
    raise CheckpointError(f"{message}. Earlier checkpoints are untouched") from error


def _gather_records(
    look: Callable[[], dict[str, FileRecord]], group: dist.ProcessGroup | None
) -> dict[str, FileRecord]:
    share: dict[str, FileRecord] | OSError
    try:
        share = look()
    except OSError as error:
        share = error
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share, group=group)
    for other in shares:
        if isinstance(other, OSError):
            raise other
    return {name: record for other in shares for name, record in other.items()}


def _records_on_disk(folder: Path) -> dict[str, FileRecord]:
    """Files that this rank wrote: on shared storage a host may see those of others late."""
    rank = dist.get_rank()
    metadata = [folder / _METADATA_FILE] if rank == 0 else []
    paths = sorted(folder.glob(f"__{rank}_*")) + metadata
    return {path.name: file_record(path) for path in paths}


def _cause(error: BaseException) -> BaseException:
    causes = getattr(error, "failures", None) or {0: (error, None)}
    return next(iter(causes.values()))[0]


def prepare_folder(checkpoints_dir: Folder, group: dist.ProcessGroup | None = None) -> None:
    """Make the folder of checkpoints and try to write there. Collective: rank 0 does it.

    Raises `CheckpointError` on every rank, so that a job does not train for hours before its first
    checkpoint fails; `CheckpointRefused` where it never could be written.
    """
    try:
        of_first(lambda: make_writable(checkpoints_dir), group)
    except FAULTS as error:
        kind = CheckpointRefused if isinstance(error, StorageRefusedError) else CheckpointError
        cause = explain(checkpoints_dir, error)
        raise kind(f"checkpoints cannot be written: {cause}") from error


def is_intact(checkpoint: CommittedCheckpoint, group: dist.ProcessGroup | None = None) -> bool:
    """Whether every file still has its recorded size and checksum. Collective: ranks share work.

    `group` spans all ranks and waits for the one that reads most, or whose storage is away.
    Raises `StorageError` on every rank where remote storage is away, which proves nothing.
    """
    names = sorted(checkpoint.commit.files)[dist.get_rank() :: dist.get_world_size()]
    mine: bool | DataError
    try:
        mine = all(matches(checkpoint.path, n, checkpoint.commit.files[n]) for n in names)
    except DataError as error:
        mine = error
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, mine, group=group)
    for verdict in verdicts:
        if isinstance(verdict, DataError):
            raise verdict
    return all(verdicts)


def matches(folder: Folder, name: str, record: FileRecord) -> bool:
    """Whether a file is as it was recorded; raises `StorageError` where that cannot be told."""
    try:
        return size_of(folder, name) == record.size_bytes and record_of(folder, name) == record
    except OSError:
        return False


def newest_intact(
    checkpoints_dir: Folder,
    is_left_out: Callable[[str], bool] = lambda name: False,
    group: dist.ProcessGroup | None = None,
) -> tuple[CommittedCheckpoint | None, list[CommittedCheckpoint]]:
    """Newest checkpoint that exists and is undamaged, and the damaged ones after it.

    Collective over `group` (all ranks): rank 0's listing counts, without those whose name
    `is_left_out`.
    """
    damaged: list[CommittedCheckpoint] = []
    committed = of_first(lambda: list_committed(checkpoints_dir, is_left_out), group)
    for checkpoint in reversed(committed):
        if is_intact(checkpoint, group):
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def load(folder: Folder, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` in place from `folder`, and replace its objects.

    Collective over `group`, which spans all ranks.

    Raises `CheckpointMisfit` when the checkpoint holds other tables or shapes, and `StorageError`
    where remote storage is away.
    """
    try:
        dcp.load(state, storage_reader=reader_for(folder), process_group=group)
    except (CheckpointException, OSError) as error:
        if isinstance(cause := _cause(error), DataError):
            raise _as_storage_fault(cause) from error
        raise CheckpointMisfit(
            f"checkpoint {folder.name} does not fit this model: {_cause(error)}; was the spec "
            "changed?"
        ) from error
