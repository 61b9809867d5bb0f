"""Export requests on run storage; the files of a request's folder are its whole state.

RUN_DIR/exports/x-ID/
  request.json     the request; written first
  lock             held (flock) by the process that works on it
  progress.txt     progress of that process, a line each
  failure.json     why it failed: {"message"}
  artifact/        the export, moved here whole (`trainer.export.artifact`)
  export.log       output of the process
  deleting         it is to be deleted: no longer listed, its process ends, then its files go

`python -m trainer.export --request DIR` takes the lock first and does nothing where the export is
done, so a service that was restarted may run it again. Where another process has the lock, a
driver's waits; a service's ends (`HELD`), as the job's code can hold it for ever. Deleting marks
first and then, holding the lock, renames to `.x-ID.gone` and removes; an interrupted deletion is
found by these names (`remove_deleted`). Jobs write to run storage: no link is followed out of the
job's folder, lest a service shows files of its host, or writes to them. No torch here: the service
imports it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BaseModel, Field
from pydantic_core import from_json

from trainer.export.artifact import (
    MARKER,
    REPORT,
    CheckpointName,
    ExportStatus,
    Manifest,
    read_manifest,
)
from trainer.protocol import events
from trainer.protocol.events import Event
from trainer.protocol.run_dir import RunDir, fsync_folder
from trainer.protocol.untrusted import (
    list_untrusted,
    open_folder,
    open_untrusted,
    read_untrusted,
    replace_untrusted,
)
from trainer.spec.job import JobSpec
from trainer.spec.training import Quantization

logger = logging.getLogger(__name__)
_ID = re.compile(r"x-[0-9a-f]{8}")
# Of a document; there may be thousands.
_MAX_BYTES = 2**16
_LINE_BYTES = 2**12
# Characters; a document holds them however they are escaped.
_MAX_MESSAGE = 5000
_DELETING = "deleting"
# Exit code of a service's process that found the lock taken.
HELD = os.EX_TEMPFAIL


class RequestedExport(BaseModel, extra="forbid", frozen=True):
    """The request: `checkpoint` is `newest`, `best` or a step; `created` in Unix seconds.

    `seal` is the service's signature over `text_of`, empty where a driver asked.
    """

    checkpoint: CheckpointName
    quantize: Quantization
    created: float
    seal: Annotated[str, Field(pattern="^[0-9a-f]*$")] = ""

    def text_of(self, folder: ExportFolder) -> str:
        """The signed text: the whole request, and its place."""
        place = f"{folder.run_dir.name}/{folder.id}"
        return f"{place} {self.checkpoint} {self.quantize} {self.created!r}"


@dataclass(frozen=True)
class ExportFolder:
    """One export of a job, in any state."""

    root: Path

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def run_dir(self) -> Path:
        return self.root.parent.parent

    @property
    def artifact(self) -> Path:
        """The export itself; there once it is whole."""
        return self.root / "artifact"

    @property
    def wanted(self) -> RequestedExport:
        """The request; raises OSError or ValueError where it cannot be read."""
        # User code may have written the file.
        return RequestedExport.model_validate_json(self._read("request.json"))

    @property
    def status(self) -> ExportStatus:
        if self._has(f"{self.artifact.name}/{MARKER}"):
            return "succeeded"
        if self._has("failure.json"):
            return "failed"
        return "running" if self._is_locked() else "queued"

    @property
    def message(self) -> str:
        """Why it failed, or the newest progress line."""
        try:
            return str(from_json(self._read("failure.json"))["message"])
        except (OSError, ValueError, KeyError, TypeError):
            return self._last_line("progress.txt")

    @property
    def last_output(self) -> str:
        return self._last_line("export.log")

    def _last_line(self, name: str) -> str:
        with contextlib.suppress(OSError, IndexError), self._open(name, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES))
            return file.read(_LINE_BYTES).decode(errors="replace").splitlines()[-1]
        return ""

    def read_manifest(self) -> Manifest:
        """The marker of the export; raises `ArtifactError`."""
        return read_manifest(
            self.artifact, lambda marker: read_untrusted(marker, self.run_dir.parent)
        )

    def open_file(self, name: str) -> IO[bytes]:
        """A file of the export, to read; raises OSError."""
        return self._open(f"{self.artifact.name}/{name}", "rb")

    def read_report(self) -> dict[str, Any] | None:
        """The report of the export; None until it is done."""
        try:
            report = from_json(self._read(f"{self.artifact.name}/{REPORT}"))
        except (OSError, ValueError):
            return None
        return report if isinstance(report, dict) else None

    def open_log(self) -> IO[bytes]:
        """The file for the output of the process, to append to; raises OSError."""
        return self._open("export.log", "ab")

    def tell(self, line: str) -> None:
        with self._open("progress.txt", "ab") as file:
            file.write(f"{line}\n".encode())

    def fail(self, message: str) -> None:
        """Record why there is no export; nothing runs it again."""
        self._write("failure.json", {"message": message[:_MAX_MESSAGE]})

    @contextlib.contextmanager
    def hold(self, *, waits: bool = True) -> Iterator[bool]:
        """Take the lock; yields whether there is still something to do.

        Raises BlockingIOError where another process has it, unless it `waits`.
        """
        with self._open("lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            yield not self.is_deleted and self.status in ("running", "queued")

    @property
    def is_deleted(self) -> bool:
        """Whether it was marked as deleted, or is gone."""
        return (self.root / _DELETING).exists() or not self.root.exists()

    def mark_deleted(self) -> None:
        """Mark it as deleted, durably; raises OSError."""
        self._open(_DELETING, "ab").close()
        fsync_folder(self.root)

    def remove(self) -> bool:
        """Remove the files of a marked export; False while a process works on it.

        Raises OSError; what is left then is found by `remove_deleted`.
        """
        gone = self.root.with_name(f".{self.id}.gone")
        try:
            with self._open("lock", "ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.root.rename(gone)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True  # another process was faster
        _remove_tree(gone)
        return True

    def _is_locked(self) -> bool:
        try:
            with self._open("lock", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _has(self, name: str) -> bool:
        with contextlib.suppress(OSError), self._open(name, "rb"):
            return True
        return False

    def _read(self, name: str) -> str:
        with self._open(name, "rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")

    def _write(self, name: str, document: object) -> None:
        """Write a JSON file atomically."""
        content, within = json.dumps(document).encode(), self.run_dir.parent
        replace_untrusted(self.root / name, content, within, make=False)

    def _open(self, name: str, mode: str) -> IO[bytes]:
        return open_untrusted(self.root / name, self.run_dir.parent, mode)


def ask_for(
    run_dir: RunDir,
    checkpoint: str,
    quantize: Quantization,
    seal: Callable[[str], str] | None = None,
) -> ExportFolder:
    """Create an export request, with the seal that `seal` makes of its text; raises OSError."""
    folder = ExportFolder(run_dir.exports_dir / f"x-{secrets.token_hex(4)}")
    with open_folder(run_dir.exports_dir, run_dir.runs_dir, make=True) as exports:
        os.mkdir(folder.id, dir_fd=exports)
    wanted = RequestedExport(checkpoint=checkpoint, quantize=quantize, created=time.time())
    if seal is not None:
        wanted = wanted.model_copy(update={"seal": seal(wanted.text_of(folder))})
    folder._write("request.json", wanted.model_dump())
    return folder


def places_digest(spec: JobSpec) -> str:
    """SHA-256 of the paths that an export reads beside the run folder; URLs may hold a password."""
    places = json.dumps([spec.data.path, spec.checkpoint.path])
    return hashlib.sha256(places.encode()).hexdigest()


def list_exports(run_dir: RunDir) -> list[ExportFolder]:
    """All requested exports of a job, oldest first."""
    paths = list_untrusted(run_dir.exports_dir, run_dir.runs_dir)
    dated = []
    for folder in [ExportFolder(path) for path in paths if _ID.fullmatch(path.name)]:
        # What is no request, damaged or being deleted, is left out.
        with contextlib.suppress(OSError, ValueError):
            if not folder.is_deleted:
                dated.append((folder.wanted.created, folder.id, folder))
    return [folder for *_, folder in sorted(dated)]


def remove_deleted(run_dir: RunDir) -> int:
    """Remove the files of deleted exports that no process works on; returns how many.

    Raises OSError.
    """
    paths = list_untrusted(run_dir.exports_dir, run_dir.runs_dir)
    marked = [path for path in paths if _ID.fullmatch(path.name) and (path / _DELETING).exists()]
    removed = [ExportFolder(path).remove() for path in marked]
    halves = [path for path in paths if path.name.startswith(".x-") and path.suffix == ".gone"]
    for path in halves:
        _remove_tree(path)
    return sum(removed) + len(halves)


def _remove_tree(path: Path) -> None:
    """Remove a folder; another process may do so at the same time."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def find_export(run_dir: RunDir, export_id: str) -> ExportFolder | None:
    return next((each for each in list_exports(run_dir) if each.id == export_id), None)


