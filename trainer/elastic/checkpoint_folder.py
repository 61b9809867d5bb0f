"""Where checkpoints lie, and what can be done to their files: on a disk, or on an object store.

An object store has no folders and renames nothing: a folder is there while an object lies in it,
and a damaged checkpoint is set aside by another name of its marker. An object appears whole or not
at all, and is asked for again while the store is busy or away (`trainer.data.storage`). Storage
that is away says nothing about a checkpoint: it is an error, never "damaged" or "not there".
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.data.errors import DataError, SourceMissingError
from trainer.data.storage import Location
from trainer.run_dir import COMMIT_MARKER, RunDir

Folder = Path | Location
"""A folder of a checkpoint, or of many; a `Location` is always remote here."""

FAULTS = (OSError, DataError)
"""What storage raises, on a disk or remote."""

DAMAGED_PREFIX = "damaged-"
_DAMAGED_MARKER = "COMMIT.damaged.json"
_PROBE = ".probe"
_READ_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


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
        return [*_folders_on_disk(checkpoints_dir)]
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


def _folders_on_disk(checkpoints_dir: Path) -> Iterator[Path]:
    if checkpoints_dir.is_dir():
        for path in checkpoints_dir.iterdir():
            if path.is_dir() and not path.name.startswith(DAMAGED_PREFIX):
                yield path


def is_folder(folder: Folder) -> bool:
    """Whether there is such a folder."""
    return folder.is_dir() if isinstance(folder, Path) else folder.is_folder()


def has_marker(folder: Folder) -> bool:
    """Whether a marker lies there, whole or not."""
    return (folder / COMMIT_MARKER).exists()


def read_file(folder: Folder, name: str) -> bytes | None:
    """A small file; None where there is none."""
    try:
        return (folder / name).read_bytes()
    except (FileNotFoundError, SourceMissingError):
        return None


def record_of(folder: Folder, name: str) -> FileRecord | None:
    """Size and SHA-256 of a file as it lies there; None where there is none."""
    if isinstance(folder, Path):
        path = folder / name
        return file_record(path) if path.exists() else None
    try:
        return _remote_record(folder / name)
    except SourceMissingError:
        return None


def file_record(path: Path) -> FileRecord:
    """Size and SHA-256 of one file on a disk."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def _remote_record(file: Location) -> FileRecord:
    digest, size_bytes = hashlib.sha256(), 0
    with file.open_input() as stream:
        while content := stream.read(_READ_BYTES):
            digest.update(content)
            size_bytes += len(content)
    return FileRecord(size_bytes, digest.hexdigest())


def size_of(folder: Folder, name: str) -> int | None:
    """Size of a file in bytes; None where there is none."""
    try:
        return (
            (folder / name).stat().st_size
            if isinstance(folder, Path)
            else (folder / name).size_bytes()
        )
    except (FileNotFoundError, SourceMissingError):
        return None


def remove_folder(folder: Folder) -> None:
    """Delete a checkpoint, marker first, so that a half-deleted one never counts."""
    if isinstance(folder, Path):
        (folder / COMMIT_MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
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


def make_writable(checkpoints_dir: Folder) -> None:
    """Make the folder, and try to write there; raises one of `FAULTS`."""
    probe = checkpoints_dir / _PROBE
    if isinstance(checkpoints_dir, Path):
        checkpoints_dir.mkdir(parents=True, exist_ok=True)
    probe.write_bytes(b"x")
    if isinstance(probe, Path):
        probe.unlink(missing_ok=True)  # another group may probe, too
    else:
        probe.delete()


def explain(checkpoints_dir: Folder, error: BaseException) -> str:
    """The cause of `error`, the room that is left where one can ask, and what to do."""
    if not isinstance(checkpoints_dir, Path):
        return str(error)  # which names URL, cause and mend
    return (
        f"{type(error).__name__}: {error} ({_free_space(checkpoints_dir)}); free space, make it "
        "writable, or point the service's runs folder at a larger disk"
    )


def _free_space(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free at {folder}"
    except OSError as error:
        return f"{folder} cannot be looked at: {error}"


def write_whole(folder: Folder, name: str, content: bytes) -> None:
    """Put a file in place: whole and durable, or not at all."""
    if not isinstance(folder, Path):
        (folder / name).write_bytes(content)
        return
    temporary = folder / f".{name}.tmp"
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / name)
    fsync_folder(folder)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    """Make what was created or renamed in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
