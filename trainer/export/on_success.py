"""`export.on_success`: the driver's last work, in a process of its own.

The job has succeeded by then, and an export that fails changes nothing of that: the timeline says
why there is none, and `shardloom export JOB` may try again.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable

from trainer import events
from trainer.events import Event
from trainer.export.folder import ExportFolder, ask_for
from trainer.run_dir import RunDir
from trainer.spec import JobSpec

logger = logging.getLogger(__name__)


def export_on_success(spec: JobSpec, run_dir: RunDir, write: Callable[[Event], None]) -> None:
    """Export what `spec.export` asks for, if it does, and tell how that went."""
    wanted = spec.export
    if wanted is None or not wanted.on_success:
        return
    try:
        folder = ask_for(run_dir, wanted.checkpoint, wanted.quantize)
        _tell(write, "info", f"export {folder.id} begins")
        _run(folder)
    except OSError as error:
        _tell(write, "error", f"the model was not exported: {error}")
        return
    if folder.is_deleted:
        _tell(write, "info", f"export {folder.id} was deleted before it was done")
    elif folder.status == "succeeded":
        _tell(write, "info", f"export {folder.id}: {folder.message}")
    else:
        _tell(write, "error", f"export {folder.id} {folder.status}: {folder.message}")


def _run(folder: ExportFolder) -> None:
    command = [sys.executable, "-m", "trainer.export", "--request", str(folder.root)]
    with folder.open_log() as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if not folder.is_deleted and folder.status in ("queued", "running"):
        folder.fail(f"the process that made it ended with code {code}; export.log says more")


def _tell(write: Callable[[Event], None], level: str, message: str) -> None:
    logger.info("%s", message)
    write(events.Note(time=time.time(), level=level, message=message))  # type: ignore[arg-type]
