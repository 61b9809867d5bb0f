"""An export as one tar stream: its size is known before it begins, nothing is written to disk."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

from service.errors import StorageUnavailable
from service.security.files import is_below
from trainer.export.artifact import MARKER, Manifest, read_manifest
from trainer.export.errors import ArtifactError

_CHUNK_BYTES = 2**18
_BLOCK = tarfile.BLOCKSIZE


def archive(folder: Path) -> tuple[int, Iterator[bytes]]:
    """Size of the tar in bytes, and its bytes; raises `StorageUnavailable` where it is damaged.

    Files that are not below `folder` (a link may lead anywhere) are no part of an export.
    """
    try:
        paths = _paths(folder, read_manifest(folder))
        headers = [_header(folder, path) for path in paths]
    except (ArtifactError, OSError) as error:
        raise StorageUnavailable(str(error)) from error
    size = sum(len(header) + _padded(info.size) for info, header in headers) + 2 * _BLOCK
    return size, _stream(paths, headers)


def _paths(folder: Path, manifest: Manifest) -> list[Path]:
    # The marker last: what was cut off is no export.
    paths = [folder / name for name in [*sorted(manifest.files), MARKER]]
    if foreign := [path for path in paths if not is_below(path, (folder,))]:
        raise ArtifactError(f"{foreign[0]} leads out of the export")
    return paths


def _header(folder: Path, path: Path) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(path.relative_to(folder).as_posix())
    status = path.stat()
    info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o644
    return info, info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _stream(paths: list[Path], headers: list[tuple[tarfile.TarInfo, bytes]]) -> Iterator[bytes]:
    for path, (info, header) in zip(paths, headers, strict=True):
        yield header
        num_left = info.size
        with path.open("rb") as file:
            while num_left and (chunk := file.read(min(_CHUNK_BYTES, num_left))):
                num_left -= len(chunk)
                yield chunk
        if num_left:
            raise OSError(f"{path} became shorter while it was sent")
        yield bytes(_padded(info.size) - info.size)
    yield bytes(2 * _BLOCK)
