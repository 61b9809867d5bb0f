"""Prepared folders in the making: resumable, whole or absent, on a local disk or an object store.

Local: everything is written to `.NAME.partial` beside the folder, which takes its name at the end.
Remote: finished files are uploaded one by one from a working folder on this machine, and the
manifest last; a folder without a manifest was never finished. What is not known to be ours, by the
manifest of an older folder or by the list of what was uploaded, is never deleted.
`write_columns` and `map_columns` are for arrays in working files, `write_partition` for results.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.data.manifest import (
    MANIFEST_NAME,
    FileContents,
    FileEntry,
    Manifest,
    SplitEntry,
    VocabularyEntry,
    read_footer,
    read_manifest,
    write_manifest,
)
from trainer.datasets.io.journal import (
    JOURNAL_NAME,
    Facts,
    Journal,
    Part,
    make_part,
)
from trainer.errors import DataError, ManifestError, OutputExistsError, StorageError
from trainer.protocol.run_dir import write_whole
from trainer.storage import Location

Columns = dict[str, NDArray]


def write_columns(path: Path, columns: Mapping[str, NDArray | pa.Array]) -> None:
    """Write arrays of one length as an Arrow file."""
    batch = pa.record_batch(dict(columns))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def map_rows(path: Path) -> pa.RecordBatch:
    """What `write_columns` wrote, mapped: only what is used is read."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).get_batch(0)


def columns_of(rows: pa.RecordBatch | pa.Table) -> Columns:
    """Columns without nulls as arrays; those of mapped rows are read-only."""
    return {name: rows[name].to_numpy() for name in rows.schema.names}


def map_columns(path: Path) -> Columns:
    """The arrays of `write_columns`, mapped."""
    return columns_of(map_rows(path))


def gather_rows(paths: Sequence[Path], bounds: Iterable[NDArray]) -> pa.Table:
    """Rows [start, end) of each file of `write_columns`, one file after the other; mapped."""
    return pa.Table.from_batches(
        map_rows(path)[start:end] for path, (start, end) in zip(paths, bounds, strict=True)
    )


def write_partition(
    path: Path, schema: pa.Schema, tables: Iterable[pa.Table], row_group_rows: int, **options: Any
) -> Facts:
    """Write a Parquet file of `tables`; gives what it holds, as facts of its part.

    The next table is made while one is written. Row groups are full where tables but the last one
    are of whole row groups.
    """
    options |= {"compression": "zstd", "write_page_checksum": True}
    with (
        pq.ParquetWriter(path, schema, **options) as writer,
        ThreadPoolExecutor(max_workers=1) as thread,
    ):
        pending: Future[None] | None = None
        for table in tables:
            if pending:
                pending.result()
            pending = thread.submit(writer.write_table, table, row_group_size=row_group_rows)
        if pending:
            pending.result()
    return FileContents.of(read_footer(path)).model_dump(mode="json")


_UPLOADS = "uploads.txt"
# What `write_whole` leaves where it is killed.
_UNFINISHED = re.compile(
    rf"\.({re.escape(JOURNAL_NAME)}|{re.escape(_UPLOADS)})\.[0-9a-f]+\.partial"
)


def _uploads_in(folder: Path) -> frozenset[str]:
    """Paths relative to the remote folder, one a line of `uploads.txt` in the working folder.

    A path is noted before its file is uploaded. The list outlives the journal: work with other
    options still knows what the work before it left at the same place.
    """
    path = folder / _UPLOADS
    return frozenset(path.read_text("utf-8").splitlines()) if path.is_file() else frozenset()


def _note_uploads(folder: Path, names: Iterable[str]) -> None:
    """Note paths; they are on the disk when this returns, all or none."""
    lines = [f"{name}\n" for name in sorted({*_uploads_in(folder), *names})]
    write_whole(folder / _UPLOADS, "".join(lines).encode())


