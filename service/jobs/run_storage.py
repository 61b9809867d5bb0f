"""Files that the service writes to the folder of a job, and the trash of deleted folders.

Each file appears whole or not at all, but for logs. Pause requests, rewinds and growth limits are
for the driver and its workers; `job.json` is for the service itself, should its database be lost
(`service.reconciler.recover`). A folder that is to be deleted is renamed first, so that no job has
it any more; there may be several of one job, where a deletion was cut off and its folder was made
anew. All functions but `reach` and `update_job_file` raise OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from service.auth.crypto import master_keys_of
from service.domain.models import Attempt, Job
from service.errors import (
    InvalidRequest,
    NoSuchRunFile,
    RunStorageFull,
    reaching_storage,
)
from service.jobs.logs import is_source
from service.settings import Settings
from service.storage import DEADLINE_S, in_time
from trainer.protocol.events import STREAM_PATTERN
from trainer.protocol.log_pump import Part, append, last_part
from trainer.protocol.mirror import (
    PIECE_BYTES,
    comes_from_service,
    folders_of,
    goes_to_service,
    is_stream,
    version_of,
)
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import (
    MAX_DOCUMENT_BYTES,
    NotRegular,
    list_untrusted,
    open_folder,
    open_untrusted,
    read_untrusted,
    remove_untrusted,
    replace_untrusted,
)
from trainer.spec.base import FieldProblem

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# Of the disk: what hosts leave free, and what they leave free by what they tell one another.
_SPARE_SHARE, _SPARE_SHARE_OF_TOLD = 0.05, 0.02
_TRASH_PREFIX = ".deleted-"
# Earlier versions gave the name no ending.
_TRASHED = re.compile(rf"{re.escape(_TRASH_PREFIX)}(job-[0-9a-z]{{12}})(\.[0-9a-f]+)?")


def run_dir_of(settings: Settings, job_id: str) -> RunDir:
    return RunDir(settings.runs_dir / job_id)


def reach(
    settings: Settings, call: Callable[[], _Result], deadline_s: float = DEADLINE_S, owner: str = ""
) -> _Result:
    """What `call` returns; raises `StorageUnavailable` where run storage fails or hangs.

    `owner` is the job whose files it reads, if any.
    """
    with reaching_storage():
        return in_time(settings.runs_dir, call, deadline_s, owner)


def write_json(path: Path, document: Any, runs_dir: Path) -> None:
    """Replace a JSON document on run storage in one step, durable when this returns."""
    replace_untrusted(path, json.dumps(document).encode(), runs_dir)


def write_job(job: Job, settings: Settings) -> None:
    """Write what the store knows of a job and its folder otherwise would not."""
    path = run_dir_of(settings, job.id).job_path
    replace_untrusted(path, _content_of(job, settings), settings.runs_dir)


def update_job_file(job: Job, settings: Settings) -> None:
    """Write anew what is kept of a job that has just ended, or goes on, if anything is.

    A recovery then knows that nobody waits for it any more. Storage that fails or hangs is only
    logged: what happens to a job does not depend on it.
    """
    path = run_dir_of(settings, job.id).job_path

    def update() -> None:
        if path.exists():
            # Its folder is not made: somebody may delete it in this moment.
            replace_untrusted(path, _content_of(job, settings), settings.runs_dir, make=False)

    try:
        in_time(settings.runs_dir, update)
    except OSError as error:
        logger.warning("job %s: job.json is not as the job is now: %s", job.id, error)


def _content_of(job: Job, settings: Settings) -> bytes:
    ended = {
        "status": job.status,
        "reason": job.reason,
        "message": job.message,
        "ended_at": job.ended_at,
    }
    document = {
        "id": job.id,
        "created_at": job.created_at,
        "queued_at": job.waits_since,
        "num_failures": job.num_failures,
        "ended": ended if job.status.is_terminal else None,
        "spec": job.spec.model_dump(mode="json"),
    }
    document["seal"] = master_keys_of(settings).mac("job-seals", _text_of(document))
    # Not `json`, which indents in Python: this is written for each attempt.
    return to_json(document, indent=2)


def _text_of(document: dict[str, Any]) -> str:
    """What of a `job.json` is sealed."""
    return json.dumps({k: v for k, v in document.items() if k != "seal"}, sort_keys=True)


def read_jobs(settings: Settings) -> Iterator[tuple[Path, dict[str, Any] | None, bool]]:
    """Every folder of a job with what `write_job` wrote there, None where it is unreadable, and
    whether that is sealed: else it may be anybody's."""
    runs_dir, keys = settings.runs_dir, master_keys_of(settings)
    for path in sorted(runs_dir.glob("*/job.json")):
        try:
            document = from_json(read_untrusted(path, runs_dir))
            seal = str(document["seal"]) if "seal" in document else ""
            is_sealed = keys.is_mac("job-seals", _text_of(document), seal)
        except (OSError, ValueError, TypeError, AttributeError):
            yield path.parent, None, False
        else:
            yield path.parent, document, is_sealed


