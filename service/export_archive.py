"""An export as one tar stream: its size is known before it begins, nothing is written to disk.

All files are open before the first byte is sent: an export that is deleted meanwhile still comes
whole.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

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
        with ExitStack() as opened:
            paths = _paths(folder, read_manifest(folder))
            files = [opened.enter_context(path.open("rb")) for path in paths]
            headers = [_header(folder, file) for file in files]
            chunks = _stream(files, headers, opened.pop_all())
    except (ArtifactError, OSError) as error:
        raise StorageUnavailable(str(error)) from error
    next(chunks)
    size = sum(len(header) + _padded(info.size) for info, header in headers) + 2 * _BLOCK
    return size, chunks


def _paths(folder: Path, manifest: Manifest) -> list[Path]:
    # The marker last: what was cut off is no export.
    paths = [folder / name for name in [*sorted(manifest.files), MARKER]]
    if foreign := [path for path in paths if not is_below(path, (folder,))]:
        raise ArtifactError(f"{foreign[0]} leads out of the export")
    return paths


def _header(folder: Path, file: IO[bytes]) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(Path(file.name).relative_to(folder).as_posix())
    status = os.fstat(file.fileno())
    info.size, info.mtime, info.mode = status.st_size, int(status.st_mtime), 0o644
    return info, info.tobuf(tarfile.PAX_FORMAT)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _stream(
    files: Sequence[IO[bytes]], headers: Sequence[tuple[tarfile.TarInfo, bytes]], opened: ExitStack
) -> Iterator[bytes]:
    with opened:
        yield b""  # begun: whoever drops us from here on closes the files
        for file, (info, header) in zip(files, headers, strict=True):
            yield header
            num_left = info.size
            while num_left and (chunk := file.read(min(_CHUNK_BYTES, num_left))):
                num_left -= len(chunk)
                yield chunk
            if num_left:
                raise OSError(f"{file.name} became shorter while it was sent")
            yield bytes(_padded(info.size) - info.size)
        yield bytes(2 * _BLOCK)
