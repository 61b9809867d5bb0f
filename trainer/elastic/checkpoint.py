"""Durable checkpoints: torch.distributed.checkpoint files, and a marker written last.

A checkpoint *exists* once its COMMIT.json is on storage. The marker names step, layout, data
position and the size and SHA-256 of every file; a folder without one is garbage of a save that was
cut off. What is in the files, and how any sharding loads what any other saved, is the business of
`trainer.elastic.training_state`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainer.run_dir import COMMIT_MARKER

logger = logging.getLogger(__name__)

DAMAGED_PREFIX = "damaged-"


class CheckpointError(Exception):
    """A save or a load failed; the message names folder, cause and mend."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """The marker: what a checkpoint holds.

    `step`, `epoch` and `row` are the position after the last trained step; `rows_trained` counts
    all rows ever trained; `best` is the best validation value so far, if any. `moment_scale` is c
    of the run that wrote it (None: an early version, which did not say).
    """

    step: int
    epoch: int
    row: int
    rows_trained: int
    world_size: int
    shard_group_size: int
    placement: str
    time: float
    is_best: bool = False
    best: float | None = None
    moment_scale: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint that exists."""

    path: Path
    commit: Commit


def read_commit(folder: Path) -> Commit | None:
    """The marker in `folder`; None when there is none or it is damaged."""
    try:
        document = json.loads((folder / COMMIT_MARKER).read_text())
        files = {name: FileRecord(**record) for name, record in document.pop("files").items()}
        return Commit(**document, files=files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("checkpoint marker in %s is damaged and ignored: %s", folder, error)
        return None


def write_commit(folder: Path, commit: Commit) -> None:
    """Rank 0 puts the marker in place. Collective; raises `CheckpointError` on every rank."""
    box: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            write_marker(folder, commit)
        except OSError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        _discard(folder, box[0])


def write_marker(folder: Path, commit: Commit) -> None:
    """Put the marker in place: whole and on disk, or not at all."""
    temporary = folder / f".{COMMIT_MARKER}.tmp"
    with temporary.open("w") as file:
        json.dump(asdict(commit), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / COMMIT_MARKER)
    fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_committed(checkpoints_dir: Path) -> list[CommittedCheckpoint]:
    """Checkpoints that exist, oldest step first."""
    found = []
    for folder in checkpoints_dir.iterdir() if checkpoints_dir.is_dir() else ():
        is_candidate = folder.is_dir() and not folder.name.startswith(DAMAGED_PREFIX)
        commit = read_commit(folder) if is_candidate else None
        if commit is not None:
            found.append(CommittedCheckpoint(folder, commit))
    return sorted(found, key=lambda found: (found.commit.step, found.commit.time))


def superseded(
    committed: Sequence[CommittedCheckpoint], keep_last: int, keep_best: bool
) -> list[CommittedCheckpoint]:
    """Which of `committed` (oldest first) retention removes: all but the newest and the best."""
    kept = list(committed[-keep_last:])
    if keep_best:
        kept += [checkpoint for checkpoint in committed if checkpoint.commit.is_best][-1:]
    return [checkpoint for checkpoint in committed if checkpoint not in kept]


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, marker first, so that a half-deleted one never counts."""
    (folder / COMMIT_MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_uncommitted(checkpoints_dir: Path) -> None:
    """Delete folders of saves that were cut off."""
    for folder in checkpoints_dir.iterdir() if checkpoints_dir.is_dir() else ():
        if folder.is_dir() and not (folder / COMMIT_MARKER).exists():
            shutil.rmtree(folder, ignore_errors=True)


def file_record(path: Path) -> FileRecord:
    """Size and SHA-256 of one file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def save(folder: Path, state: dict[str, Any]) -> dict[str, FileRecord]:
    """Write `state` to `folder` and return its files. Collective over all ranks.

    Raises `CheckpointError` on every rank when any of them failed; the folder is then removed.
    """
    try:
        dcp.save(state, checkpoint_id=folder)
        # Only now is the metadata written on every rank's view, and each hashes a share of files.
        records = _gather_records(folder)
    except (CheckpointException, OSError) as error:
        _discard(folder, error)
    return records


def _discard(folder: Path, error: BaseException) -> NoReturn:
    message = _explain(folder, error)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    raise CheckpointError(message) from error


def _gather_records(folder: Path) -> dict[str, FileRecord]:
    share: dict[str, FileRecord] | OSError
    try:
        share = {path.name: file_record(path) for path in _my_share(folder.iterdir())}
    except OSError as error:
        share = error
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, share)
    for other in shares:
        if isinstance(other, OSError):
            raise other
    return {name: record for other in shares for name, record in other.items()}


def _my_share(paths: Iterable[Path]) -> list[Path]:
    files = sorted(path for path in paths if path.is_file())
    return files[dist.get_rank() :: dist.get_world_size()]


def _explain(folder: Path, error: BaseException) -> str:
    causes = getattr(error, "failures", None) or {0: (error, None)}
    cause = next(iter(causes.values()))[0]
    free_bytes = shutil.disk_usage(folder.parent).free
    return (
        f"checkpoint {folder.name} could not be written: {type(cause).__name__}: {cause} "
        f"({free_bytes / 1e6:.1f} MB free at {folder.parent}); free space or point the service's "
        "runs folder at a larger disk. Earlier checkpoints are untouched"
    )


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
    checkpoints_dir: Path,
) -> tuple[CommittedCheckpoint | None, list[CommittedCheckpoint]]:
    """Newest checkpoint that exists and is undamaged, and the damaged ones after it.

    Collective: rank 0's listing counts.
    """
    box: list[Any] = [list_committed(checkpoints_dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    damaged: list[CommittedCheckpoint] = []
    for checkpoint in reversed(box[0]):
        if is_intact(checkpoint):
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def set_aside(checkpoint: CommittedCheckpoint) -> None:
    """Rename a damaged checkpoint, so that it is neither loaded nor counted, nor lost."""
    checkpoint.path.rename(checkpoint.path.with_name(f"{DAMAGED_PREFIX}{checkpoint.path.name}"))


def load(folder: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` in place from `folder`. Collective.

    Raises `CheckpointError` when the checkpoint holds other tables or shapes.
    """
    try:
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, OSError) as error:
        causes = getattr(error, "failures", None) or {0: (error, None)}
        cause = next(iter(causes.values()))[0]
        raise CheckpointError(
            f"checkpoint {folder.name} does not fit this model: {cause}; was the spec changed?"
        ) from error
