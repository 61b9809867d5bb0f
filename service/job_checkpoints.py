"""Checkpoints that a job keeps outside of its run folder, and what its deletion does about them.

Folders are deleted. Objects are not: the service may have no credentials for them, and those of
the job have gone with it; whoever deletes the job is told where they lie.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_REMOTE = "the service deletes no objects: `aws s3 rm --recursive` or `gcloud storage rm -r` does"


@dataclass(frozen=True)
class Left:
    """What a deletion left: folder or URL, and why."""

    path: str
    why: str


def place_of(checkpoint_path: str | None, job_id: str) -> str | None:
    """The folder or URL that is a job's own below its `checkpoint.path`; None in its run folder."""
    if checkpoint_path is None:
        return None
    is_url = "://" in checkpoint_path  # whose query has an endpoint, which nobody needs to see
    above = checkpoint_path.partition("?")[0] if is_url else checkpoint_path
    return f"{above.rstrip('/')}/{job_id}"


def remove_checkpoints(place: str | None) -> list[Left]:
    """Delete what a job kept at `place`; what is left of it, if anything may be."""
    if place is None:
        return []
    if "://" in place:
        return [Left(place, _REMOTE)]
    folder = Path(place)
    try:
        if not folder.parent.is_dir():
            return [Left(place, "the service's host does not see the folder above it")]
        if folder.is_symlink() or folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        logger.warning("checkpoints at %s stay: %s", place, error)
        return [Left(place, f"it cannot be deleted: {error}")]
    return []