def export_on_success(spec: JobSpec, run_dir: RunDir, write: Callable[[Event], None]) -> None:
    """Export in a subprocess if `spec.export` says so, and emit the outcome as a `Note`.

    The driver's last work after success: if it fails, `shardloom export JOB` may try again.
    """
    wanted = spec.export
    if wanted is None or not wanted.on_success:
        return
    try:
        folder = ask_for(run_dir, wanted.checkpoint, wanted.quantize)
        _note(write, "info", f"export {folder.id} begins")
        _run(folder)
    except OSError as error:
        _note(write, "error", f"the model was not exported: {error}")
        return
    if folder.is_deleted:
        _note(write, "info", f"export {folder.id} was deleted before it was done")
    elif folder.status == "succeeded":
        _note(write, "info", f"export {folder.id}: {folder.message}")
    else:
        _note(write, "error", f"export {folder.id} {folder.status}: {folder.message}")


def _run(folder: ExportFolder) -> None:
    command = [sys.executable, "-m", "trainer.export", "--request", str(folder.root)]
    with folder.open_log() as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if not folder.is_deleted and folder.status in ("queued", "running"):
        folder.fail(f"the process that made it ended with code {code}; export.log says more")


def _note(write: Callable[[Event], None], level: str, message: str) -> None:
    logger.info("%s", message)
    write(events.Note(time=time.time(), level=level, message=message))  # type: ignore[arg-type]
