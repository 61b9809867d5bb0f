"""The folder of an export: its files, the marker that completes it, and the errors of exporting.

Every message names the cause and what to change. No torch here: the service and clients read it.

DIR/
  EXPORT.json      written last: what was exported, and size and SHA-256 of every other file
  model.pt2        torch.export program: arrays of ids and numbers -> outputs of the model
  spec.json        the job's spec, all tables with their sizes
  features.json    what a row to score has to hold, for people and programs
  vocabularies/    ids of raw values, as the prepared data has them
  report.json      how far the export's predictions are from the trainer's
  README.md        how to score with it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError

from trainer.protocol.run_dir import FileRecord, file_record, write_whole
from trainer.spec.job import JobSpec
from trainer.spec.training import Quantization

ExportStatus = Literal["queued", "running", "succeeded", "failed"]
# 18 digits: what any database and any file name can hold.
CheckpointName = Annotated[str, StringConstraints(pattern=r"^(newest|best|[0-9]{1,18})$")]


class ExportError(Exception):
    """What was asked for cannot be exported, or an export cannot be read."""


class ArtifactError(ExportError):
    """A folder is no whole export, or holds one already."""


class BadRow(ExportError):
    """Row number `row` to score lacks a value in `column`, or has a wrong one.

    `problem` says what is wrong without saying where.
    """

    def __init__(self, row: int, column: str, problem: str) -> None:
        self.row = row
        self.column = column
        self.problem = problem
        super().__init__(f"row {row}, '{column}': {problem}")


MARKER = "EXPORT.json"
PROGRAM = "model.pt2"
SPEC = "spec.json"
FEATURES = "features.json"
REPORT = "report.json"
README = "README.md"
VOCABULARIES = "vocabularies"
_MAX_FILES = 512


def _of_a_file(record: FileRecord) -> FileRecord:
    if not 0 <= record.size_bytes < 2**63:
        raise ValueError("no file is of that size")
    return record


class Manifest(BaseModel, extra="forbid"):
    """The marker: what was exported. `step` and `checkpoint` say of which state of the job."""

    format: Literal[1] = 1
    job: str
    checkpoint: str
    step: int
    quantize: Quantization
    created: float
    versions: dict[str, str]
    # Each is opened at once for a download, and job code may have written this.
    files: Annotated[
        dict[str, Annotated[FileRecord, AfterValidator(_of_a_file)]], Field(max_length=_MAX_FILES)
    ]

    @property
    def size_bytes(self) -> int:
        """Size of all files but the marker."""
        return sum(file.size_bytes for file in self.files.values())


def write_manifest(folder: Path, **what: Any) -> None:
    """Write the marker with an entry for every file in `folder`, atomically."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    files = {path.relative_to(folder).as_posix(): file_record(path) for path in paths}
    manifest = Manifest(created=time.time(), files=files, **what)
    write_whole(folder / MARKER, manifest.model_dump_json(indent=1).encode())


def read_manifest(folder: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Manifest:
    """The marker of the export in `folder`; raises `ArtifactError` where there is no whole one."""
    try:
        return Manifest.model_validate_json(read(folder / MARKER))
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} holds no export: there is no {MARKER} in it (it is written last; an export "
            "that was cut off has none). Run `shardloom export` again, into another folder"
        ) from None
    except (OSError, ValidationError) as error:
        raise ArtifactError(
            f"{folder / MARKER} cannot be read: {error}; it was damaged, or written by another "
            "version of Shardloom. Export again"
        ) from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the marker; raises `ArtifactError` naming the first that differs."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file() or file_record(path) != entry:
            raise ArtifactError(
                f"{path} is missing, or not as it was exported; copy the export again, or redo it"
            )


def read_spec(folder: Path) -> JobSpec:
    """The spec in an export; raises `ArtifactError`."""
    try:
        document = json.loads((folder / SPEC).read_text(encoding="utf-8"))
        return JobSpec.model_validate(document, context={"stored": True})
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder / SPEC} cannot be read: {error}") from error
