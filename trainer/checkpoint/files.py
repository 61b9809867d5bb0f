"""Folders of checkpoints, the marker COMMIT.json, and which are kept; on a disk or an object store.

A checkpoint exists once its marker is on storage. The marker names step, layout, data position, and
size and SHA-256 of every file, and carries a checksum of itself, so that a flipped bit in it is
found like one in any other file. An object store has no folders and renames nothing: a folder is
there while an object lies in it, and a damaged checkpoint is set aside by renaming its marker.

Faults are `FAULTS`. Storage that is away, or not mounted on this host, is an error
(`StorageError`), never "damaged" or "not there".
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from trainer.coordination.messages import EarlyStoppingState, EpochRows
from trainer.coordination.sync_tuner import TunerState
from trainer.errors import DataError, SourceMissingError, StorageError
from trainer.protocol.requests import read_rewind
from trainer.protocol.run_dir import (
    COMMIT_MARKER,
    FileRecord,
    RunDir,
    file_record,
    fsync_folder,
    write_whole,
)
from trainer.protocol.untrusted import read_untrusted
from trainer.spec.training import CheckpointSpec
from trainer.storage import Location

logger = logging.getLogger(__name__)
Folder = Path | Location
"""A folder of a checkpoint, or of many; a `Location` is always remote here."""
FAULTS = (OSError, DataError)
"""What storage raises, on a disk or remote."""
DAMAGED_PREFIX = "damaged-"
_PROBE = ".probe-"  # begins the names of files by which hosts see whether they share a folder
_DAMAGED_MARKER = "COMMIT.damaged.json"
_CHECKSUM = "sha256"
_MAX_BYTES = 2**26  # of a marker, which names every file


class CheckpointGone(StorageError):
    """A checkpoint that was listed has no marker here: it was removed, or is not mounted here."""


def folder_at(text: str | Path) -> Folder:
    """The folder that a path or URL names; raises `StorageError` for what is no such thing."""
    location = Location.parse(text)
    return location.local_path if location.is_local else location


def checkpoints_of(run_dir: Path, path: str | None) -> Folder:
    """Folder of the checkpoints of the job in `run_dir`, whose spec has `checkpoint.path`.

    Below `path` every job has a folder of its own, named by its id as its run folder is.
    """
    if path is None:
        return RunDir(run_dir).checkpoints_dir
    return folder_at(path) / run_dir.absolute().name / "checkpoints"


def find_folders(checkpoints_dir: Folder) -> list[Folder]:
    """Folders of checkpoints, whole or not, without those set aside."""
    if isinstance(checkpoints_dir, Path):
        if not checkpoints_dir.is_dir():
            return []
        return [
            path
            for path in checkpoints_dir.iterdir()
            if path.is_dir() and not path.name.startswith(DAMAGED_PREFIX)
        ]
    names: dict[str, set[str]] = {}
    for file in checkpoints_dir.list(recursive=True):
        folder, _, name = file.relative_to(checkpoints_dir).partition("/")
        if name:
            names.setdefault(folder, set()).add(name)
    return [
        checkpoints_dir / folder
        for folder, inside in sorted(names.items())
        if not (_DAMAGED_MARKER in inside and COMMIT_MARKER not in inside)
    ]


def is_empty(checkpoints_dir: Folder) -> bool:
    """Whether nothing but probes lies in it, not even what was set aside."""
    if isinstance(checkpoints_dir, Path):
        return all(each.name.startswith(_PROBE) for each in checkpoints_dir.iterdir())
    return all(each.name.startswith(_PROBE) for each in checkpoints_dir.list(recursive=True))


def read_file(folder: Folder, name: str) -> bytes | None:
    """A small file; None where there is none. Raises `StorageError` where storage is away."""
    try:
        if isinstance(folder, Path):
            return read_untrusted(folder / name, folder, _MAX_BYTES)
        return (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError, SourceMissingError):
        return None
    except OSError as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Folder, error: OSError) -> StorageError:
    """The error for files that cannot be read, which says nothing of what is in them."""
    return StorageError(
        f"checkpoint {folder} cannot be read ({error}): is its storage away? If that lasts, move "
        "this folder elsewhere, and the checkpoint before is used"
    )


def remove_folder(folder: Folder) -> None:
    """Delete a checkpoint, marker first, so that a half-deleted one never counts."""
    if isinstance(folder, Path):
        (folder / COMMIT_MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            if folder.exists():
                logger.warning("files of %s cannot be removed; the next start tries again", folder)
    else:
        (folder / COMMIT_MARKER).delete()
        folder.delete()


def set_aside(folder: Folder) -> None:
    """Give a damaged checkpoint another name, so that it is neither loaded nor counted, nor lost.

    On an object store its marker alone is renamed: objects are large, and cannot be.
    """
    if isinstance(folder, Path):
        folder.rename(folder.with_name(f"{DAMAGED_PREFIX}{folder.name}"))
        return
    marker = read_file(folder, COMMIT_MARKER)
    if marker is not None:  # else another group has set it aside
        (folder / _DAMAGED_MARKER).write_bytes(marker)
        (folder / COMMIT_MARKER).delete()


def write_probe(folder: Folder) -> str:
    """Make the folder, and write a file there of a name that was never used; its name.

    Raises one of `FAULTS`.
    """
    name = f"{_PROBE}{secrets.token_hex(8)}"
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    return name


def sees_probe(folder: Folder, name: str) -> bool:
    """Whether what another host has written there is there on this one; raises one of `FAULTS`."""
    if isinstance(folder, Path):
        # Else an NFS client may remember that there was no such folder.
        folder.mkdir(parents=True, exist_ok=True)
    return (folder / name).exists()


def remove_probe(folder: Folder, name: str) -> None:
    probe = folder / name
    probe.unlink() if isinstance(probe, Path) else probe.delete()


def explain(checkpoints_dir: Folder, error: BaseException) -> str:
    """The cause of `error`, the free space of a disk, and what to do."""
    if not isinstance(checkpoints_dir, Path):
        return str(error)  # which names URL, cause and remedy
    try:
        free_mb = shutil.disk_usage(checkpoints_dir).free / 1e6
        space = f"{free_mb:.1f} MB free at {checkpoints_dir}"
    except OSError as problem:
        space = f"{checkpoints_dir} cannot be looked at: {problem}"
    return (
        f"{type(error).__name__}: {error} ({space}); free space, make it writable, or point the "
        "service's runs folder at a larger disk"
    )


@dataclass(frozen=True)
class RowOrder:
    """Which rows stand where in an epoch, in short: equal digests are equal orders.

    `digest` is of all that decides the order: names of files, rows of row groups, seed, shuffling.
    `encodings` is of what made the rows' ids (None: an early version, which did not say).
    """

    num_rows: int
    digest: str
    encodings: str | None = None


@dataclass(frozen=True)
class Commit:
    """What a checkpoint holds.

    `step`, `epoch` and `row` are the position after the last trained step; `rows_trained` counts
    all rows ever trained; `best` is the validation value of the best checkpoint, and `plateau` what
    early stopping has seen. `moment_scale` is c of the run that wrote it. `commit` counts the
    committed syncs where groups are failure domains, and `open_epochs` has the rows done of each
    epoch that is not complete (empty: those before `row` of `epoch`). `row_order` says what rows
    those numbers stand for, and `tuning` what the sync interval is, where it is tuned.
    """

    # A NaN metric comes back as NaN.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    step: int
    epoch: int
    row: int
    rows_trained: int
    world_size: int
    shard_group_size: int
    placement: str
    time: float
    moment_scale: float
    row_order: RowOrder
    is_best: bool = False
    best: float | None = None
    plateau: EarlyStoppingState | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    commit: int = 0
    rows_skipped: int = 0
    open_epochs: tuple[EpochRows, ...] = ()
    tuning: TunerState | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


_COMMIT = TypeAdapter(Commit)


def read_commit(folder: Folder) -> Commit | None:
    """The marker in `folder`; None when there is none or it is damaged.

    Raises `StorageError` where storage is away.
    """
    content = read_file(folder, COMMIT_MARKER)
    if content is None:
        return None
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError("it is no JSON object")
        if document.pop(_CHECKSUM, None) != _checksum(document):
            raise ValueError("its checksum is wrong")
        # What a newer version adds is left out.
        return _COMMIT.validate_python(document, extra="ignore")
    except ValueError as error:
        logger.warning("checkpoint marker in %s is damaged and ignored: %s", folder, error)
        return None


def _checksum(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_marker(folder: Folder, commit: Commit) -> None:
    """Put the marker in place: whole and durable, or not at all."""
    document = json.loads(_COMMIT.dump_json(commit))
    document[_CHECKSUM] = _checksum(document)
    content = json.dumps(document).encode()
    if isinstance(folder, Path):
        write_whole(folder / COMMIT_MARKER, content)
        fsync_folder(folder.parent)
    else:
        (folder / COMMIT_MARKER).write_bytes(content)


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A checkpoint with a marker."""

    path: Folder
    commit: Commit


