"""Exports of jobs: request, list, delete, download.

Requests lie on run storage (`trainer.export.requests`); the database knows nothing of them. Jobs
write there, too: only requests with the service's seal are carried out (`export_runner`). A deleted
export is marked first, which hides it and ends its process; then its files go. What a crash cuts
off is removed when a service starts, and once an hour.

A download is a ZIP archive, made while it is sent. All files are open before its first byte, so
that an export that is deleted meanwhile still comes whole.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO

from service import errors
from service.auth.crypto import master_keys_of
from service.db.jobs import JobStore
from service.domain.models import Job
from service.jobs.logs import as_zip
from service.jobs.run_storage import run_dir_of
from service.settings import Settings
from trainer.export.artifact import MARKER, ArtifactError
from trainer.export.requests import ExportFolder, ask_for, find_export, list_exports, remove_deleted
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import NotRegular
from trainer.spec.training import Quantization

logger = logging.getLogger(__name__)
_DAY_S = 86400.0
_CHUNK_BYTES = 2**18


def archive(folder: ExportFolder) -> Iterator[bytes]:
    """The bytes of the ZIP archive; raises `StorageUnavailable` where the export is damaged."""
    try:
        with ExitStack() as opened:
            # The marker last: what was cut off is no export.
            names = [*sorted(folder.read_manifest().files), MARKER]
            files = [(name, opened.enter_context(folder.open_file(name))) for name in names]
            return _stream(files, opened.pop_all())
    except (ArtifactError, OSError) as error:
        raise errors.StorageUnavailable(str(error)) from error


def _stream(files: Sequence[tuple[str, IO[bytes]]], opened: ExitStack) -> Iterator[bytes]:
    with opened:
        contents = [(name, iter(partial(file.read, _CHUNK_BYTES), b"")) for name, file in files]
        # Quantised tables hardly become smaller.
        yield from as_zip(contents, zipfile.ZIP_STORED)


# ---- deletion


def delete_export(folder: ExportFolder) -> None:
    """Delete an export; one that is being made is given up. Raises `StorageUnavailable`.

    When this returns it is gone for all who ask; the files of one that is being made follow.
    """
    with errors.reaching_storage(), suppress(FileNotFoundError):  # somebody else was faster
        folder.mark_deleted()
    _remove_deleted(RunDir(folder.run_dir))


def remove_all_deleted(settings: Settings) -> None:
    """Remove the files of exports whose deletion was cut off; what fails is logged."""
    for run_dir in _run_dirs(settings):
        _remove_deleted(run_dir)


def remove_old_exports(settings: Settings, now: float) -> int:
    """Delete the exports that the settings do not keep any more; how many. `now`: Unix seconds.

    One that cannot be deleted, because its job's own code stands in the way or storage does, is
    logged and left for the next time.
    """
    if not settings.export_retention_days:
        return 0
    before = now - settings.export_retention_days * _DAY_S
    num_deleted = 0
    for folder in _all_exports(settings):
        try:
            if folder.wanted.created < before and folder.status != "running":
                delete_export(folder)
                num_deleted += 1
        except (OSError, ValueError):
            continue  # It cannot be read.
        except errors.StorageUnavailable as error:
            logger.warning("cannot delete export %s, trying again: %s", folder.root, error)
    return num_deleted


def _all_exports(settings: Settings) -> Iterator[ExportFolder]:
    for run_dir in _run_dirs(settings):
        try:
            yield from list_exports(run_dir)
        except OSError as error:
            logger.warning("cannot look for exports in %s: %s", run_dir.root, error)


def _remove_deleted(run_dir: RunDir) -> None:
    try:
        remove_deleted(run_dir)
    except OSError as error:
        logger.warning("deleted exports in %s keep files for now: %s", run_dir.root, error)


def _run_dirs(settings: Settings) -> Iterator[RunDir]:
    return (RunDir(path.parent) for path in settings.runs_dir.glob("*/exports"))


# ---- requests


def request_export(
    store: JobStore, settings: Settings, job: Job, checkpoint: str, quantize: Quantization
) -> ExportFolder:
    """Ask for an export of a job's checkpoint: `newest`, `best` or a step.

    Raises `CheckpointNotFound`, `ExportPending` while another one of the job is not done,
    `ExportRefused` where the job must make it itself, and `StorageUnavailable`.
    """
    steps = [found.step for found in store.list_checkpoints(job.id)]
    if not steps or (checkpoint.isdecimal() and int(checkpoint) not in steps):
        raise errors.CheckpointNotFound(job.id, checkpoint, steps)
    if reason := _no_export_here(job, settings):
        raise errors.ExportRefused(job.id, reason)
    run_dir = run_dir_of(settings, job.id)
    for each in list_exports(run_dir):
        if is_pending(settings, each):
            raise errors.ExportPending(job.id, each.id)
    with errors.reaching_storage():
        keys = master_keys_of(settings)
        return ask_for(run_dir, checkpoint, quantize, lambda text: keys.mac("export-seals", text))


def _no_export_here(job: Job, settings: Settings) -> str:
    """Why this host makes no exports of a job; empty where it does."""
    if job.project in settings.kuberay_namespaces:
        return "is of an isolated project, whose files might lead this host into those of others"
    if job.spec.model.module is not None and not may_run_code(settings):
        return (
            "trains a module of its user's own (model.module), whose code does not run on this "
            "service's host"
        )
    return ""


def may_run_code(settings: Settings) -> bool:
    """Whether code of jobs may run on this host: where all who submit are its own user."""
    return settings.auth != "required"


def is_sealed(settings: Settings, folder: ExportFolder) -> bool:
    """Whether a service with our keys asked for the export as it stands on run storage."""
    try:
        wanted = folder.wanted
    except (FileNotFoundError, NotRegular, ValueError):
        return False  # deleted, or spoilt by the job, since it was listed
    text = wanted.text_of(folder)
    return master_keys_of(settings).is_mac("export-seals", text, wanted.seal)


def is_pending(settings: Settings, folder: ExportFolder) -> bool:
    """Whether somebody makes the export or will; what a killed driver left queued, nobody does."""
    status = folder.status
    return status == "running" or (status == "queued" and is_sealed(settings, folder))


def may_be_made(store: JobStore, settings: Settings, folder: ExportFolder) -> bool:
    """Whether the export of a job that is there was asked for by a service, and may be made here.

    Raises `StoreUnavailable`, and OSError.
    """
    try:
        job = store.get_job(folder.run_dir.name)
    except (errors.JobNotFound, errors.JobUnreadable):
        return False
    return is_sealed(settings, folder) and not _no_export_here(job, settings)


def get_export(settings: Settings, job_id: str, export_id: str) -> ExportFolder:
    """An export of a job; raises `ExportNotFound`."""
    found = find_export(run_dir_of(settings, job_id), export_id)
    if found is None:
        raise errors.ExportNotFound(job_id, export_id)
    return found


def get_finished_export(settings: Settings, job_id: str, export_id: str) -> ExportFolder:
    """One that is done; raises `ExportNotFound`, and `ExportNotReady` for another."""
    found = get_export(settings, job_id, export_id)
    if (status := found.status) != "succeeded":
        raise errors.ExportNotReady(export_id, status, found.message)
    return found


def unfinished(settings: Settings) -> list[ExportFolder]:
    """Exports that a service asked for and that are neither done nor failed."""
    return [
        folder
        for folder in _all_exports(settings)
        if folder.status in ("queued", "running") and is_sealed(settings, folder)
    ]
