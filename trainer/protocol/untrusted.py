"""Files in folders that jobs write to: regular ones only, no link followed, nothing waited for.

A job can put a pipe, a link or an endless file in the place of any file of its folder, at any
moment. So a path is opened folder by folder below one that is trusted, and what it is, and how
large, is asked of what was opened. All functions raise OSError. What is in a document is read by
`pydantic_core.from_json`, to which one that is nested too deeply is a ValueError: `json` raises a
RecursionError, which nobody expects.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO

MAX_DOCUMENT_BYTES = 1 << 22
# Of one folder; a job may make any number.
MAX_ENTRIES = 10_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class NotRegular(PermissionError):
    """A link, a pipe or the like in the place of a file or folder, or more than was ever written
    there; links are never followed."""


@contextmanager
def open_folder(path: Path, within: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder `path`, reached from the trusted folder `within`.

    With `make` folders that are missing are made.
    """
    if make:
        within.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(within, _FOLDER)
    try:
        for name in path.relative_to(within).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            below = _open(name, _FOLDER, descriptor, path)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def open_untrusted(path: Path, within: Path, mode: str = "rb") -> IO[bytes]:
    """Open the regular file `path`, below the trusted folder `within`, in a binary `mode`."""

    def opener(_: str, flags: int) -> int:
        descriptor = _open(path.name, flags, folder, path)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotRegular(errno.EPERM, "no regular file", str(path))
        return descriptor

    with open_folder(path.parent, within) as folder:
        return open(path, mode, opener=opener)


def read_untrusted(path: Path, within: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The bytes of a file as of `open_untrusted`; one of more than `max_bytes` is refused."""
    with open_untrusted(path, within) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise NotRegular(errno.EFBIG, f"more than {max_bytes} bytes", str(path))
    return content


def replace_untrusted(
    path: Path,
    content: bytes,
    within: Path,
    *,
    make: bool = True,
    mode: int = 0o666,
    durable: bool = True,
) -> None:
    """Replace a file below the trusted folder `within` in one step, on disk when this returns
    unless it need not be `durable`.

    Folders that are missing are made, unless `make` is false. `mode` holds the most rights of it.
    """
    with open_folder(path.parent, within, make=make) as folder:
        partial = f".{path.name}.{secrets.token_hex(4)}.partial"
        try:
            descriptor = _open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder, path, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(descriptor)
            os.replace(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
        if durable:
            os.fsync(folder)


def remove_untrusted(path: Path, within: Path) -> None:
    """Remove a file, or a link, below the trusted folder `within`, if it is there."""
    with suppress(FileNotFoundError), open_folder(path.parent, within) as folder:
        os.unlink(path.name, dir_fd=folder)


def list_untrusted(path: Path, within: Path) -> list[Path]:
    """Paths of what is in a folder, the first `MAX_ENTRIES`; empty where there is nothing yet."""
    try:
        with open_folder(path, within) as folder, os.scandir(folder) as entries:
            return [path / entry.name for entry in islice(entries, MAX_ENTRIES)]
    except FileNotFoundError:
        return []


def _open(name: str, flags: int, folder: int, path: Path, mode: int = 0o666) -> int:
    if name == "..":
        raise NotRegular(errno.EPERM, "leads out of its folder", str(path))
    try:
        # Non-blocking: opening a pipe would wait for its other end.
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
    except OSError as error:
        # ENXIO: a socket, or a pipe to write to. ENOTDIR: a link or a file in a folder's place.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
            cause = f"{name} is a link, or neither file nor folder"
            raise NotRegular(errno.EPERM, cause, str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None