@contextmanager
def staged_folder(target: str | Path, *, overwrite: bool, proof: str) -> Iterator[Path]:
    """Yield an empty folder beside the local folder `target` that takes its name at a good end.

    One that is not empty is replaced only with `overwrite`, and only if it holds the file `proof`,
    so that a mistyped path costs nobody their files. Raises `OutputExistsError`, or `StorageError`
    for a remote `target`.
    """
    folder = Location.parse(target)
    if not folder.is_local:
        raise StorageError(f"{folder} is remote; generate into a local folder, then copy it there")
    out = _without_links(folder).local_path
    check_replaceable(out, overwrite=overwrite, proof=proof)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as own:
        staging = Path(own) / out.name
        staging.mkdir()
        yield staging
        check_replaceable(out, overwrite=overwrite, proof=proof)
        _take_name(staging, out)


def check_replaceable(out: Path, *, overwrite: bool, proof: str = MANIFEST_NAME) -> None:
    """Raise `OutputExistsError` unless `out` is free, or ours to replace and `overwrite` is set."""
    if not out.exists():
        return
    is_empty = out.is_dir() and not any(out.iterdir())
    # One that is a mount point takes no other's place.
    if is_empty and not out.is_mount():
        return
    if not overwrite:
        raise OutputExistsError(f"{out} exists; choose another folder or add --overwrite")
    if not is_empty and not (out / proof).is_file():
        raise OutputExistsError(
            f"{out} holds no {proof}, so it is not ours to overwrite; remove it"
        )


# Below the working folder: what the result is made of, and what is only needed on the way.
_RESULT, _SCRATCH = "result", "scratch"
_PROBE = ".shardloom-probe"


class Staging:
    """The files of one prepared folder, written part by part.

    `scratch` gives working files that are gone at the end, `result` files of the folder itself.
    """

    def __init__(self, out: Location, journal: Journal, *, overwrite: bool) -> None:
        self._out = out
        self._overwrite = overwrite
        self._journal = journal
        self._is_begun = False
        self.is_work_kept = False

    def keep_work(self) -> str:
        """Let finished parts stay though data are bad; gives where they are."""
        self.is_work_kept = True
        return str(self._journal.folder)

    def scratch(self, name: str, make: Callable[[Path], Facts | None]) -> tuple[Path, Facts]:
        """A working file by name and the facts found while `make` wrote it."""
        part = self._journal.part(f"{_SCRATCH}/{name}", make)
        return self._journal.folder / part.name, part.facts

    def result(self, name: str, make: Callable[[Path], Facts | None]) -> Part:
        """A file of the prepared folder; an object store has it when this returns."""
        part_name, target = f"{_RESULT}/{name}", self._out / name
        if self._out.is_local:
            return self._journal.part(part_name, make)
        if known := self._journal.find(part_name):
            found = target.fingerprint()
            if found and found[0] == known.size_bytes:
                return known
        path = self._journal.folder / part_name
        part = make_part(part_name, path, make)
        if not self._is_begun:
            # Before the first file of an older folder is replaced, its manifest must go; without it
            # nothing but this note says that the files that it names are ours.
            _note_uploads(self._journal.folder, _old_files(self._out))
            (self._out / MANIFEST_NAME).delete()
            self._is_begun = True
        _note_uploads(self._journal.folder, [name])
        target.upload(path)
        self._journal.record(part)
        path.unlink()
        return part

    def vocabulary(self, name: str, frame: pl.DataFrame) -> VocabularyEntry:
        """Write a vocabulary, one row for each value; gives it as the manifest names it."""

        def write(path: Path) -> None:
            # On a full disk Polars itself tells of a file out of specification.
            content = io.BytesIO()
            frame.write_parquet(content)
            path.write_bytes(content.getbuffer())

        part = self.result(f"vocab/{name}.parquet", write)
        return VocabularyEntry(**_stored(part), num_values=len(frame))

    def check_space(self, name: str, num_bytes: int) -> None:
        """Raise `StorageError` where the disk cannot hold `num_bytes` in the scratch folder `name`.

        What an earlier run wrote there counts as part of them.
        """
        folder = self._journal.folder
        held = sum(path.stat().st_size for path in (folder / _SCRATCH / name).glob("*"))
        free = shutil.disk_usage(folder).free
        if held + free < num_bytes:
            raise StorageError(
                f"{folder}: working files need {num_bytes / 1e9:.1f} GB, {held / 1e9:.1f} GB are "
                f"there and {free / 1e9:.1f} GB free; make room or name a folder on another disk "
                "with --work-dir"
            )

    def publish(self, manifest: Manifest) -> Manifest:
        """Write the manifest, which is returned, and let the folder take its name."""
        folder = self._journal.folder / _RESULT
        write_manifest(folder, manifest)
        if self._out.is_local:
            # Somebody may have made it meanwhile.
            _check_free(self._out, frozenset(), overwrite=self._overwrite)
            _take_name(folder, self._out.local_path)
            return manifest
        stale = _uploads_in(self._journal.folder) - {file.path for file in manifest.files}
        for file in self._out.list(recursive=True):
            if file.relative_to(self._out) in stale:
                file.delete()
        (self._out / MANIFEST_NAME).upload(folder / MANIFEST_NAME)
        return manifest


