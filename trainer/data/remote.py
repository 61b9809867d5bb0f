"""Remote data on a local disk: each file is fetched once per node, whatever the number of ranks.

The cache is a folder (SHARDLOOM_DATA_CACHE) with a folder for each version of each data set; a
version is the checksum of the manifest, or of the list of files where there is none. Ranks that
come while one fetches wait for it on a file lock. What no process uses is deleted, the longest
unused first, when room is needed (SHARDLOOM_DATA_CACHE_BYTES).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.data.errors import CorruptFileError, ManifestError, SourceMissingError, StorageError
from trainer.data.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    VocabularyEntry,
    parse_manifest,
    sha256_of,
)
from trainer.data.storage import Location

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SHARDLOOM_DATA_CACHE"
MAX_BYTES_VARIABLE = "SHARDLOOM_DATA_CACHE_BYTES"
DEFAULT_MAX_BYTES = 100 * 2**30

# Locks on what this process uses, held until it ends.
_in_use: dict[Path, int] = {}


@dataclass(frozen=True)
class RemoteFile:
    """A file below a remote folder; `sha256` is None where no manifest tells it."""

    path: str
    size_bytes: int
    sha256: str | None = None


@dataclass(frozen=True)
class RemoteData:
    """What a remote folder holds, and a name for this version of it."""

    location: Location
    version: str
    files: tuple[RemoteFile, ...]
    manifest: bytes | None

    @property
    def folder_name(self) -> str:
        """Name of the folder of this version in a cache."""
        return f"{_digest(self.location.text.encode())}-{self.version}"


def local_folder(path: str, parts: Collection[str] | None = None) -> Path:
    """The local folder with the data of `data.path`, fetched first where that is a URL.

    `parts` are the folders (`train`, `2024/train`) and files below it that are wanted (None: all);
    the manifest always is. Raises a
    `DataError`.
    """
    location = Location.parse(path)
    if location.is_local:
        return location.local_path
    return DataCache.from_environment().fetch(look_up(location), parts)


def look_up(location: Location) -> RemoteData:
    """List a remote folder by its manifest, else by what Parquet lies there.

    Raises `SourceMissingError` where there is neither.
    """
    if (location / MANIFEST_NAME).exists():
        content = (location / MANIFEST_NAME).read_bytes()
        manifest = parse_manifest(content, f"{location}/{MANIFEST_NAME}")
        return RemoteData(location, _digest(content), _files_of(manifest), content)
    found = [each for each in location.list(recursive=True) if each.name.endswith(".parquet")]
    if not found:
        raise SourceMissingError(
            f"{location} holds no {MANIFEST_NAME} and no Parquet; check bucket and key in data.path"
        )
    files = tuple(RemoteFile(each.relative_to(location), each.size_bytes()) for each in found)
    listing = "\n".join(f"{file.path} {file.size_bytes}" for file in files)
    return RemoteData(location, _digest(listing.encode()), files, None)


def _files_of(manifest: Manifest) -> tuple[RemoteFile, ...]:
    entries: list[FileEntry | VocabularyEntry] = [
        *(entry for split in manifest.splits.values() for entry in split.files),
        *manifest.vocabularies.values(),
    ]
    for entry in entries:
        if entry.path.startswith("/") or ".." in entry.path.split("/"):
            raise ManifestError(f"the manifest names {entry.path!r}, which is not below its folder")
    return tuple(RemoteFile(entry.path, entry.size_bytes, entry.sha256) for entry in entries)


@dataclass(frozen=True)
class DataCache:
    """A folder of this node that holds at most `max_bytes` of fetched data."""

    root: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @classmethod
    def from_environment(cls) -> DataCache:
        """The node's cache."""
        default = Path(tempfile.gettempdir()) / f"shardloom-data-{os.getuid()}"
        root = Path(os.environ.get(CACHE_VARIABLE) or default)
        return cls(root, int(os.environ.get(MAX_BYTES_VARIABLE) or DEFAULT_MAX_BYTES))

    def fetch(self, data: RemoteData, parts: Collection[str] | None = None) -> Path:
        """The local folder with `parts` (None: all) of `data`, which stays while this process does.

        Raises `StorageError`, or `CorruptFileError` where a file is not what the manifest says.
        """
        self._open_root()
        folder = self.root / data.folder_name
        self._use(folder)
        wanted = [file for file in data.files if parts is None or _is_below(file.path, parts)]
        with _lock(self._beside(folder, "fetch")):
            missing = [file for file in wanted if not _is_there(folder / file.path, file)]
            if missing:
                self._make_room(sum(file.size_bytes for file in missing), data)
            begun = time.perf_counter()
            for file in missing:
                _download(data.location / file.path, folder / file.path, file)
            folder.mkdir(exist_ok=True)
            if data.manifest is not None:
                _place_manifest(folder / MANIFEST_NAME, data.manifest)
            if missing:
                took_s = time.perf_counter() - begun
                logger.info("fetched %d files of %s in %.1f s", len(missing), data.location, took_s)
        return folder

    def _open_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_ours = self.root.stat().st_uid == os.getuid()
        except OSError as error:
            raise StorageError(
                f"the cache of remote data {self.root} cannot be used ({error}); "
                f"set {CACHE_VARIABLE} to another folder"
            ) from None
        if not is_ours:
            raise StorageError(
                f"the cache of remote data {self.root} belongs to another user; "
                f"set {CACHE_VARIABLE} to a folder of your own"
            )

    def _beside(self, folder: Path, what: str) -> Path:
        return self.root / f"{folder.name}.{what}"

    def _use(self, folder: Path) -> None:
        """Keep `folder` from being deleted until this process ends."""
        path = self._beside(folder, "use")
        if path not in _in_use:
            _in_use[path] = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(_in_use[path], fcntl.LOCK_SH)
        os.utime(path)

    def _make_room(self, num_bytes: int, data: RemoteData) -> None:
        """Delete unused data until `num_bytes` more fit; raises `StorageError`."""
        with _lock(self.root / "room"):
            while (used := _size_of(self.root)) + num_bytes > self.max_bytes:
                if not self._delete_oldest():
                    raise StorageError(
                        f"{data.location} needs {num_bytes:,} bytes more, but the cache "
                        f"{self.root} holds {used:,} that are in use, of {self.max_bytes:,}; "
                        f"raise {MAX_BYTES_VARIABLE} or set {CACHE_VARIABLE} to a larger disk"
                    )

    def _delete_oldest(self) -> bool:
        """Delete the longest unused folder that nobody uses; False where there is none."""
        for mark in sorted(self.root.glob("*.use"), key=lambda path: path.stat().st_mtime):
            folder = mark.with_suffix("")
            if mark in _in_use or not folder.exists():
                continue
            with mark.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                logger.info("deleting unused remote data %s", folder)
                shutil.rmtree(folder)
                return True
        return False


def _place_manifest(target: Path, content: bytes) -> None:
    """Write it whole and once: those who came before may be reading it."""
    if target.exists():
        return
    unfinished = target.with_name(f".{target.name}.part")
    unfinished.write_bytes(content)
    unfinished.replace(target)


def _download(source: Location, target: Path, file: RemoteFile) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.part")
    source.download(unfinished)
    size_bytes = unfinished.stat().st_size
    if size_bytes != file.size_bytes:
        raise CorruptFileError(
            f"{source} has {size_bytes} bytes, not {file.size_bytes} as it should; was it replaced "
            "while it was read? Start the job again"
        )
    if file.sha256 is not None and (found := sha256_of(unfinished)) != file.sha256:
        raise CorruptFileError(
            f"{source} is damaged: its sha256 is {found}, not {file.sha256} as in the manifest; "
            "upload or prepare the data again"
        )
    unfinished.replace(target)


def _is_below(path: str, parts: Collection[str]) -> bool:
    """Whether a file is one of `parts`, or lies in one, at whatever depth."""
    wanted = (posixpath.normpath(part) for part in parts)
    return any(path == part or path.startswith(f"{part}/") for part in wanted)


def _is_there(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size_bytes


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file; other processes of this node wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
