"""Local and remote files, with retries.

Random reading of a remote file that outlives broken connections: what fails is read again.

What the SDKs of object stores try again by themselves is over in seconds. Here is the patience of a
job on top of it: delays that double, drawn between half and all, until a budget is spent. What no
patience mends (credentials, a bucket that is not there) is said at once.

A thin layer over `pyarrow.fs`. Credentials come from the environment: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL for S3, GOOGLE_APPLICATION_CREDENTIALS for Google. Other
endpoints and regions can stand in the URL: `s3://bucket/key?endpoint_override=http://host:9000`.

Whatever may be done twice is tried again while remote storage is busy or away (`data.retry`); a
request that nothing answers fails after SHARDLOOM_STORAGE_TIMEOUT_S (15) and is sent again.
"""

from __future__ import annotations

import io
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from pyarrow import ArrowException, NativeFile, fs

from trainer.errors import (
    DataError,
    SourceMissingError,
    StorageAwayError,
    StorageError,
    StorageRefusedError,
)

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


# Trying again when remote storage is busy or away: what helps by itself, how often and how long.

logger = logging.getLogger(__name__)
RETRY_VARIABLE = "SHARDLOOM_STORAGE_RETRY_S"
DEFAULT_RETRY_S = 60.0
Kind = Literal["away", "refused", "no_bucket", "other"]
_NO_BUCKET = ("NO_SUCH_BUCKET", "bucket does not exist")
_REFUSED = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY",
    "SIGNATURE",
    "EXPIRED_TOKEN",
    "INVALID_CLIENT_TOKEN",
    "MISSING_AUTHENTICATION",
    "HTTP status 401",
    "HTTP status 403",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
)
_AWAY = (
    "NETWORK_CONNECTION",
    "SLOW_DOWN",
    "THROTTLING",
    "TOO_MANY_REQUESTS",
    "REQUEST_TIMEOUT",
    "SERVICE_UNAVAILABLE",
    "INTERNAL_FAILURE",
    "INTERNAL_ERROR",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "resolve host",
)
_AWAY_STATUS = re.compile(r"HTTP status (408|429|5\d\d)")


def kind_of(said: str) -> Kind:
    """What a message of an object store's SDK (AWS or Google, as Arrow words it) comes down to."""
    if any(word in said for word in _NO_BUCKET):
        return "no_bucket"
    if any(word in said for word in _REFUSED):
        return "refused"
    if any(word in said for word in _AWAY) or _AWAY_STATUS.search(said):
        return "away"
    return "other"


def seconds_from_environment(variable: str, default_s: float) -> float:
    """Seconds that a variable names, `default_s` where it is unset or empty.

    Raises `StorageError` for what is no such number.
    """
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default_s
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise StorageError(f"{variable} is {text!r}; set it to a number of seconds, or unset it")
    return seconds


@dataclass(frozen=True)
class Backoff:
    """How long to try: delays from `first_s` to `longest_s`, `budget_s` seconds in all."""

    budget_s: float = DEFAULT_RETRY_S
    first_s: float = 0.5
    longest_s: float = 10.0

    @classmethod
    def from_environment(cls) -> Backoff:
        """With the budget of SHARDLOOM_STORAGE_RETRY_S (seconds), if that is set."""
        return cls(budget_s=seconds_from_environment(RETRY_VARIABLE, DEFAULT_RETRY_S))

    def delay_s(self, num_failures: int, elapsed_s: float, draw: float) -> float | None:
        """Seconds to wait after `num_failures` in a row, the last `elapsed_s` after the first try.

        `draw` (0 to 1) spreads clients that failed together. None: give up.
        """
        longest = min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        delay = longest * (0.5 + 0.5 * draw)
        return delay if elapsed_s + delay <= self.budget_s else None


def retry(
    operation: Callable[[], Result],
    backoff: Backoff | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = random.random,
) -> Result:
    """Run `operation`, again while it raises `StorageAwayError` and the budget lasts.

    It must do no harm when it is run twice. By default the budget is that of the environment.
    """
    backoff = backoff or Backoff.from_environment()
    began, num_failures = clock(), 0
    while True:
        try:
            return operation()
        except StorageAwayError as error:
            num_failures += 1
            delay_s = backoff.delay_s(num_failures, clock() - began, draw())
            if delay_s is None:
                raise
            logger.warning("%s; trying again in %.1f s", error, delay_s)
        sleep(delay_s)


# Files and folders by path or URL: local disks, S3 (`s3://`) and Google Cloud Storage (`gs://`).