def note_rewind(job: Job, attempt: Attempt, settings: Settings) -> None:
    """Tell the workers which checkpoint an attempt goes back to, if it does."""
    if job.resume_from is not None:
        document = {"checkpoint": Path(job.resume_from).name, "attempt_index": attempt.index}
        write_json(run_dir_of(settings, job.id).rewind_path, document, settings.runs_dir)


def ask_to_pause(settings: Settings, attempt: Attempt) -> None:
    """Show a driver that its attempt shall save and end."""
    path = run_dir_of(settings, attempt.job_id).attempt(attempt.id).pause_request_path
    if not path.exists():
        write_json(path, {"id": f"p-{secrets.token_hex(4)}"}, settings.runs_dir)


def withdraw_pause(settings: Settings, job_id: str, attempt_id: str) -> None:
    """Take a pause request back; a driver that has seen it ends all the same."""
    path = run_dir_of(settings, job_id).attempt(attempt_id).pause_request_path
    remove_untrusted(path, settings.runs_dir)


def limit_growth(settings: Settings, job: Job, max_workers: int | None) -> None:
    """Show the driver of a running job how far it may grow by itself; None lifts that."""
    assert job.current_attempt_id is not None
    path = run_dir_of(settings, job.id).attempt(job.current_attempt_id).growth_limit_path
    if max_workers is None:
        remove_untrusted(path, settings.runs_dir)
        return
    data = json.dumps({"max_workers": max_workers}).encode()
    with contextlib.suppress(OSError):
        if read_untrusted(path, settings.runs_dir) == data:
            return
    replace_untrusted(path, data, settings.runs_dir)


# ---- files that hosts without run storage exchange with us (`trainer.protocol.mirror`)


# Of a file one piece after another: a request whose time was over may still be at work.
_writing = [threading.Lock() for _ in range(64)]
# With which logs end, of at most so many: a folder of thousands takes long to list.
_last_parts: dict[Path, Part] = {}
_MAX_LAST_PARTS = 20_000


def _lock_of(path: Path) -> threading.Lock:
    return _writing[hash(path) % len(_writing)]


def list_exchanged(settings: Settings, attempt: Attempt, *, streams: bool) -> dict[str, str]:
    """Path in the run folder and version of each file that hosts take.

    With `streams` also those of records, of all attempts, whose version is their size.
    """
    root = run_dir_of(settings, attempt.job_id).root
    found: dict[str, str] = {}
    for folder in folders_of(attempt.id):
        for path in list_untrusted(root / folder, settings.runs_dir):
            name = str(path.relative_to(root))
            if comes_from_service(name, attempt.id):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = version_of(path.lstat())
    for each in list_untrusted(root / "attempts", settings.runs_dir) if streams else ():
        for path in list_untrusted(each / "outbox", settings.runs_dir):
            name = str(path.relative_to(root))
            if is_stream(name):
                with contextlib.suppress(FileNotFoundError):
                    found[name] = str(path.lstat().st_size)
    return found


