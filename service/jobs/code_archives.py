"""Archives of user code: uploads kept by their content, and the copies of jobs that name them.

    RUNS_DIR/.code/ID.zip          an upload; ID is the SHA-256 of its bytes
    RUNS_DIR/JOB_ID/code/ID.zip    the copy of a job, from which its attempts run

A job has a copy of its own, so that its run folder is complete (an export years later needs the
class) and does not depend on the uploads. Nothing in an archive is ever imported here, and every
copy is checked against its id.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from service.errors import CodeStoreFull, InvalidRequest
from service.jobs.run_storage import reach
from service.settings import Settings
from trainer.protocol.code_archive import (
    MAX_UNPACKED_BYTES,
    CodeError,
    CodeSummary,
    check,
    id_of,
)
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import (
    MAX_ENTRIES,
    NotRegular,
    list_untrusted,
    read_untrusted,
    remove_untrusted,
    replace_untrusted,
)
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec

_FOLDER = ".code"
_NAME = re.compile(r"[0-9a-f]{64}\.zip")
_DAY_S = 86400.0
# Files may be stored as they are, each with two headers.
_MAX_ARCHIVE_BYTES = 2 * MAX_UNPACKED_BYTES
# What a look at their folder shows, but for some drafts.
_MAX_UPLOADS = MAX_ENTRIES - 100


class CodeGone(Exception):
    """The code that a job names is nowhere any more."""


def keep_code(settings: Settings, data: bytes) -> CodeSummary:
    """Check an uploaded archive and keep it; raises `InvalidRequest`, `CodeStoreFull`, OSError."""
    try:
        summary = check(data)
    except CodeError as error:
        raise InvalidRequest([FieldProblem(path="body", code="code", message=str(error))]) from None
    path = _upload_path(settings, summary.id)
    if _read(settings, path, summary.id) is None:
        sizes = [status.st_size for _, status in _uploads(settings)]
        if sum(sizes) + len(data) > settings.code_max_bytes or len(sizes) >= _MAX_UPLOADS:
            raise CodeStoreFull(
                f"{len(sizes)} uploads of code take {sum(sizes)} bytes; {_MAX_UPLOADS} and "
                f"{settings.code_max_bytes} bytes are the most that is kept: raise "
                "SHARDLOOM_CODE_MAX_BYTES, or lower SHARDLOOM_CODE_RETENTION_DAYS"
            )
        replace_untrusted(path, data, settings.runs_dir)
    _renewed(path)
    return summary


def remove_old_code(settings: Settings, now: float, read_named: Callable[[], set[str]]) -> int:
    """Remove uploads that nobody has sent or named for the time that the settings keep them.

    `read_named` gives the ids that jobs and sweeps may still need; their uploads stay. How many
    were removed; raises OSError.
    """
    if not settings.code_retention_days:
        return 0
    before = now - settings.code_retention_days * _DAY_S
    if not _older(settings, before):
        return 0
    named = read_named()
    # Looked at again: one of them may have been named since.
    gone = [path for path in _older(settings, before) if path.stem not in named]
    for path in gone:
        remove_untrusted(path, settings.runs_dir)
    return len(gone)


def _older(settings: Settings, before: float) -> list[Path]:
    return [path for path, status in _uploads(settings) if status.st_mtime < before]


def _uploads(settings: Settings) -> Iterator[tuple[Path, os.stat_result]]:
    """The uploads that there are; others may remove them meanwhile, and lay anything there."""
    for path in list_untrusted(settings.runs_dir / _FOLDER, settings.runs_dir):
        if _NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                yield path, path.lstat()


def check_code(settings: Settings, spec: JobSpec, source: RunDir | None = None) -> None:
    """Raise `SpecError` where a spec names code that was not uploaded.

    What was, but is gone since, comes back from `source`, the run folder of a job that has it.
    Raises `StorageUnavailable` where that fails.
    """
    if (code := spec.model.code) is not None:
        reach(settings, partial(_check_kept, settings, code, source))


def _check_kept(settings: Settings, code: str, source: RunDir | None) -> None:
    if _renewed(_upload_path(settings, code)):
        return
    data = _read(settings, source.code_path(code), code) if source else None
    if data is None:
        message = (
            f"no code {code[:12]}... was uploaded here; submit with `shardloom submit --code DIR`, "
            "or POST the archive to /v1/code"
        )
        raise SpecError([FieldProblem("model.code", "unknown_code", message)])
    replace_untrusted(_upload_path(settings, code), data, settings.runs_dir)


def give_code(settings: Settings, spec: JobSpec, run_dir: RunDir) -> None:
    """Copy the archive of a job's code, if it has any, to its run folder if it is not there.

    Raises `CodeGone` where neither the job nor the uploads have it whole, and OSError.
    """
    code = spec.model.code
    if code is None:
        return
    path = run_dir.code_path(code)
    if _read(settings, path, code) is None:
        data = _read(settings, _upload_path(settings, code), code)
        if data is None:
            raise CodeGone(
                f"the code {code[:12]}... of the job is gone from run storage, or damaged; submit "
                "again with `shardloom submit --code DIR`"
            )
        replace_untrusted(path, data, settings.runs_dir)


def _upload_path(settings: Settings, code: str) -> Path:
    return settings.runs_dir / _FOLDER / f"{code}.zip"


def _renewed(path: Path) -> bool:
    """Whether an upload is there; it is as new as its last use then, and not removed for now."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        return path.is_file()
    return True


def _read(settings: Settings, path: Path, code: str) -> bytes | None:
    """The archive at `path`, unless it is missing or another one."""
    try:
        data = read_untrusted(path, settings.runs_dir, _MAX_ARCHIVE_BYTES)
    except (FileNotFoundError, NotRegular):
        return None
    return data if id_of(data) == code else None