TIMEOUT_VARIABLE = "SHARDLOOM_STORAGE_TIMEOUT_S"
_S3_OPTIONS = {"endpoint_override", "region", "scheme"}
_GCS_OPTIONS = {"endpoint_override", "scheme", "anonymous"}
_CONNECT_TIMEOUT_S = 10.0
# What the SDK tries by itself (attempts x time-out) must end well within `retry.DEFAULT_RETRY_S`:
# nothing is tried again after that.
_REQUEST_TIMEOUT_S = 15.0
_MAX_ATTEMPTS = 3
_COPY_CHUNK_BYTES = 8 * 1024 * 1024


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
        """Understand a local path, `file://`, `s3://` or `gs://`; touches no network.

        Raises `StorageError` for another scheme, a missing bucket or an unknown option.
        """
        if isinstance(text, Location):
            return text
        url = urlsplit(str(text))
        if url.scheme in ("", "file") or isinstance(text, Path):
            local = unquote(url.path) if url.scheme == "file" else str(text)
            return cls(fs.LocalFileSystem(), str(Path(local).expanduser().absolute()))
        if url.scheme not in _FILE_SYSTEMS:
            raise StorageError(
                f"{text}: cannot read '{url.scheme}://'; name a local path, file://, s3:// or gs://"
            )
        if not url.netloc:
            raise StorageError(f"{text} names no bucket; write {url.scheme}://BUCKET/FOLDER")
        options = _options(str(text), url.scheme, url.query)
        path = f"{url.netloc}{unquote(url.path)}".rstrip("/")
        file_system = _FILE_SYSTEMS[url.scheme](options)
        return cls(file_system, path, f"{url.scheme}://", f"?{url.query}" if url.query else "")

    @property
    def text(self) -> str:
        """The location as one would type it; `parse` understands it."""
        return f"{self.root}{self.path}{self.query}"

    def __str__(self) -> str:
        # An endpoint is of no use in a message and may hold a password.
        return f"{self.root}{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine."""
        return not self.root

    @property
    def local_path(self) -> Path:
        """The path of a local location; raises ValueError for a remote one."""
        if not self.is_local:
            raise ValueError(f"{self} is not on this machine")
        return Path(self.path)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """The folder that holds it."""
        return replace(self, path=self.path.rsplit("/", 1)[0] or "/")

    def __reduce__(self) -> tuple[Any, ...]:
        # A file system would take its credentials along; whoever unpickles it has his own.
        return type(self).parse, (self.text,)

    def __truediv__(self, name: str) -> Location:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}")

    def exists(self) -> bool:
        """Whether a file or folder is there."""
        return self._info().type != fs.FileType.NotFound

    def is_folder(self) -> bool:
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
        wanted = fs.FileSelector(self.path, allow_not_found=True, recursive=recursive)
        infos = self._persist("listed", lambda: self.fs.get_file_info(wanted))
        paths = sorted(info.path for info in infos if info.type == fs.FileType.File)
        return tuple(replace(self, path=path) for path in paths)

    def relative_to(self, folder: Location) -> str:
        """The path of this file below `folder`, with forward slashes."""
        return self.path.removeprefix(f"{folder.path.rstrip('/')}/")

    def open_input(self) -> pa.NativeFile:
        """Open for random reading; raises `SourceMissingError` or `StorageError`.

        What is read is read again where a connection breaks off.
        """
        if self.is_local:
            with _faults_named(self, "read"):
                return self.fs.open_input_file(self.path)
        opened = RemoteInput(lambda: self.fs.open_input_file(self.path), self._reading)
        return pa.PythonFile(opened, mode="r")

    def _reading(self, operation: Callable[[], Result]) -> Result:
        return self._persist("read", operation)

    def _persist(self, action: str, operation: Callable[[], Result]) -> Result:
        """Do what can be done twice; raises `SourceMissingError` or `StorageError`."""

        def once() -> Result:
            with _faults_named(self, action):
                return operation()

        return once() if self.is_local else retry(once)

    def open_output(self) -> pa.NativeFile:
        """Open for writing from the start; folders are made. Remote: seen once it is closed."""
        with _faults_named(self, "written"):
            if self.is_local:
                self.fs.create_dir(self.parent.path, recursive=True)
            # Left to itself pyarrow would compress what is named `.gz` once more.
            return self.fs.open_output_stream(self.path, compression=None)

    def read_bytes(self) -> bytes:
        """The whole file."""
        with _faults_named(self, "read"), self.open_input() as file:
            return file.read()

    def write_bytes(self, content: bytes) -> None:
        """Write the whole file."""

        def write() -> None:
            with self.open_output() as file:
                file.write(content)

        self._persist("written", write)

    def download(self, target: Path) -> None:
        """Copy the file to a local path, whose folder must exist.

        Raises OSError where `target` cannot be written, which is no fault of what is read.
        """
        with target.open("wb") as file, self.open_input() as source:
            while chunk := self._read(source):
                file.write(chunk)

    def _read(self, source: pa.NativeFile) -> bytes:
        with _faults_named(self, "read"):
            return source.read(_COPY_CHUNK_BYTES)

    def upload(self, source: Path) -> None:
        """Copy a local file here: whole, or nothing is left of it.

        Raises OSError where `source` cannot be read, which is no fault of what is written.
        """

        def write() -> None:
            with source.open("rb") as file:
                out = self.open_output()
                try:
                    while chunk := file.read(_COPY_CHUNK_BYTES):
                        with self.faults_named("written"):
                            out.write(chunk)
                    with self.faults_named("written"):
                        out.close()
                except BaseException:
                    self.discard(out)
                    raise

        write() if self.is_local else retry(write)

    def discard(self, output: IO[bytes] | pa.NativeFile) -> None:
        """End the writing of what cannot be written whole, and delete what appears.

        Once, and whatever comes of it. Left to itself pyarrow would end an upload whenever its
        stream is collected, and half an object would be there.
        """
        for end in (output.close, self._delete):
            with suppress(OSError, pa.ArrowException, DataError):
                end()

    def delete(self) -> None:
        """Delete the file, or the folder with all that is in it; nothing there is no fault."""

        self._persist("deleted", self._delete)

    def _delete(self) -> None:
        kind = self.fs.get_file_info(self.path).type
        with suppress(FileNotFoundError):  # somebody else may have deleted it since that look
            if kind == fs.FileType.File:
                self.fs.delete_file(self.path)
            elif kind == fs.FileType.Directory:
                self.fs.delete_dir(self.path)

    def faults_named(self, action: str) -> AbstractContextManager[None]:
        """Raise what goes wrong with an open file as a `DataError` that says where and why."""
        return _faults_named(self, action)

    def _info(self) -> fs.FileInfo:
        return self._persist("looked up", lambda: self.fs.get_file_info(self.path))