def read_exchanged(settings: Settings, attempt: Attempt, name: str, at: int) -> bytes:
    """A file that hosts take, or a piece of a stream of records; raises `NoSuchRunFile`."""
    if not (comes_from_service(name, attempt.id) or is_stream(name)):
        raise NoSuchRunFile(name)
    path = run_dir_of(settings, attempt.job_id).root / name
    try:
        if not is_stream(name):
            return read_untrusted(path, settings.runs_dir, settings.max_body_bytes)
        with open_untrusted(path, settings.runs_dir) as file:
            file.seek(at)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        raise NoSuchRunFile(name) from None


def keep_piece(
    settings: Settings, attempt: Attempt, name: str, data: bytes, at: int, total: int
) -> tuple[str | None, int]:
    """Keep a piece of a file of `total` bytes, where the last one ended.

    Returns the version of the file once it is whole, and how many bytes of it are there. Raises
    `NoSuchRunFile`, `RunStorageFull`.
    """
    path = _written_by_hosts(settings, attempt, name)
    # What hosts tell one another.
    is_told = comes_from_service(name, attempt.id) and total <= MAX_DOCUMENT_BYTES
    _check_room(settings, _SPARE_SHARE_OF_TOLD if is_told else _SPARE_SHARE)
    if at + len(data) > total:
        problem = FieldProblem("total", "size", "the piece goes beyond the end of the file")
        raise InvalidRequest([problem])
    if name.startswith("exports/") and path.name != "request.json":
        export = run_dir_of(settings, attempt.job_id).exports_dir / name.split("/")[1]
        if not (export / "request.json").exists():
            raise NoSuchRunFile(name)  # deleted meanwhile
    if at == 0 and len(data) == total:
        replace_untrusted(path, data, settings.runs_dir)
        return version_of(path.lstat()), total
    part = path.with_name(f".{path.name}.part")
    with _lock_of(path), open_folder(path.parent, settings.runs_dir, make=True) as folder:
        with open_untrusted(part, settings.runs_dir, "ab") as file:
            if at == 0:
                file.truncate(0)
            size = file.seek(0, os.SEEK_END)
            if size != at:
                return None, size
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if at + len(data) < total:
                return None, at + len(data)
        os.replace(part.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    return version_of(path.lstat()), total


def remove_exchanged(settings: Settings, attempt: Attempt, name: str) -> None:
    remove_untrusted(_written_by_hosts(settings, attempt, name), settings.runs_dir)


def append_log(
    settings: Settings, attempt: Attempt, source: str, data: bytes, at: int | None
) -> tuple[int, bool]:
    """Append to a log, unless its end is not at byte `at`; its end, and whether that was done.

    Raises `NoSuchRunFile`, `RunStorageFull`.
    """
    if not is_source(source):
        raise NoSuchRunFile(f"log {source[:40]}")
    _check_room(settings)
    log = run_dir_of(settings, attempt.job_id).attempt(attempt.id).log_path(source)
    max_bytes = settings.log_max_bytes
    list_files = partial(list_untrusted, log.parent, settings.runs_dir)
    with _lock_of(log):
        part, size = last_part(log, max_bytes, _last_parts.get(log), list_files)
        end = part[0] + size
        if at not in (None, end) or not data:
            return end, False
        with open_folder(log.parent, settings.runs_dir, make=True):
            opened = partial(open_untrusted, within=settings.runs_dir, mode="ab")
            # A job that holds the lock of its log keeps none of us waiting.
            lock_kind = fcntl.LOCK_EX | fcntl.LOCK_NB
            part = append(log, max_bytes, data, part, opened, lock_kind)
        if len(_last_parts) >= _MAX_LAST_PARTS:
            _last_parts.clear()
        _last_parts[log] = part
        return end + len(data), True


def append_stream(
    settings: Settings, attempt: Attempt, stream: str, data: bytes, at: int | None
) -> tuple[int, bool]:
    """Append to a stream of records, as `append_log` does to a log; durable when this returns."""
    path = run_dir_of(settings, attempt.job_id).attempt(attempt.id).stream_path(stream)
    if not re.fullmatch(STREAM_PATTERN, stream):
        raise NoSuchRunFile(f"stream {stream[:40]}")
    _check_room(settings)
    with (
        _lock_of(path),
        open_folder(path.parent, settings.runs_dir, make=True) as folder,
        open_untrusted(path, settings.runs_dir, "ab") as file,
    ):
        end = file.tell()
        if at not in (None, end) or not data:
            return end, False
        file.write(data)
        file.flush()
        # The host deletes what is taken.
        os.fsync(file.fileno())
        if end == 0:
            os.fsync(folder)
        return end + len(data), True


def _written_by_hosts(settings: Settings, attempt: Attempt, name: str) -> Path:
    if not goes_to_service(name, attempt.id):
        raise NoSuchRunFile(name)
    return run_dir_of(settings, attempt.job_id).root / name


def _check_room(settings: Settings, spare_share: float = _SPARE_SHARE) -> None:
    """Raise `RunStorageFull` where hosts would take what the service itself has to write."""
    found = os.statvfs(settings.runs_dir)
    # Some file systems do not count their files.
    files_left = found.f_favail / found.f_files if found.f_files else 1.0
    if min(found.f_bavail / max(1, found.f_blocks), files_left) < spare_share:
        raise RunStorageFull(spare_share)


# ---- the trash


def move_to_trash(settings: Settings, job_id: str) -> None:
    """Rename the folder of a job, so that no job has it; harmless where that was done before."""
    trashed = settings.runs_dir / f"{_TRASH_PREFIX}{job_id}.{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        run_dir_of(settings, job_id).root.rename(trashed)


def restore_from_trash(settings: Settings, job_id: str) -> None:
    """Undo `move_to_trash`; where the job has a folder again, the files there stay."""
    target = run_dir_of(settings, job_id).root
    for folder in _trashed_folders(settings, job_id):
        with contextlib.suppress(FileNotFoundError):  # others may do the same
            if target.exists():
                _merge(folder, target, settings.runs_dir)
                shutil.rmtree(folder)
            else:
                folder.rename(target)


def _merge(source: Path, target: Path, runs_dir: Path) -> None:
    """Move what of a folder the target lacks."""
    with open_folder(source, runs_dir) as taken, open_folder(target, runs_dir) as kept:
        for name in os.listdir(taken):  # noqa: PTH208  of a descriptor
            try:
                os.lstat(name, dir_fd=kept)
            except FileNotFoundError:
                os.rename(name, name, src_dir_fd=taken, dst_dir_fd=kept)
            else:
                with contextlib.suppress(NotRegular):  # no two folders
                    _merge(source / name, target / name, runs_dir)


def empty_trash(settings: Settings, job_id: str) -> None:
    for folder in _trashed_folders(settings, job_id):
        with contextlib.suppress(FileNotFoundError):  # others may do the same
            shutil.rmtree(folder)


def trashed_checkpoint_paths(settings: Settings, job_id: str) -> set[str]:
    """Each `checkpoint.path` in the `job.json` of a job's trashed folders."""
    found = set[Any]()
    for folder in _trashed_folders(settings, job_id):
        with contextlib.suppress(FileNotFoundError, NotRegular, ValueError, LookupError, TypeError):
            document = from_json(read_untrusted(RunDir(folder).job_path, folder.parent))
            found.add(document["spec"]["checkpoint"]["path"])
    return {path for path in found if isinstance(path, str)}


def trashed_jobs(settings: Settings) -> list[str]:
    """Ids of jobs that have folders in the trash."""
    paths = settings.runs_dir.glob(f"{_TRASH_PREFIX}*")
    found = (_TRASHED.fullmatch(path.name) for path in paths)
    return sorted({match[1] for match in found if match})


def _trashed_folders(settings: Settings, job_id: str) -> list[Path]:
    return list(settings.runs_dir.glob(f"{_TRASH_PREFIX}{job_id}*"))
