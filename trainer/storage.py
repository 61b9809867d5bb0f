"""Files and folders by path or URL: local disks, S3 (`s3://`) and Google Cloud Storage (`gs://`).

A thin layer over `pyarrow.fs`. Credentials come from the environment: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL for S3, GOOGLE_APPLICATION_CREDENTIALS for Google. Other
endpoints and regions can stand in the URL: `s3://bucket/key?endpoint_override=http://host:9000`.

Operations that are safe to repeat are retried with exponential backoff and jitter while remote
storage is busy or unreachable, for SHARDLOOM_STORAGE_RETRY_S seconds (60) from the first failure;
a request fails after SHARDLOOM_STORAGE_TIMEOUT_S (15). Wrong credentials and missing buckets are
reported at once.
Everything raises `SourceMissingError` or a `StorageError` that names the location and the cause.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
import posixpath
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from trainer.errors import (
    CorruptFileError,
    DataError,
    SourceMissingError,
    StorageAwayError,
    StorageError,
    StorageRefusedError,
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_RETRY_S, _FIRST_DELAY_S, _MAX_DELAY_S = 60.0, 0.5, 10.0
_CONNECT_TIMEOUT_S = 10.0
# The SDK's own retries (attempts x timeout) must end well within `_RETRY_S`: what fails later went
# well for a while, and `retry` begins anew, so many times in all.
_MAX_BEGINNINGS = 5
_REQUEST_TIMEOUT_S = 15.0
_MAX_ATTEMPTS = 3
_COPY_CHUNK_BYTES = 8 * 1024 * 1024
# Of a larger read so much at most is read again where a connection breaks.
_READ_BYTES = 64 * 1024 * 1024
# Two parts of 10 MiB for each of Arrow's 8 threads.
_UNSENT_BYTES = 160 * 1024 * 1024

# What errors of the SDKs (AWS or Google, as worded by Arrow) say, the class and the text of ours.
_FAULTS: list[tuple[str, type[StorageError], str]] = [
    (
        "NO_SUCH_BUCKET|bucket does not exist",
        StorageRefusedError,
        "there is no bucket '{bucket}'; make it or name another",
    ),
    (
        "REQUEST_TIME_TOO_SKEWED|REQUEST_EXPIRED",
        StorageError,
        "the clock of {host}, or that of the store, is wrong; set it by NTP ({message})",
    ),
    (
        "ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|INVALID_CLIENT_TOKEN"
        "|EXPIRED_TOKEN|ExpiredToken|TokenRefreshRequired|InvalidToken|MISSING_AUTHENTICATION"
        "|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED",
        StorageRefusedError,
        "access was denied; set {variables} to credentials that may use '{bucket}' ({message})",
    ),
    (
        "NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|TOO_MANY_REQUESTS|REQUEST_TIMEOUT|UNAVAILABLE"
        "|INTERNAL_FAILURE|INTERNAL_ERROR|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|resolve host"
        r"|HTTP status (408|429|5\d\d)",
        StorageAwayError,
        "the endpoint does not answer, or is busy; check {variables} and the network ({message})",
    ),
    ("", StorageError, "{message}; check {variables} and that the bucket '{bucket}' exists"),
]


def seconds_from_environment(variable: str, default_s: float) -> float:
    """Seconds from a variable, `default_s` where it is unset or empty; raises `StorageError`."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise StorageError(f"{variable} is {text!r}; set it to a number of seconds, or unset it")
    return seconds


def retry(operation: Callable[[], Result]) -> Result:
    """Run `operation`, which must be safe to repeat, until it raises no `StorageAwayError`.

    Pauses double up to a bound, with a jitter, which spreads clients that failed together. Raises
    the last error once SHARDLOOM_STORAGE_RETRY_S are over since the first failure, or since one of
    a try that took longer than that by itself: a large upload, most of which went well.
    """
    budget_s = seconds_from_environment("SHARDLOOM_STORAGE_RETRY_S", _RETRY_S)
    num_beginnings, first_failed, longest_s = 0, 0.0, _FIRST_DELAY_S
    while True:
        began = time.monotonic()
        try:
            return operation()
        except StorageAwayError as error:
            failed = time.monotonic()
            went_well = failed - began > budget_s and num_beginnings < _MAX_BEGINNINGS
            if went_well or not num_beginnings:
                num_beginnings, first_failed = num_beginnings + 1, failed
            delay_s = longest_s * (0.5 + 0.5 * random.random())
            if failed - first_failed + delay_s > budget_s:
                raise
            logger.warning("%s; trying again in %.1f s", error, delay_s)
        time.sleep(delay_s)
        longest_s = min(2 * longest_s, _MAX_DELAY_S)


