"""Data of a job on this node: resolve, fetch, cache.

Remote data on a local disk: each file is fetched once per node, whatever the number of ranks.

The cache is a folder (SHARDLOOM_DATA_CACHE) with a folder for each version of each data set; a
version is the checksum of the manifest, or of the list of files where there is none. Ranks that
come while one fetches wait for it on a file lock. What no process uses is deleted, the longest
unused first, when room is needed (SHARDLOOM_DATA_CACHE_BYTES, and what the disk has free). Room for
what is being fetched is reserved in a file, whose lock ends with the process that fetches.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    load_manifest,
    parse_manifest,
    sha256_of,
)
from trainer.data.parquet import is_data_file, mean_and_deviation
from trainer.data.transforms import load_vocabulary, vocabulary_path
from trainer.errors import CorruptFileError, ManifestError, SourceMissingError, StorageError
from trainer.protocol.run_dir import write_whole
from trainer.spec.job import JobSpec
from trainer.spec.resolve import check_sizes, fill_statistics, short_histories, size_tables
from trainer.storage import Location

logger = logging.getLogger(__name__)
CACHE_VARIABLE = "SHARDLOOM_DATA_CACHE"
MAX_BYTES_VARIABLE = "SHARDLOOM_DATA_CACHE_BYTES"
DEFAULT_MAX_BYTES = 100 * 2**30
# Locks on what this process uses, held until it ends.
_in_use: dict[Path, int] = {}


@dataclass(frozen=True)
class RemoteData:
    """What a remote folder holds, and a name for this version of it.

    `sha256` of a file is empty where no manifest tells it.
    """

    location: Location
    version: str
    files: tuple[StoredFile, ...]
    manifest: bytes | None

    @property
    def folder_name(self) -> str:
        return f"{_digest(self.location.text.encode())}-{self.version}"


def local_folder(path: str, parts: Collection[str] | None = None) -> Path:
    """The local folder with the data of `data.path`, fetched first where that is a URL.

    `parts` are the folders (`train`, `2024/train`) and files below it that are wanted (None: all);
    the manifest always is. Raises a `DataError`.
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
        files = parse_manifest(content, f"{location}/{MANIFEST_NAME}").files
        for path in (file.path for file in files):
            if path.startswith("/") or ".." in path.split("/"):
                raise ManifestError(f"the manifest names {path!r}, which is not below its folder")
        return RemoteData(location, _digest(content), files, content)
    found = [each for each in location.list(recursive=True) if is_data_file(each.name)]
    if not found:
        raise SourceMissingError(
            f"{location} holds no {MANIFEST_NAME} and no Parquet; check bucket and key in data.path"
        )
    plain, listing = [], []
    for file in found:
        if (mark := file.fingerprint()) is None:
            raise SourceMissingError(f"{file} went away while its folder was listed; start again")
        path = file.relative_to(location)
        plain.append(StoredFile(path=path, size_bytes=mark[0], sha256=""))
        # The time too: corrected labels may take up as many bytes as the wrong ones did.
        listing.append(f"{path} {mark[0]} {mark[1]}")
    return RemoteData(location, _digest("\n".join(listing).encode()), tuple(plain), None)


