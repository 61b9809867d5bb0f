"""Random reading of a remote file that outlives broken connections: what fails is read again."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pyarrow import ArrowException, NativeFile

Result = TypeVar("Result")


class Persist(Protocol):
    """Runs an operation until it works, or gives up with the error that says why."""

    def __call__(self, operation: Callable[[], Result], /) -> Result:
        """What the operation returns."""


class RemoteInput(io.RawIOBase):
    """A file that `open_file` opens, as often as it must. One thread at a time."""

    def __init__(self, open_file: Callable[[], NativeFile], persist: Persist) -> None:
        self._open_file = open_file
        self._persist = persist
        self._file: NativeFile | None = None
        self._position = 0
        self._size_bytes = persist(lambda: self._opened().size())

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as files do."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = max(0, start[whence] + offset)
        return self._position

    def size(self) -> int:
        """Size in bytes."""
        return self._size_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes, all that are left by default; raises a `DataError`."""
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        content = self._persist(lambda: self._read(wanted)) if wanted else b""
        self._position += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer`; how many bytes there were."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Let the file go."""
        self._forget()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            content = self._opened().read_at(size, self._position)
        except (OSError, ArrowException):
            self._forget()
            raise
        if len(content) < size:
            self._forget()
            # As the SDK says it of a body that ends before its announced length.
            message = f"NETWORK_CONNECTION: {len(content)} of {size} bytes came"
            raise OSError(message)
        return bytes(content)

    def _opened(self) -> NativeFile:
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def _forget(self) -> None:
        if self._file is not None:
            with suppress(OSError, ArrowException):
                self._file.close()
            self._file = None