def write_upload(stream: Any, content: bytes | memoryview) -> None:
    """Write bytes to the output stream of an upload, and wait at times until all is sent.

    Arrow alone keeps a copy of whatever it is given, and sends that by threads which reads of
    Parquet need as well.
    """
    left = memoryview(content)
    while left:
        num_bytes = _UNSENT_BYTES - stream.tell() % _UNSENT_BYTES
        stream.write(left[:num_bytes])
        if num_bytes <= len(left):
            stream.flush()
        left = left[num_bytes:]


@dataclass(frozen=True)
class Location:
    """A file or folder of some file system.

    `path` is what `fs` calls it (`bucket/key` without a scheme), `root` what comes before it in a
    URL (empty for local paths) and `query` what came after it.
    """

    fs: fs.FileSystem
    path: str
    root: str = ""
    query: str = ""

    @classmethod
    def parse(cls, text: str | Path | Location) -> Location:
        """Parse a local path, `file://`, `s3://` or `gs://` URL, without network access.

        Raises `StorageError` for another scheme, a missing bucket, a host of `file://`, an unknown
        or wrong option, a home folder that nobody has, and what would end the path: a `#`, or a `?`
        of `file://`.
        """
        if isinstance(text, Location):
            return text
        if isinstance(text, Path):
            return cls._local(text)
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise StorageError(f"{text} is no URL: {error}; write %5B for a '['") from None
        if url.fragment and url.scheme:
            raise StorageError(f"{text}: write %23 for the '#' of a URL's path")
        if url.query and url.scheme == "file":
            raise StorageError(f"{text}: write %3F for the '?' of a URL's path")
        if url.scheme == "file" and url.netloc not in ("", "localhost"):
            raise StorageError(f"{text} names the host '{url.netloc}'; write file:///FOLDER")
        if url.scheme in ("", "file"):
            return cls._local(Path(unquote(url.path) if url.scheme else text))
        if (store := STORES.get(url.scheme)) is None:
            raise StorageError(
                f"{text}: cannot read '{url.scheme}://'; name a local path, file://, s3:// or gs://"
            )
        if not url.netloc:
            raise StorageError(f"{text} names no bucket; write {url.scheme}://BUCKET/FOLDER")
        options = dict(parse_qsl(url.query))
        if unknown := [name for name in options if name not in store.options]:
            known = sorted(store.options)
            raise StorageError(f"{text}: unknown option '{unknown[0]}'; there are {known}")
        path = f"{url.netloc}{unquote(url.path)}".rstrip("/")
        query = f"?{url.query}" if url.query else ""
        try:
            file_system = store.connect(options)
        except ValueError as error:  # also pyarrow's
            raise StorageError(
                f"{url.scheme}://{path}: {error}; check the options after the '?', and the "
                "endpoint in the environment"
            ) from None
        return cls(file_system, path, f"{url.scheme}://", query)

    @classmethod
    def _local(cls, path: Path) -> Location:
        try:
            return cls(fs.LocalFileSystem(), str(path.expanduser().absolute()))
        except RuntimeError:
            raise StorageError(
                f"{path}: nobody has that home folder; give an absolute path"
            ) from None

    @property
    def text(self) -> str:
        """The location as one would type it; `parse` understands it."""
        return f"{self.root}{quote(self.path)}{self.query}" if self.root else self.path

    def __str__(self) -> str:
        # An endpoint is of no use in a message and may hold a password.
        return f"{self.root}{self.path}"

    @property
    def is_local(self) -> bool:
        return not self.root

    @property
    def local_path(self) -> Path:
        """The path of a local location; raises ValueError for a remote one."""
        if not self.is_local:
            raise ValueError(f"{self} is not on this machine")
        return Path(self.path)

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        return replace(self, path=self.path.rsplit("/", 1)[0] or "/")

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the credentials of the file system: whoever unpickles it has its own.
        return type(self).parse, (self.text,)

    def __truediv__(self, name: str) -> Location:
        # What a path may hold besides, a key may not: `./a`, `a//b`.
        name = posixpath.normpath(name)
        return self if name == "." else replace(self, path=f"{self.path.rstrip('/')}/{name}")

    def exists(self) -> bool:
        return self._info().type != fs.FileType.NotFound

    def is_dir(self) -> bool:
        """Whether it is a folder; on object stores: whether any object lies under it."""
        return self._info().type == fs.FileType.Directory

    def size_bytes(self) -> int:
        """Size of a file; raises `SourceMissingError` where there is none."""
        info = self._info()
        if info.type != fs.FileType.File:
            raise SourceMissingError(f"{self} is missing; check the path, or make the file again")
        return info.size

    def fingerprint(self) -> tuple[int, int] | None:
        """Size in bytes and time of change (ns) of a file; None where there is none."""
        info = self._info()
        return (info.size, info.mtime_ns) if info.type == fs.FileType.File else None

    def list(self, *, recursive: bool = False) -> tuple[Location, ...]:
        """The files in the folder, in name order; none where there is no folder."""
        return tuple(replace(self, path=path) for path, _ in sorted(self._files(recursive)))

    def sizes_bytes(self) -> dict[str, int]:
        """Size of every file in the folder, at whatever depth, by its path below the folder."""
        found = self._files(recursive=True)
        return {replace(self, path=path).relative_to(self): size for path, size in found}

    def _files(self, recursive: bool) -> Sequence[tuple[str, int]]:
        """Path and size of every file in the folder."""

        def find() -> Sequence[tuple[str, int]]:
            wanted = fs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
            found = self.fs.get_file_info(wanted)
            return [(each.path, each.size) for each in found if each.type == fs.FileType.File]

        return self.retried("listed", find)

    def relative_to(self, folder: Location) -> str:
        """The path of this file below `folder`, with forward slashes."""
        return self.path.removeprefix(f"{folder.path.rstrip('/')}/")

    def open_input(self) -> pa.NativeFile:
        """Open for random reading; remote reads are retried when a connection breaks."""
        if self.is_local:
            with self.errors_as("read"):
                if self.local_path.is_fifo():
                    raise OSError("it is a pipe, to which nobody may ever write; put a file there")
                return self.fs.open_input_file(self.path)
        return pa.PythonFile(_RemoteInput(self), mode="r")

    def parse_with(self, parser: Callable[[pa.NativeFile], Result]) -> Result:
        """What `parser` makes of the opened file.

        Faults of storage are retried and raised as by `open_input`; what `parser` raises about the
        contents (pyarrow's errors, some of which are OSErrors) comes as it is.
        """
        with self.reading(), self.open_input() as file:
            return parser(file)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors of a disk into `DataError`s; what a parser raises comes as it is."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            with self.errors_as("read"):
                raise

    def retried(self, action: str, operation: Callable[[], Result]) -> Result:
        """Run an operation that is safe to repeat, with retries where storage is remote."""

        def attempt() -> Result:
            with self.errors_as(action):
                return operation()

        return attempt() if self.is_local else retry(attempt)

    def open_output(self) -> pa.NativeFile:
        """Open for writing, making folders; a remote file appears when it is closed."""
        with self.errors_as("written"):
            if self.is_local:
                self.fs.create_dir(self.parent.path, recursive=True)
            # By default pyarrow would compress what is named `.gz` once more.
            return self.fs.open_output_stream(self.path, compression=None)

    def read_bytes(self) -> bytes:
        with self.errors_as("read"), self.open_input() as file:
            return file.read()

    def write_bytes(self, content: bytes) -> None:

        def write() -> None:
            with self.open_output() as file:
                file.write(content)

        self.retried("written", write)

    def size_and_sha256(self) -> tuple[int, str]:
        """Size of the file in bytes, and its SHA-256 in hexadecimal digits."""
        size_bytes, digest = 0, hashlib.sha256()
        with self.errors_as("read"), self.open_input() as source:
            while chunk := source.read(_COPY_CHUNK_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
        return size_bytes, digest.hexdigest()

    def upload(self, source: Path) -> None:
        """Copy a local file here; a failed copy is deleted.

        Raises OSError where `source` cannot be read.
        """

        def write() -> None:
            with source.open("rb") as file:
                out = self.open_output()
                try:
                    while chunk := file.read(_COPY_CHUNK_BYTES):
                        with self.errors_as("written"):
                            write_upload(out, chunk)
                    with self.errors_as("written"):
                        out.close()
                except BaseException:
                    self.discard(out)
                    raise

        write() if self.is_local else retry(write)

    def discard(self, output: IO[bytes] | pa.NativeFile) -> None:
        """Close the stream of a failed write and delete what it wrote; ignores errors.

        Otherwise pyarrow would complete the upload when the stream is garbage-collected.
        """
        for end in (output.close, self._delete):
            with suppress(OSError, pa.ArrowException, DataError):
                end()

    def delete(self) -> None:
        """Delete the file, or the folder with its contents, if there is one."""
        self.retried("deleted", self._delete)

    def _delete(self) -> None:
        kind = self.fs.get_file_info(self.path).type
        with suppress(FileNotFoundError):  # deleted by another process meanwhile
            if kind == fs.FileType.File:
                self.fs.delete_file(self.path)
            elif kind == fs.FileType.Directory:
                self.fs.delete_dir(self.path)

    @contextmanager
    def errors_as(self, action: str) -> Iterator[None]:
        """Turn errors of the file system into `DataError`s: "LOCATION cannot be ACTION: ..."."""
        try:
            yield
        except FileNotFoundError:
            what = "path" if self.is_local else "bucket and key"
            raise SourceMissingError(f"{self} is missing; check the {what}") from None
        except UnicodeError:
            place = str(self).encode(errors="replace").decode()
            raise CorruptFileError(
                f"{place} cannot be {action}: its name, or that of a file in it, is not UTF-8; "
                "rename it"
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise self._storage_error(action, str(error)) from None

    def _storage_error(self, action: str, message: str) -> StorageError:
        failed = f"{self} cannot be {action}"
        if self.is_local:
            return StorageError(f"{failed}: {message}")
        _, kind, text = next(fault for fault in _FAULTS if re.search(fault[0], message))
        told = text.format(
            message=message,
            bucket=self.path.split("/", 1)[0],
            variables=STORES[self.root.removesuffix("://")].variables,
            host=socket.gethostname(),
        )
        return kind(f"{failed}: {told}")

    def _info(self) -> fs.FileInfo:
        return self.retried("looked up", lambda: self.fs.get_file_info(self.path))


class _RemoteInput(io.RawIOBase):
    """A remote file for one thread, opened again after an error."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._file: pa.NativeFile | None = None
        self._position = 0
        self._size_bytes = location.retried("read", lambda: self._opened().size())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = max(0, start[whence] + offset)
        return self._position

    def read(self, size: int | None = -1, /) -> Any:
        """Up to `size` bytes, by default all that are left; raises a `DataError`."""
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        content = bytearray(wanted)
        for start in range(0, wanted, _READ_BYTES):
            read = partial(self._read, min(_READ_BYTES, wanted - start))
            piece = self._location.retried("read", read)
            content[start : start + len(piece)] = piece
            self._position += len(piece)
        return content

    def close(self) -> None:
        self._close_file()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            content = self._opened().read_at(size, self._position)
            if len(content) < size:
                # As the SDK reports a body that ends before its announced length.
                raise OSError(f"NETWORK_CONNECTION: {len(content)} of {size} bytes came")
        except (OSError, pa.ArrowException):
            self._close_file()
            raise
        return bytes(content)

    def _opened(self) -> pa.NativeFile:
        if self._file is None:
            self._file = self._location.fs.open_input_file(self._location.path)
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError, pa.ArrowException):
                file.close()


def _endpoint(options: dict[str, str], default: str | None = None) -> dict[str, str]:
    """Endpoint as `pyarrow.fs` wants it: `host:port` and the scheme apart."""
    found = options.get("endpoint_override", default)
    named = {"scheme": options["scheme"]} if "scheme" in options else {}
    if not found:
        return named
    url = urlsplit(found if "://" in found else f"//{found}")
    return {"endpoint_override": url.netloc, "scheme": url.scheme or "https"} | named


def _s3(options: dict[str, str]) -> fs.FileSystem:
    region = {"region": options["region"]} if "region" in options else {}
    return fs.S3FileSystem(
        **_endpoint(options, os.environ.get("AWS_ENDPOINT_URL")),
        **region,
        connect_timeout=_CONNECT_TIMEOUT_S,
        request_timeout=_request_timeout_s(),
        # A file of one part is then one request instead of three.
        allow_delayed_open=True,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_MAX_ATTEMPTS),
    )


def _gcs(options: dict[str, str]) -> fs.FileSystem:
    return fs.GcsFileSystem(
        **_endpoint(options, os.environ.get("STORAGE_EMULATOR_HOST")),
        anonymous=options.get("anonymous", "").lower() in ("1", "true"),
        retry_time_limit=timedelta(seconds=_request_timeout_s()),
    )


def _request_timeout_s() -> float:
    return seconds_from_environment("SHARDLOOM_STORAGE_TIMEOUT_S", _REQUEST_TIMEOUT_S)


class _Store(NamedTuple):
    """An object store: options that its URLs may have, and the variables of its credentials."""

    connect: Callable[[dict[str, str]], fs.FileSystem]
    options: set[str]
    variables: str


_AWS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
STORES = {
    "s3": _Store(_s3, {"endpoint_override", "region", "scheme"}, _AWS),
    "gs": _Store(
        _gcs, {"endpoint_override", "scheme", "anonymous"}, "GOOGLE_APPLICATION_CREDENTIALS"
    ),
}
"""By the scheme of URLs; `trainer.spec.base.is_remote` knows the same."""