def folder_name(step: int, run_label: str) -> str:
    """Name of the checkpoint that the workers of `run_label` write at `step`."""
    return f"step-{step:08d}-{run_label}"


def place_of(name: str) -> tuple[int, ...]:
    """(step, attempt, run in it) in a name that `folder_name` gave; 0 for what it does not tell."""
    found = re.match(r"step-(\d+)(?:-a(\d+)-r(\d+))?", name)
    return tuple(int(each or 0) for each in found.groups()) if found else (0, 0, 0)


def list_committed(
    checkpoints_dir: Folder, is_ignored: Callable[[str], bool] = lambda name: False
) -> list[CommittedCheckpoint]:
    """Checkpoints that exist, oldest first, but for those whose name `is_ignored`.

    Those of a later attempt, or a later run of its workers, are newer whatever their step: it went
    on from an earlier one, and what the workers before saved since is of a line that was left.

    Raises `StorageError` where storage is away, as everything that lists checkpoints does.
    """
    found = [
        CommittedCheckpoint(folder, commit)
        for folder in find_folders(checkpoints_dir)
        if not is_ignored(folder.name) and (commit := read_commit(folder)) is not None
    ]
    return sorted(
        found, key=lambda each: (place_of(each.path.name)[1:], each.commit.step, each.commit.time)
    )


