"""A user's code as one archive: how it is packed, what may be in it, how it is unpacked.

An archive is a zip whose files all lie under `code/`; that folder is what goes on the workers'
module path. Packing is deterministic, and the SHA-256 of the bytes is the archive's id: the same
code has the same id wherever it is packed, and what arrives under an id is what was checked.

An archive comes from a user and may be anything. Nothing is unpacked that was not checked: it has
no absolute paths, no `..`, no links, and bounded numbers and sizes, by what the archive says and by
what comes out of it. Standard library only: the control plane and the client import this.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import secrets
import shutil
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PREFIX = "code"
MAX_FILES = 2000
MAX_UNPACKED_BYTES = 64 * 2**20
MAX_PATH_BYTES = 255
_CHUNK_BYTES = 2**16
# With which each entry of a zip's directory begins.
_ENTRY_MARK = b"PK\x01\x02"
# The least that a zip can date a file: packing must not depend on when files were written.
_EPOCH = (1980, 1, 1, 0, 0, 0)
# What zipfile makes of bytes that are no archive, or not any more.
_DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,  # for one, what is packed in a way that zipfile does not know
    ValueError,
)
# On the module path the user's code comes before what is installed: a name of these would break
# every process of the job before any code of ours runs.
_TAKEN = sys.stdlib_module_names | {
    *("trainer", "service", "sitecustomize", "usercustomize"),
    *("torch", "torchrec", "fbgemm_gpu", "tensordict", "triton", "numpy", "ray", "pyarrow"),
    *("polars", "pydantic", "pydantic_core", "typing_extensions", "yaml", "psutil", "grpc"),
}
_MODULE_SUFFIXES = frozenset({".py", ".pyc", ".so", ".pyd"})
_LEFT_OUT = frozenset({"__pycache__", "node_modules"})


class CodeError(ValueError):
    """An archive, or a folder to make one of, that cannot be taken; says what to change."""


@dataclass(frozen=True)
class CodeSummary:
    """What an archive holds: `size_bytes` is that of the files, unpacked."""

    id: str
    num_files: int
    size_bytes: int


def pack(folder: Path) -> bytes:
    """The archive of a folder's files; raises `CodeError`, or OSError where one is unreadable.

    Hidden files, `__pycache__` and links are left out.
    """
    if not folder.is_dir():
        raise CodeError(f"{folder} is not a folder; give the one that holds your package")
    # No more are looked at than it takes to refuse them, nor is anything read before its size.
    paths = list(itertools.islice(_files(folder), MAX_FILES + 1))
    buffer, num_bytes = io.BytesIO(), 0
    if not paths:
        raise CodeError(f"{folder} has no files; give the one that holds your package")
    if len(paths) > MAX_FILES:
        raise CodeError(f"{folder} has more than {MAX_FILES} files; give a smaller one, code only")
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in paths:
            num_bytes += path.stat().st_size
            if num_bytes > MAX_UNPACKED_BYTES:
                raise _too_large(str(folder))
            _add(archive, path.relative_to(folder).as_posix(), path.read_bytes())
    return buffer.getvalue()


def pack_upload(name: str, data: bytes) -> bytes:
    """The archive of a module, or of a zip of a folder; raises `CodeError`.

    A zip whose files lie under `PREFIX` already is taken as it is; of another one what `pack`
    leaves out is left out, too.
    """
    files, kept, num_bytes = {PurePosixPath(name).name: data}, io.BytesIO(), 0
    if name.lower().endswith(".zip"):
        with _opened(data) as given:
            inside = [entry for entry in given.infolist() if not entry.is_dir()]
            if all(entry.filename.startswith(f"{PREFIX}/") for entry in inside):
                return data
            files = {}
            for entry in inside:
                is_link = stat.S_ISLNK(entry.external_attr >> 16)
                if is_link or any(map(_is_left_out, PurePosixPath(entry.filename).parts)):
                    continue
                files[entry.filename] = _content(given, entry, MAX_UNPACKED_BYTES - num_bytes)
                num_bytes += len(files[entry.filename])
    with zipfile.ZipFile(kept, "w") as archive:
        for path in sorted(files, key=lambda each: each.split("/")):  # the order of `_files`
            _add(archive, path, files[path])
    return kept.getvalue()


def _add(archive: zipfile.ZipFile, path: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(f"{PREFIX}/{path}", date_time=_EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    _check_entry(entry)
    archive.writestr(entry, content)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda each: each.name):
        if _is_left_out(path.name) or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path


def _is_left_out(name: str) -> bool:
    """Whether a file or folder of this name is no code; `..` is refused elsewhere."""
    is_hidden = name.startswith(".") and name != ".."
    return is_hidden or name in _LEFT_OUT or name.endswith(".pyc")


def check(data: bytes) -> CodeSummary:
    """What the archive `data` holds; raises `CodeError` unless it is safe to unpack."""
    num_files, num_bytes = 0, 0
    with _opened(data) as archive:
        for _, content in _checked_files(archive):
            num_files += 1
            num_bytes += len(content)
    if not num_files:
        raise CodeError("the archive has no files")
    return CodeSummary(id_of(data), num_files, num_bytes)


def id_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unpack(data: bytes, code_id: str, into: Path) -> Path:
    """Write the files of an archive below the new folder `into`; gives the one to import from.

    Raises `CodeError` where the bytes are not those of `code_id`, or not safe to unpack; nothing is
    written then. Raises OSError.
    """
    if id_of(data) != code_id:
        raise CodeError(
            f"the archive of code {code_id[:12]} was changed or cut short since it was uploaded "
            f"(its SHA-256 is {id_of(data)[:12]}...); upload it again"
        )
    with _opened(data) as archive:
        files = list(_checked_files(archive))
    into.mkdir(parents=True)
    for entry, content in files:
        target = into / entry.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return into / PREFIX


def add_to_path(archive: Path) -> None:
    """Unpack the archive `ID.zip` beside it and put it on this process's module path, and on that
    of the processes that it starts.

    Several processes may, at once. Raises `CodeError` or OSError.
    """
    folder = archive.with_suffix("")
    if not folder.exists():
        own = archive.with_name(f"{archive.stem}.{secrets.token_hex(4)}")
        try:
            unpack(archive.read_bytes(), archive.stem, own)
            own.rename(folder)
        except OSError:
            shutil.rmtree(own, ignore_errors=True)
            if not folder.exists():  # or another process was faster
                raise
    path = str(folder / PREFIX)
    sys.path.insert(0, path)
    others = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{path}{os.pathsep}{others}" if others else path


def _opened(data: bytes) -> zipfile.ZipFile:
    # Counted before zipfile makes an object of each, whatever number the archive states.
    if data.count(_ENTRY_MARK) > MAX_FILES:
        raise CodeError(f"the archive has too many entries; at most {MAX_FILES} are taken")
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except _DAMAGES as error:
        raise CodeError(
            f"not a zip archive ({error}); `shardloom submit --code` makes one"
        ) from None


def _checked_files(archive: zipfile.ZipFile) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
    num_bytes, names, folders = 0, set[str](), set[str]()
    for entry in archive.infolist():
        _check_entry(entry)
        folders.update(map(str, PurePosixPath(entry.filename).parents))
        if entry.is_dir():
            folders.add(entry.filename.removesuffix("/"))
            continue
        if entry.filename in names:
            raise CodeError(f"the archive has {entry.filename!r} twice")
        names.add(entry.filename)
        content = _content(archive, entry, MAX_UNPACKED_BYTES - num_bytes)
        num_bytes += len(content)
        yield entry, content
    if both := sorted(names & folders):
        raise CodeError(f"in the archive {both[0]!r} is a file and a folder")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    name = entry.filename
    # What the zip itself says, not what Python made of it: it cuts names at NUL.
    parts = PurePosixPath(name).parts
    is_odd = "\\" in name or "\x00" in entry.orig_filename or not name.isprintable()
    if is_odd or ".." in parts or name.startswith("/") or ":" in name:
        raise CodeError(f"the archive has an unsafe path: {name[:MAX_PATH_BYTES]!r}")
    if len(name.encode()) > MAX_PATH_BYTES:
        raise CodeError(f"the archive has a path of more than {MAX_PATH_BYTES} bytes")
    if name.removesuffix("/") != "/".join(parts):
        raise CodeError(f"the archive has a path that is written in a rare way: {name!r}")
    if parts[:1] != (PREFIX,) or name == PREFIX:
        raise CodeError(f"all files of the archive must lie under {PREFIX}/, {name!r} does not")
    top = parts[1].partition(".")[0] if parts[1:] else ""
    is_module = len(parts) > 2 or PurePosixPath(name).suffix in _MODULE_SUFFIXES
    if top in _TAKEN and is_module:
        raise CodeError(
            f"{name!r} would take the place of the module '{top}', which Shardloom or Python needs "
            "itself; give the folder that holds your code alone, or rename it"
        )
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise CodeError(f"{name!r} is neither a file nor a folder; links are not taken")
    if entry.flag_bits & 0x1:
        raise CodeError(f"{name!r} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CodeError(f"{name!r} is packed in a rare way; use stored or deflated")


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, room_bytes: int) -> bytes:
    """What is in an entry, whatever size the archive states for it."""
    if entry.file_size > room_bytes:
        raise _too_large("the archive")
    try:
        with archive.open(entry) as file:
            content = b"".join(iter(lambda: file.read(_CHUNK_BYTES), b""))
    except _DAMAGES as error:
        raise CodeError(f"{entry.filename!r} cannot be unpacked ({error})") from None
    return content


def _too_large(what: str) -> CodeError:
    return CodeError(
        f"{what} holds more than {MAX_UNPACKED_BYTES // 2**20} MiB; ship code only, and keep data "
        "and weights on storage that the hosts share"
    )
