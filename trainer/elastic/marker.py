"""The marker COMMIT.json, written last: what a checkpoint holds, and proof that it is whole.

It names step, layout, data position, and the size and SHA-256 of every file, and carries a checksum
of itself, so that a flipped bit in it is found like one in any other file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from trainer.elastic.checkpoint_folder import (
    FileRecord,
    Folder,
    file_record,
    read_file,
    write_whole,
)
from trainer.elastic.protocol import EpochRows, Plateau
from trainer.run_dir import COMMIT_MARKER

__all__ = ["Commit", "FileRecord", "RowOrder", "file_record", "read_commit", "write_marker"]

logger = logging.getLogger(__name__)

_CHECKSUM = "sha256"


@dataclass(frozen=True)
class RowOrder:
    """Which rows stand where in an epoch, in short: equal digests are equal orders.

    `digest` is of all that decides the order: names of files, rows of row groups, seed, shuffling.
    """

    num_rows: int
    digest: str


@dataclass(frozen=True)
class Commit:
    """What a checkpoint holds.

    `step`, `epoch` and `row` are the position after the last trained step; `rows_trained` counts
    all rows ever trained; `best` is the best validation value so far, if any, and `plateau` what
    early stopping has seen. `moment_scale` is c of the run that wrote it (None: an early version,
    which did not say). `commit` counts the committed syncs where groups are failure domains, and
    `open_epochs` has the rows done of each epoch that is not complete (empty: those before `row`
    of `epoch`). `row_order` says what rows those numbers stand for (None: an early version).
    """

    # A NaN metric comes back as NaN.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants", extra="forbid")

    step: int
    epoch: int
    row: int
    rows_trained: int
    world_size: int
    shard_group_size: int
    placement: str
    time: float
    is_best: bool = False
    best: float | None = None
    plateau: Plateau | None = None
    moment_scale: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    commit: int = 0
    rows_skipped: int = 0
    open_epochs: tuple[EpochRows, ...] = ()
    row_order: RowOrder | None = None

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files.values())


_COMMIT = TypeAdapter(Commit)


def read_commit(folder: Folder) -> Commit | None:
    """The marker in `folder`; None when there is none or it is damaged.

    Raises `StorageError` where remote storage is away.
    """
    try:
        content = read_file(folder, COMMIT_MARKER)
        if content is None:
            return None
        document = json.loads(content)
        _check(document)
        return _COMMIT.validate_python(document)
    except (OSError, ValueError) as error:
        logger.warning("checkpoint marker in %s is damaged and ignored: %s", folder, error)
        return None


def _check(document: Any) -> None:
    """Take the checksum out of `document`; raises ValueError when it is not that of the rest."""
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    # Early versions wrote none.
    if document.pop(_CHECKSUM, None) not in (None, _checksum(document)):
        raise ValueError("its checksum is wrong")


def _checksum(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_marker(folder: Folder, commit: Commit) -> None:
    """Put the marker in place: whole and durable, or not at all."""
    document = json.loads(_COMMIT.dump_json(commit))
    document[_CHECKSUM] = _checksum(document)
    write_whole(folder, COMMIT_MARKER, json.dumps(document).encode())