def cut_rows(num_rows: int, num_files: int, row_group_rows: int) -> list[range]:
    """The rows of at most `num_files` files of equal size, none smaller than a row group."""
    num_files = min(num_files, max(1, num_rows // row_group_rows))
    cuts = [num_rows * number // num_files for number in range(num_files + 1)]
    return [range(*ends) for ends in pairwise(cuts)]


def split_entry(parts: Sequence[Part]) -> SplitEntry:
    """The Parquet files of a split; their facts have those of `write_partition`."""
    files = tuple(
        FileEntry(**_stored(part), **{name: part.facts[name] for name in FileContents.model_fields})
        for part in parts
    )
    return SplitEntry(num_rows=sum(file.num_rows for file in files), files=files)


def _stored(part: Part) -> dict[str, Any]:
    path = part.name.removeprefix(f"{_RESULT}/")
    return {"path": path, "size_bytes": part.size_bytes, "sha256": part.sha256}


@contextmanager
def staged(
    out: Location,
    work: Mapping[str, Any],
    *,
    overwrite: bool,
    sources: Sequence[Location] = (),
    work_folder: Path | None = None,
) -> Iterator[Staging]:
    """Yield the `Staging` of the folder `out`; `work` (JSON values) says what it will hold.

    A run that was killed left its finished parts: the same work goes on from there, other work
    starts anew. Bad data leaves nothing behind, unless `keep_work` was called. An existing `out` is
    replaced only with `overwrite`, and only if it is ours; it must not hold any of `sources`.
    Working files lie in a folder of their own, inside `work_folder` if one is named. Raises
    `OutputExistsError`, also where another process is preparing the same folder.
    """
    out = _without_links(out)
    for source in map(_without_links, sources):
        if source.root == out.root and f"{source.path}/".startswith(f"{out.path.rstrip('/')}/"):
            raise OutputExistsError(f"{out} holds {source}, which is read; choose another folder")
    folder = _working_folder(out, work_folder)
    if out.is_local:
        _drop_leftovers(folder, out.local_path)
    _check_free(out, _uploads_in(folder), overwrite=overwrite)
    _make_private(folder)
    with _alone_in(folder):
        _check_ours(folder)
        # Others may round and compress to other bytes.
        libraries = [np.__version__, pl.__version__, pa.__version__, platform.machine()]
        whole_work = {"out": str(out), "libraries": libraries, **work}
        journal = Journal(folder, whole_work, keep=(_UPLOADS,))
        staging = Staging(out, journal, overwrite=overwrite)
        try:
            yield staging
        except StorageError as error:
            # The network's fault, not the data's.
            error.add_note("What is done stays: run the same command again, and it goes on")
            raise
        except OutputExistsError:
            # The work waits until the place is free again.
            raise
        except DataError:
            # What was uploaded must still be known as ours.
            if not staging.is_work_kept and not _uploads_in(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _without_links(place: Location) -> Location:
    """Where symbolic links lead, so that nothing takes the place of a link."""
    return Location.parse(place.local_path.resolve()) if place.is_local else place


def _working_folder(out: Location, within: Path | None) -> Path:
    """A folder of our own, the same for every run: what is in it may be removed."""
    if out.is_local and within is None:
        return out.local_path.with_name(f".{out.name}.partial")
    digest = hashlib.sha256(out.text.encode()).hexdigest()[:16]
    return (within or Path(tempfile.gettempdir())) / f"shardloom-prepare-{digest}"


def _make_private(folder: Path) -> None:
    """Make the folder for this user only; where everybody can write it may be another's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    if folder.parent == Path(tempfile.gettempdir()) and not is_own:
        raise OutputExistsError(
            f"{folder} belongs to another user; name a folder of your own with --work-dir"
        )


def _drop_leftovers(folder: Path, out: Path) -> None:
    """Remove what a run left that was killed after its result took its name.

    Its journal tells of results that have moved away; a run that goes on still has its own.
    """
    if not out.exists() or not folder.is_dir() or (folder / _RESULT).exists():
        return
    journal = folder / JOURNAL_NAME
    with _alone_in(folder):
        _check_ours(folder)
        if not journal.is_file() or f'"name": "{_RESULT}/' in journal.read_text("utf-8"):
            shutil.rmtree(folder)
            _drop_retired(out)


def _check_free(out: Location, uploaded: frozenset[str], *, overwrite: bool) -> None:
    """Raise unless `out` is free or ours; `uploaded` are files below it that we put there."""
    if out.is_local:
        check_replaceable(out.local_path, overwrite=overwrite)
        _old_files(out)
        return
    if "/" not in out.path:
        raise OutputExistsError(
            f"{out} is a whole bucket; choose a folder in it, such as {out}/mine"
        )
    if not (out / MANIFEST_NAME).exists():
        for file in out.list(recursive=True):
            if file.relative_to(out) not in {*uploaded, _PROBE}:
                raise OutputExistsError(
                    f"{out} holds {file} and no {MANIFEST_NAME}, so it is not ours to write to; "
                    "choose another folder, or delete it if an unfinished preparation from "
                    "elsewhere left it"
                )
    elif not overwrite:
        raise OutputExistsError(f"{out} exists; choose another folder or add --overwrite")
    else:
        _old_files(out)
    # A missing bucket or right to write must not come out after hours of work.
    probe = out / _PROBE
    probe.write_bytes(b"")
    probe.delete()


def _old_files(out: Location) -> list[str]:
    """The files of the prepared folder that is at `out`; raises where its manifest is not ours."""
    path = out / MANIFEST_NAME
    if not path.exists():
        return []
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        raise OutputExistsError(
            f"{path} is no manifest of ours ({error}); choose another folder, or delete this one"
        ) from None
    return [file.path for file in manifest.files]


def _check_ours(folder: Path) -> None:
    """Raise where the folder holds anything that is not made here: it must not be emptied.

    The journal itself may be missing: a kill can come while it is first written or removed.
    """
    names = {path.name for path in folder.iterdir()} - {_RESULT, _SCRATCH, JOURNAL_NAME, _UPLOADS}
    if strangers := sorted(name for name in names if not _UNFINISHED.fullmatch(name)):
        raise OutputExistsError(
            f"{folder} holds '{strangers[0]}', so it is not ours to empty; remove or rename it"
        )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, which the system lets go of whatever ends this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OutputExistsError(
            f"{folder} is in use by another process that prepares the same folder; "
            "wait for it or choose another output"
        ) from None
    finally:
        os.close(descriptor)


def _take_name(folder: Path, out: Path) -> None:
    """Put the finished folder in the place of `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_dev != out.parent.stat().st_dev:
        # It can move only within a disk.
        copy = out.with_name(f".{out.name}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        folder = shutil.copytree(folder, copy)
    if out.exists():
        out.rename(out.with_name(f".{out.name}.old-{os.getpid()}"))
    folder.rename(out)
    _drop_retired(out)


def _drop_retired(out: Path) -> None:
    """Remove older folders that were moved aside, those of a killed run included."""
    for path in out.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(out.name)}\.old-\d+", path.name):
            shutil.rmtree(path, ignore_errors=True)
