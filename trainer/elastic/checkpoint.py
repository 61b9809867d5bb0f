"""Durable checkpoints: torch.distributed.checkpoint files, and a marker written last.

A checkpoint *exists* once its COMMIT.json is on storage (`trainer.elastic.marker`); a folder
without one is garbage of a save that was cut off. What is in the files, and how any sharding loads
what any other saved, is the business of `trainer.elastic.training_state`.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.utils.serialization import config as serialization_config

from trainer.elastic.marker import Commit, FileRecord, file_record, read_commit, write_marker
from trainer.run_dir import COMMIT_MARKER

logger = logging.getLogger(__name__)

DAMAGED_PREFIX = "damaged-"
_METADATA_FILE = ".metadata"


class CheckpointError(Exception):
    """A save or a load failed; the message names folder, cause and mend."""


class CheckpointMisfit(CheckpointError):
    """A checkpoint holds other tables, another model or other optimizers than the job."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that exists."""

    path: Path
    commit: Commit


def folder_name(step: int, run_label: str) -> str:
    """Name of the checkpoint that the workers of `run_label` write at `step`."""
    return f"step-{step:08d}-{run_label}"


def step_of(name: str) -> int:
    """The step in a name that `folder_name` gave, also of a damaged checkpoint; 0 in others."""
    found = re.match(r"step-(\d+)", name)
    return int(found[1]) if found else 0


def list_committed(
    checkpoints_dir: Path, is_left_out: Callable[[str], bool] = lambda name: False
) -> list[CommittedCheckpoint]:
    """Checkpoints that exist, oldest step first, but for those whose name `is_left_out`."""
    found = []
    for folder in _folders(checkpoints_dir):
        if is_left_out(folder.name):
            continue
        commit = read_commit(folder)
        if commit is not None:
            found.append(CommittedCheckpoint(folder, commit))
    return sorted(found, key=lambda found: (found.commit.step, found.commit.time))


def list_with_bad_marker(checkpoints_dir: Path) -> list[Path]:
    """Folders that have a marker which cannot be read."""
    return [
        folder
        for folder in _folders(checkpoints_dir)
        if (folder / COMMIT_MARKER).exists() and read_commit(folder) is None
    ]


def _folders(checkpoints_dir: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, without those set aside."""
    if not checkpoints_dir.is_dir():
        return []
    return [
        path
        for path in checkpoints_dir.iterdir()
        if path.is_dir() and not path.name.startswith(DAMAGED_PREFIX)
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


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, marker first, so that a half-deleted one never counts."""
    (folder / COMMIT_MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_uncommitted(
    checkpoints_dir: Path, is_garbage: Callable[[str], bool] = lambda name: True
) -> None:
    """Delete folders of saves that were cut off, of those whose name `is_garbage`."""
    for folder in _folders(checkpoints_dir):
        if not (folder / COMMIT_MARKER).exists() and is_garbage(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def save(
    folder: Path,
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
            dcp.save(state, checkpoint_id=folder, planner=planner, process_group=group)
        records = _gather_records(folder, group)
    except (CheckpointException, OSError) as error:
        _discard(folder, error)
    return records


def write_commit(folder: Path, commit: Commit, group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 puts the marker in place. Collective; raises `CheckpointError` on every rank."""
    box: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_marker(folder, commit)
        except OSError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0, group=group)
    if box[0] is not None:
        _discard(folder, box[0])


def _discard(folder: Path, error: BaseException) -> NoReturn:
    message = f"checkpoint {folder.name} could not be written: {_explain(folder.parent, error)}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    raise CheckpointError(f"{message}. Earlier checkpoints are untouched") from error


def _gather_records(folder: Path, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    share: dict[str, FileRecord] | OSError
    try:
        share = {path.name: file_record(path) for path in _written_here(folder)}
    except OSError as error:
        share = error
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share, group=group)
    for other in shares:
        if isinstance(other, OSError):
            raise other
    return {name: record for other in shares for name, record in other.items()}


def _written_here(folder: Path) -> list[Path]:
    """Files that this rank wrote: on shared storage a host may see those of others late."""
    rank = dist.get_rank()
    metadata = [folder / _METADATA_FILE] if rank == 0 else []
    return sorted(folder.glob(f"__{rank}_*")) + metadata


def _explain(checkpoints_dir: Path, error: BaseException) -> str:
    """The cause of `error`, the room that is left, and what to do."""
    cause = _cause(error)
    return (
        f"{type(cause).__name__}: {cause} ({_free_space(checkpoints_dir)}); free space, make it "
        "writable, or point the service's runs folder at a larger disk"
    )


def _cause(error: BaseException) -> BaseException:
    causes = getattr(error, "failures", None) or {0: (error, None)}
    return next(iter(causes.values()))[0]


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free at {folder}"
    except OSError as error:
        return f"{folder} cannot be looked at: {error}"


def prepare_folder(checkpoints_dir: Path) -> None:
    """Make the folder of checkpoints and try to write there. Collective: rank 0 does it.

    Raises `CheckpointError` on every rank, so that a job does not train for hours before its first
    checkpoint fails.
    """
    box: list[str | None] = [None]
    if dist.get_rank() == 0:
        probe = checkpoints_dir / ".probe"
        try:
            checkpoints_dir.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink(missing_ok=True)  # another group may probe, too
        except OSError as error:
            box = [f"checkpoints cannot be written: {_explain(checkpoints_dir, error)}"]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise CheckpointError(box[0])


def is_intact(checkpoint: CommittedCheckpoint) -> bool:
    """Whether every file still has its recorded size and checksum. Collective: ranks share work."""
    names = sorted(checkpoint.commit.files)[dist.get_rank() :: dist.get_world_size()]
    mine = all(_matches(checkpoint.path / n, checkpoint.commit.files[n]) for n in names)
    verdicts: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, mine)
    return all(verdicts)


def _matches(path: Path, record: FileRecord) -> bool:
    try:
        return path.stat().st_size == record.size_bytes and file_record(path) == record
    except OSError:
        return False


def newest_intact(
    checkpoints_dir: Path, is_left_out: Callable[[str], bool] = lambda name: False
) -> tuple[CommittedCheckpoint | None, list[CommittedCheckpoint]]:
    """Newest checkpoint that exists and is undamaged, and the damaged ones after it.

    Collective: rank 0's listing counts, without those whose name `is_left_out`.
    """
    is_first = dist.get_rank() == 0
    box: list[Any] = [list_committed(checkpoints_dir, is_left_out) if is_first else None]
    dist.broadcast_object_list(box, src=0)
    damaged: list[CommittedCheckpoint] = []
    for checkpoint in reversed(box[0]):
        if is_intact(checkpoint):
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither loaded nor counted, nor lost."""
    folder.rename(folder.with_name(f"{DAMAGED_PREFIX}{folder.name}"))


def load(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` in place from `folder`, and replace its objects. Collective.

    Raises `CheckpointMisfit` when the checkpoint holds other tables or shapes.
    """
    try:
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, OSError) as error:
        raise CheckpointMisfit(
            f"checkpoint {folder.name} does not fit this model: {_cause(error)}; was the spec "
            "changed?"
        ) from error