def _options(text: str, scheme: str, query: str) -> dict[str, str]:
    known = _S3_OPTIONS if scheme == "s3" else _GCS_OPTIONS
    options = dict(parse_qsl(query))
    for name in options:
        if name not in known:
            raise StorageError(f"{text}: unknown option '{name}'; there are {sorted(known)}")
    return options


def _endpoint(options: dict[str, str], default: str | None = None) -> dict[str, str]:
    """Endpoint and scheme as `pyarrow.fs` wants them: `host:port` and `http` apart."""
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
        # What fits into one part is one request then, instead of three.
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
    return seconds_from_environment(TIMEOUT_VARIABLE, _REQUEST_TIMEOUT_S)


_FILE_SYSTEMS = {"s3": _s3, "gs": _gcs}
_CREDENTIALS = {
    "s3://": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL",
    "gs://": "GOOGLE_APPLICATION_CREDENTIALS",
}


@contextmanager
def _faults_named(location: Location, action: str) -> Iterator[None]:
    """Turn what the file system raises into errors that say where and why."""
    try:
        yield
    except FileNotFoundError:
        raise SourceMissingError(
            f"{location} is missing; check the {'path' if location.is_local else 'bucket and key'}"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise _named(location, action, str(error)) from None


def _named(location: Location, action: str, said: str) -> StorageError:
    what = f"{location} cannot be {action}"
    if location.is_local:
        return StorageError(f"{what}: {said}")
    bucket = location.path.split("/", 1)[0]
    variables = _CREDENTIALS[location.root]
    match kind_of(said):
        case "no_bucket":
            cause = f"there is no bucket '{bucket}'; make it or name another"
            return StorageRefusedError(f"{what}: {cause}")
        case "refused":
            mend = f"set {variables} to credentials that may use '{bucket}'"
            return StorageRefusedError(f"{what}: access was denied; {mend} ({said})")
        case "away":
            cause = f"the endpoint does not answer, or is busy; check {variables} and the network"
            return StorageAwayError(f"{what}: {cause} ({said})")
    return StorageError(f"{what}: {said}; check {variables} and that the bucket '{bucket}' exists")