def superseded_in(*run_dirs: Path) -> Callable[[str], bool]:
    """Whether a checkpoint, by its name, was left behind by a rewind of the runs in `run_dirs`.

    They are read when a first name is asked for, which raises OSError where storage is away.
    """
    rewinds = cache(lambda: [read_rewind(RunDir(each).rewind_path) for each in run_dirs])
    return lambda name: any(rewind.supersedes(name) for rewind in rewinds() if rewind)


def beyond_retention(
    committed: Sequence[CommittedCheckpoint], policy: CheckpointSpec
) -> list[CommittedCheckpoint]:
    """Which of `committed` (oldest first) retention removes.

    Of multiples of `keep_every_steps` the first checkpoint at or after each stays: at that multiple
    exactly, wherever a checkpoint falls on it.
    """
    kept = list(committed[-policy.keep_last :])
    if policy.keep_best:
        kept += [checkpoint for checkpoint in committed if checkpoint.commit.is_best][-1:]
    if policy.keep_every_steps:
        first: dict[int, CommittedCheckpoint] = {}
        for checkpoint in committed:
            first.setdefault(checkpoint.commit.step // policy.keep_every_steps, checkpoint)
        kept += [checkpoint for multiple, checkpoint in first.items() if multiple > 0]
    return [checkpoint for checkpoint in committed if checkpoint not in kept]


def remove_uncommitted(
    checkpoints_dir: Folder, is_garbage: Callable[[str], bool] = lambda name: True
) -> list[Folder]:
    """Delete folders of saves that were cut off, of those whose name `is_garbage`.

    Gives those that have a marker which cannot be read.
    """
    damaged = []
    for folder in find_folders(checkpoints_dir):
        if not (folder / COMMIT_MARKER).exists():
            if is_garbage(folder.name) and not _has_marker_after_all(folder):
                remove_folder(folder)
        elif read_commit(folder) is None:
            damaged.append(folder)
    return damaged


def _has_marker_after_all(folder: Folder) -> bool:
    """Whether the marker is there when an NFS client, which may remember that it was not, looks
    anew: as it does once it has changed the folder."""
    with suppress(OSError):  # it is being removed
        if isinstance(folder, Path):
            remove_probe(folder, write_probe(folder))
            return (folder / COMMIT_MARKER).exists()
    return False


def matches(folder: Folder, name: str, record: FileRecord) -> bool:
    """Whether a file is as it was recorded.

    Raises `StorageError` where storage is away, `CheckpointGone` where the marker is missing, too.
    """
    file = folder / name
    try:
        if isinstance(file, Path):
            # User code may have written the marker: a pipe or a device might have no end.
            if "/" in name or (file.exists() and not file.is_file()):
                return False
            return file_record(file) == record
        return FileRecord(*file.size_and_sha256()) == record
    except (FileNotFoundError, SourceMissingError):
        if read_file(folder, COMMIT_MARKER) is not None:
            return False
        raise CheckpointGone(
            f"checkpoint {folder} is not on {socket.gethostname()}: neither {name} nor "
            f"{COMMIT_MARKER} is there. It was removed meanwhile, or its storage is not mounted "
            "on that host: mount it there at the same path"
        ) from None
    except OSError as error:
        raise unreadable(folder, error) from error
