"""torch.distributed.checkpoint on disks and object stores: readers that run nothing, and a writer.

Both are public classes of PyTorch, but what they ask of a file system (`FileSystemBase`) and of
their subclasses is not promised: it is used here only, for the version of torch that
`protocol.versions` pins. Faults of storage are `StorageError`s.

PyTorch unpickles a checkpoint's metadata and objects unchecked, which runs any code in them: user
code or another host may have written them. Here they hold tensors and plain values, or are refused
by a `pickle.UnpicklingError`.
"""

from __future__ import annotations

import enum
import hashlib
import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,  # noqa: TID251 - `_Reader` reads the metadata itself
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystemBase, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from trainer.checkpoint.files import Folder
from trainer.errors import StorageError
from trainer.protocol.run_dir import FileRecord
from trainer.protocol.untrusted import read_untrusted
from trainer.storage import Location, retry, write_upload

METADATA = ".metadata"
_MAX_METADATA_BYTES = 2**30  # job code may have put a larger file there
# An object has 10 000 parts at most, and Arrow's are of 10 MiB: 98 GiB.
_MAX_OBJECT_BYTES = 64 * 2**30
# Names that the metadata of a checkpoint may contain, by module.
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # of Python 3.13
    "collections": {"OrderedDict"},
}


class _HashedOutput(io.RawIOBase):
    """Writes to an object and knows what went there: its checksum is of what was meant."""

    def __init__(self, file: Location) -> None:
        self._stream = file.open_output()
        self._file = file
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self.fault: StorageError | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size_bytes

    def write(self, content: Any, /) -> int:
        """Write all of `content`; raises a `StorageError`."""
        view = memoryview(content).cast("B")
        try:
            with self._file.errors_as("written"):
                write_upload(self._stream, view)
        except StorageError as error:
            self.fault = self.fault or error
            raise
        self._digest.update(view)
        self._size_bytes += len(view)
        return len(view)

    def close(self) -> None:
        """End the upload: from now on the object is there."""
        if not self.closed:
            super().close()
            with self._file.errors_as("written"):
                self._stream.close()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size_bytes, self._digest.hexdigest())


class _RemoteFiles(FileSystemBase):
    """What DCP's reader and writer do to files. `records` has those that were written, by name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """An open object; one that could not be written whole is not left behind."""
        if mode == "rb":
            with path.open_input() as stream:
                yield stream
            return
        output = _HashedOutput(path)
        try:
            yield output
            output.close()
        except BaseException as error:
            # Without a marker nothing of it counts, so trying once is enough.
            path.discard(output)
            if output.fault is not None and error is not output.fault:
                # `torch.save` ends its archive all the same, and fails with words of its own.
                raise output.fault from error
            raise
        self.records[path.name] = output.record

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def init_path(self, path: Any) -> Any:
        return Location.parse(path)

    def rename(self, path: Any, new_path: Any) -> None:
        """Move DCP's small description; all else is written under its own name."""
        new_path.write_bytes(path.read_bytes())
        path.delete()
        self.records[new_path.name] = self.records.pop(path.name)

    def mkdir(self, path: Any) -> None:
        """Nothing: objects need no folder."""

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.delete()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" in str(checkpoint_id)


def num_bytes_of(item: WriteItem) -> int:
    """Of the piece; 0 for an object, whose size is not known."""
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data else 0


def _objects_of(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """`items` by the object that they go to: as many as fit, or a larger one alone."""
    objects: list[list[WriteItem]] = []
    left = 0
    for item in items:
        left -= num_bytes_of(item)
        if left < 0 or not objects:
            objects.append([])
            left = _MAX_OBJECT_BYTES - num_bytes_of(item)
        objects[-1].append(item)
    return objects


class RemoteWriter(FileSystemWriter):
    """Writes a checkpoint to an object store; a share in several objects where it is large.

    What cannot be written is written again, from the copy in memory, while the store is busy.
    """

    def __init__(self, folder: Location) -> None:
        # Objects are durable when they are there; there is nothing to fsync.
        super().__init__(str(folder), sync_files=False)
        files = _RemoteFiles()
        self.records = files.records
        self.fs: Any = files
        self.path: Any = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; raises a `StorageError`."""

        def write(part: SavePlan) -> Future[list[WriteResult]]:
            return super(RemoteWriter, self).write_data(part, planner)

        results: list[WriteResult] = []
        for number, items in enumerate(_objects_of(plan.items)):
            # Not DCP's `thread_count`: its threads lose their errors.
            prefix = f"{plan.storage_data.prefix}{number}_" if number else plan.storage_data.prefix
            part = replace(plan, items=items, storage_data=_StoragePrefix(prefix))
            results += retry(partial(write, part)).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        retry(lambda: super(RemoteWriter, self).finish(metadata, results))

    @property
    def checkpoint_id(self) -> str:
        """Where it is written, in words: a `Location` would keep an endpoint in the metadata."""
        return str(self.path)


class _Unpickler(pickle.Unpickler):  # noqa: TID251 - names few classes
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _member_of(kind: Any, name: str) -> enum.Enum:
    """What Pythons before 3.11.4 write `getattr` for: a member of an enumeration, nothing else."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it asks for {name} of what is no enumeration")
    member: enum.Enum = kind[name]
    return member


class _Reader(FileSystemReader):
    """Reads a checkpoint from a disk; nothing in its metadata is run."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The checkpoint's metadata, read once.

        Raises OSError, `DataError` or `pickle.UnpicklingError`.
        """
        if self._metadata is not None:
            return self._metadata
        path = cast(Folder, self.path) / METADATA
        if isinstance(path, Location):
            content = path.read_bytes()
        else:
            content = read_untrusted(path, path.parent, _MAX_METADATA_BYTES)
        try:
            found: Metadata = _Unpickler(io.BytesIO(content)).load()
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            if not isinstance(found.state_dict_metadata, dict):
                raise TypeError("it names no tensors")
            if any("/" in each.relative_path for each in (found.storage_data or {}).values()):
                raise ValueError("it names files outside of its folder")
        except Exception as error:  # whatever the content makes the reader raise
            raise pickle.UnpicklingError(
                f"{path} is no description of a checkpoint: {error}; it was damaged, or something "
                "else than Shardloom wrote it. Name another checkpoint"
            ) from error
        self._metadata = found
        return found


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads a flat state; objects in it are plain values, or refused."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = torch.load(value, weights_only=True)  # noqa: TID251


class RemoteReader(_Reader):
    """Reads a checkpoint from an object store."""

    def __init__(self, folder: Location) -> None:
        super().__init__(str(folder))
        self.fs: Any = _RemoteFiles()
        self.path: Any = folder

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        # All of a piece at once: `torch.load` reads in many small steps, each a request otherwise.
        file.seek(sinfo.offset)
        return cast(IO[bytes], io.BytesIO(file.read(sinfo.length)))


def reader_for(folder: Folder) -> FileSystemReader:
    return RemoteReader(folder) if isinstance(folder, Location) else _Reader(folder)