@dataclass(frozen=True)
class DataCache:
    """A folder of this node that holds at most `max_bytes` of fetched data."""

    root: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @classmethod
    def from_environment(cls) -> DataCache:
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
            missing = [
                file
                for file in wanted
                if not (path := folder / file.path).is_file()
                or path.stat().st_size != file.size_bytes
            ]
            if missing:
                self._fetch_missing(missing, data)
            folder.mkdir(exist_ok=True)
            if data.manifest is not None and not (folder / MANIFEST_NAME).exists():
                # Whole and once: those who came before may be reading it.
                write_whole(folder / MANIFEST_NAME, data.manifest)
        return folder

    def _fetch_missing(self, missing: Sequence[StoredFile], data: RemoteData) -> None:
        folder = self.root / data.folder_name
        begun = time.perf_counter()
        with self._beside(folder, "reserved").open("w") as reservation:
            self._reserve(sum(file.size_bytes for file in missing), data, reservation)
            for place, file in enumerate(missing, start=1):
                _download(data.location / file.path, folder / file.path, file)
                _note_bytes(reservation, sum(later.size_bytes for later in missing[place:]))
        took_s = time.perf_counter() - begun
        logger.info("fetched %d files of %s in %.1f s", len(missing), data.location, took_s)

    def _open_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.stat().st_uid == os.getuid():
                return
            why = "belongs to another user"
        except OSError as error:
            why = f"cannot be used ({error})"
        raise StorageError(
            f"the cache of remote data {self.root} {why}; set {CACHE_VARIABLE} to a folder of your "
            "own"
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

    def _reserve(self, num_bytes: int, data: RemoteData, reservation: IO[str]) -> None:
        """Delete unused data until `num_bytes` more fit, and keep others from taking that room.

        Raises `StorageError` where nothing unused is left to delete.
        """
        with _lock(self.root / "room"):
            while refusal := self._refusal(num_bytes):
                if not self._delete_oldest():
                    raise StorageError(
                        f"{data.location} needs {num_bytes:,} bytes more, but {refusal}; "
                        f"raise {MAX_BYTES_VARIABLE} or set {CACHE_VARIABLE} to a larger disk"
                    )
            fcntl.flock(reservation, fcntl.LOCK_EX)
            _note_bytes(reservation, num_bytes)

    def _refusal(self, num_bytes: int) -> str | None:
        """Why `num_bytes` more do not fit now; None where they do."""
        reserved = sum(map(_reserved_bytes, self.root.glob("*.reserved")))
        used = _size_of(self.root) + reserved
        if used + num_bytes > self.max_bytes:
            return f"the cache {self.root} holds {used:,} that are in use, of {self.max_bytes:,}"
        free = shutil.disk_usage(self.root).free - reserved
        return f"the disk of {self.root} has only {free:,} free" if num_bytes > free else None

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


def _download(source: Location, target: Path, file: StoredFile) -> None:
    """Put a checked copy at `target`, whole or not at all; raises a `DataError`."""
    unfinished = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.download(unfinished)
        _check(unfinished, source, file)
        unfinished.replace(target)
    except OSError as error:
        raise StorageError(
            f"the cache of remote data cannot hold {target} ({error}); make room on its disk, or "
            f"set {CACHE_VARIABLE} to a larger one"
        ) from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _check(unfinished: Path, source: Location, file: StoredFile) -> None:
    """Raise `CorruptFileError` where a copy is not what it should be."""
    size_bytes = unfinished.stat().st_size
    if size_bytes != file.size_bytes:
        raise CorruptFileError(
            f"{source} has {size_bytes} bytes, not {file.size_bytes} as it should; was it replaced "
            "while it was read? Start the job again"
        )
    if file.sha256 and (found := sha256_of(unfinished)) != file.sha256:
        raise CorruptFileError(
            f"{source} is damaged: its sha256 is {found}, not {file.sha256} as in the manifest; "
            "upload or prepare the data again"
        )


def _is_below(path: str, parts: Collection[str]) -> bool:
    """Whether a file is one of `parts`, or lies in one, at whatever depth."""
    wanted = (posixpath.normpath(part) for part in parts)
    return any(path == part or path.startswith(f"{part}/") for part in wanted)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file; other processes of this node wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _size_of(folder: Path) -> int:
    """Size of all files, but those that others rename or delete meanwhile and unfinished ones.

    Unfinished ones are counted by their reservation.
    """
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(".part"):
                with suppress(FileNotFoundError):
                    total += Path(place, name).stat().st_size
    return total


def _note_bytes(reservation: IO[str], num_bytes: int) -> None:
    # Always equally long, and in one write: others read it meanwhile.
    os.pwrite(reservation.fileno(), f"{num_bytes:020d}".encode(), 0)


def _reserved_bytes(path: Path) -> int:
    """Bytes that are still to come; 0 once nobody holds the reservation."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0)
    return 0


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# What a job reads, on this node: the folder, and the spec with all that the data tells.


def resolve_inputs(spec: JobSpec, warn: Callable[[str], None] = logger.warning) -> JobSpec:
    """The spec with table sizes and statistics from the manifest and the vocabularies.

    A folder of plain Parquet without a manifest will do where nothing is left to it. Raises a
    `DataError`, among others where a vocabulary is larger than its table.
    """
    folder = local_folder(spec.data.path, _vocabulary_parts(spec))
    manifest = _manifest_in(folder, is_whole=Location.parse(spec.data.path).is_local)
    vocab_sizes = manifest.vocab_sizes if manifest else {}
    read_sizes = {
        feature.name: load_vocabulary(
            vocabulary_path(feature, folder), feature.vocabulary.min_count
        ).num_ids
        for feature in spec.features
        if feature.vocabulary
    }
    spec = size_tables(spec, vocab_sizes, read_sizes)
    check_sizes(spec, vocab_sizes, read_sizes)
    for warning in short_histories(spec, manifest.options if manifest else {}):
        warn(warning)
    statistics = manifest.statistics if manifest else {}
    return fill_statistics(spec, _measured(spec, statistics) | statistics)


def _measured(spec: JobSpec, known: Mapping[str, float]) -> dict[str, float]:
    """Means and deviations that nobody knows, of the training part; local data only."""
    location = Location.parse(spec.data.path)
    if not location.is_local:
        return {}
    wanted = {
        feature.source_column
        for feature in spec.features
        if feature.transform == "standardise"
        and (feature.mean is None or feature.std is None)
        and f"{feature.source_column}_std" not in known
    }
    found: dict[str, float] = {}
    for column in sorted(wanted):
        mean, std = mean_and_deviation(
            location.local_path / spec.data.split.train,
            column,
            skip_unreadable=spec.data.on_bad_rows == "quarantine",
        )
        found |= {f"{column}_mean": mean, f"{column}_std": std}
    return found


def _manifest_in(folder: Path, *, is_whole: bool) -> Manifest | None:
    """The manifest, its files compared with it where they are here."""
    path = folder / MANIFEST_NAME
    if folder.is_dir() and not path.exists():
        return None
    return load_manifest(folder) if is_whole else parse_manifest(path.read_bytes(), str(path))


def on_this_node(spec: JobSpec) -> JobSpec:
    """The spec with `data.path` on a local disk; remote data is fetched once per node.

    Raises a `DataError`.
    """
    split = spec.data.split
    parts = {part for part in (split.train, split.validation) if part is not None}
    wanted = parts | _vocabulary_parts(spec)
    folder = local_folder(spec.data.path, None if "." in parts else wanted)
    if str(folder) == spec.data.path:
        return spec
    return spec.model_copy(update={"data": spec.data.model_copy(update={"path": str(folder)})})


def _vocabulary_parts(spec: JobSpec) -> set[str]:
    """What of `data.path` holds vocabularies."""
    paths = [feature.vocabulary.path for feature in spec.features if feature.vocabulary]
    return {"vocab"} | {path for path in paths if path}
