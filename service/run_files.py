"""What the service writes to the folder of a job: each file appears whole or not at all.

A *pause request* and a *rewind* are for the driver and its workers; `job.json` is for the service
itself, should its store be lost (`service.recover`). All functions raise OSError.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.domain import Attempt, Job
from service.settings import Settings
from trainer.run_dir import RunDir

_TOMBSTONE = ".deleted-"


def run_dir_of(settings: Settings, job_id: str) -> RunDir:
    """Where a job keeps its files."""
    return RunDir(settings.runs_dir / job_id)


def write_text(path: Path, text: str) -> Path:
    """Replace a file in one step, on the disk when this returns; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_job(job: Job, settings: Settings) -> None:
    """Write what the store knows of a job and its folder otherwise would not."""
    document = {
        "id": job.id,
        "project": job.project,
        "created_at": job.created_at,
        "queued_at": job.waits_since,
        "num_failures": job.num_failures,
        "spec": job.spec.model_dump(mode="json"),
    }
    write_text(run_dir_of(settings, job.id).job_path, json.dumps(document, indent=2))


def read_jobs(runs_dir: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Every folder of a job with what `write_job` wrote there; None where that is unreadable."""
    for path in sorted(runs_dir.glob("*/job.json")):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            document = None
        yield path.parent, document if isinstance(document, dict) else None


def note_rewind(job: Job, attempt: Attempt, settings: Settings) -> None:
    """Tell the workers which checkpoint an attempt goes back to, if it does."""
    if job.resume_from is not None:
        document = {"checkpoint": Path(job.resume_from).name, "attempt_index": attempt.index}
        write_text(run_dir_of(settings, job.id).rewind_path, json.dumps(document))


def ask_to_pause(settings: Settings, attempt: Attempt) -> None:
    """Show a driver that its attempt shall save and end."""
    path = run_dir_of(settings, attempt.job_id).attempt(attempt.id).pause_request_path
    if not path.exists():
        write_text(path, json.dumps({"id": f"p-{secrets.token_hex(4)}"}))


def withdraw_pause(settings: Settings, job_id: str, attempt_id: str) -> None:
    """Take a pause request back; a driver that has seen it ends all the same."""
    run_dir_of(settings, job_id).attempt(attempt_id).pause_request_path.unlink(missing_ok=True)


def forget_job(settings: Settings, job_id: str) -> None:
    """Let nobody take a folder that stays for one of a job that is to be recovered."""
    run_dir_of(settings, job_id).job_path.unlink(missing_ok=True)


def bury(settings: Settings, job_id: str) -> None:
    """Rename the folder of a job, so that it is nobody's; harmless where that was done before."""
    folder = run_dir_of(settings, job_id).root
    if folder.exists():
        folder.rename(_tombstone(settings, job_id))


def unbury(settings: Settings, job_id: str) -> None:
    """Give a buried folder its name back."""
    folder = _tombstone(settings, job_id)
    if folder.exists():
        folder.rename(run_dir_of(settings, job_id).root)


def remove_buried(settings: Settings, job_id: str) -> None:
    """Delete the folder that was buried, if there is one."""
    folder = _tombstone(settings, job_id)
    if folder.exists():
        shutil.rmtree(folder)


def buried_jobs(settings: Settings) -> list[str]:
    """Ids of the jobs whose folders were buried and not yet deleted."""
    found = settings.runs_dir.glob(f"{_TOMBSTONE}*")
    return sorted(path.name.removeprefix(_TOMBSTONE) for path in found)


def _tombstone(settings: Settings, job_id: str) -> Path:
    return settings.runs_dir / f"{_TOMBSTONE}{job_id}"
