"""Exports that are deleted: by somebody, or by age. Files alone say so, as with all of exports.

An export is marked first, and from then on nobody is told of it; its process, on whichever host,
sees that and ends; then its files go. What a crash cuts off is removed when a service starts, and
once a minute. A download that has begun goes on to its end (`service.export_archive`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from service.errors import StorageUnavailable
from service.settings import Settings
from trainer.export.folder import ExportFolder, list_exports, remove_deleted
from trainer.run_dir import RunDir

logger = logging.getLogger(__name__)

_DAY_S = 86400.0


def delete_export(folder: ExportFolder) -> None:
    """Delete an export; one that is being made is given up. Raises `StorageUnavailable`.

    When this returns it is gone for all who ask; the files of one that is being made follow.
    """
    try:
        folder.mark_deleted()
    except FileNotFoundError:
        return  # somebody else was faster
    except OSError as error:
        raise StorageUnavailable(str(error)) from error
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
    for run_dir in _run_dirs(settings):
        for folder in _exports_of(run_dir):
            if _is_older(folder, before):
                num_deleted += _try_to_delete(folder)
    return num_deleted


def _exports_of(run_dir: RunDir) -> list[ExportFolder]:
    try:
        return list_exports(run_dir)
    except OSError as error:
        logger.warning("cannot look for old exports in %s: %s", run_dir.root, error)
        return []


def _try_to_delete(folder: ExportFolder) -> bool:
    try:
        delete_export(folder)
    except StorageUnavailable as error:
        logger.warning("cannot delete the old export %s, trying again: %s", folder.root, error)
        return False
    return True


def _is_older(folder: ExportFolder, before: float) -> bool:
    """Whether an export that nobody is making was asked for before a time, in Unix seconds."""
    try:
        return folder.wanted.created < before and folder.status != "running"
    except (OSError, ValueError):
        return False


def _remove_deleted(run_dir: RunDir) -> None:
    try:
        remove_deleted(run_dir)
    except OSError as error:
        logger.warning("deleted exports in %s keep files for now: %s", run_dir.root, error)


def _run_dirs(settings: Settings) -> Iterator[RunDir]:
    """Folders of jobs that have exports."""
    for path in settings.runs_dir.glob("*/exports"):
        yield RunDir(path.parent)
