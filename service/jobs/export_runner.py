"""Makes the exports that were requested, one at a time, in a process of the trainer's Python.

The requests lie on run storage, so that a service that is restarted goes on with what is not done.
The process imports torch, which the service never does, and gets none of the service's secrets.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from service.db.jobs import JobStore
from service.errors import ServiceError
from service.jobs.exports import may_be_made, may_run_code, remove_all_deleted, unfinished
from service.settings import Settings
from trainer.export.requests import HELD, ExportFolder, places_digest, remove_deleted
from trainer.protocol.run_dir import RunDir

logger = logging.getLogger(__name__)
# What says who we are at AWS, beside keys.
_IDENTITY = (
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    # EKS Pod Identity; ECS.
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
# What the process may see of our environment: secrets of the service are not among it, but the
# credentials of the storage that jobs read, without which vocabularies cannot be had.
_PASSED = (
    # What decides which packages the Python finds.
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    # Storage of jobs' data (`trainer.storage`).
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    *_IDENTITY,
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_EC2_METADATA_DISABLED",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_HOST",
    "SHARDLOOM_STORAGE_RETRY_S",
    "SHARDLOOM_STORAGE_TIMEOUT_S",
)
# Of the secrets of a job, those by which it reaches its storage. Not AWS_PROFILE and its like: what
# a file of theirs says may be run.
_KEYS_OF_JOBS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")
_ENDPOINT = "AWS_ENDPOINT_URL"
_STOP_WAIT_S = 5.0
_POLL_S = 0.5
_LONGEST_S = 6 * 3600.0
# When storage fails, an export is tried again after these; then whoever asks again has it made.
_RETRY_AFTER_S = (5.0, 30.0, 120.0)
# One that another process holds is looked at again after this, in which others are made.
_HELD_WAIT_S = 10.0
_ADVICE = (
    "SHARDLOOM_TRAINER_PYTHON must be a Python with the trainer's packages: run the service from "
    "the image of deploy/Dockerfile.service-export, or where the trainer is installed; or let jobs "
    "export where they train with `export: {on_success: true}`, and finished ones on a host of the "
    "cluster with `shardloom export --run-dir DIR --to DIR`"
)
# No program is there, or none that this host runs; other errors of starting one may pass.
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC)
_End = Literal["ended", "late", "closed", "deleted"]
StartProcess = Callable[..., "subprocess.Popen[Any]"]


class ExportRunner:
    """Makes requested exports one after another, as each takes a copy of all tables."""

    def __init__(
        self,
        store: JobStore,
        settings: Settings,
        start: StartProcess = subprocess.Popen,
        secrets_of: Callable[[str], Mapping[str, str]] = lambda job_id: {},
    ) -> None:
        self._store = store
        self._secrets_of = secrets_of
        self._settings = settings
        self._start_process = start
        self._queue: queue.Queue[ExportFolder | None] = queue.Queue()
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="exports", daemon=True)

    def start(self) -> None:
        """Begin, with what an earlier life of the service left undone."""
        self._thread.start()

    def submit(self, folder: ExportFolder) -> None:
        """Make an export as soon as those before it are done; one that waits stays where it is."""
        with self._lock:
            if folder.root in self._known:
                return
            self._known.add(folder.root)
        self._queue.put(folder)

    def close(self) -> None:
        """Stop; what is not done is made when the service is back."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_WAIT_S + 2 * _POLL_S)

    def _work(self) -> None:
        try:
            remove_all_deleted(self._settings)
            for left in unfinished(self._settings):
                logger.info("export %s of %s is not done; going on", left.id, left.run_dir.name)
                self.submit(left)
        except OSError as error:
            logger.warning("unfinished exports wait for the next start: %s", error)
        while (folder := self._queue.get()) is not None and not self._closing.is_set():
            is_held = self._make_or_retry(folder)
            with self._lock:
                self._known.discard(folder.root)
            if is_held:
                later = threading.Timer(_HELD_WAIT_S, self.submit, [folder])
                later.daemon = True
                later.start()

    def _make_or_retry(self, folder: ExportFolder) -> bool:
        """`_make`, again where storage or the store fails, unless the job was deleted."""
        for delay_s in (*_RETRY_AFTER_S, None):
            try:
                return self._make(folder)
            except (OSError, ServiceError) as error:
                logger.warning("export %s cannot be made: %s", folder.root, error)
            if delay_s is None or not folder.root.exists() or self._closing.wait(delay_s):
                break
        return False

    def _make(self, folder: ExportFolder) -> bool:
        """Make an export; returns whether another process, which may die, has it in hand."""
        if not may_be_made(self._store, self._settings, folder):
            logger.warning("%s was not asked for here, or may not run here", folder.root)
            return False
        if folder.status == "running":
            return not folder.is_deleted
        # The process reads the spec from run storage, where it may be another one.
        spec = self._store.get_job(folder.run_dir.name).spec
        options = ["--places", places_digest(spec)]
        if not may_run_code(self._settings):
            options.append("--no-user-code")
        command = [self._settings.trainer_python, "-m", "trainer.export"]
        variables = with_keys_of_job(
            environment(os.environ),
            self._secrets_of(folder.run_dir.name),
            may_choose_endpoint=may_run_code(self._settings),
        )
        with folder.open_log() as log:
            try:
                process = self._start_process(
                    [*command, "--request", str(folder.root), *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    # Ctrl-C is for the service, which ends the process in its own time.
                    start_new_session=True,
                )
            except OSError as error:
                if error.errno not in _NO_PROGRAM:
                    raise
                folder.fail(f"no process can make the export: {error}. {_ADVICE}")
                return False
            end = self._wait(process, folder)
        if folder.is_deleted:
            remove_deleted(RunDir(folder.run_dir))
            return False
        if process.returncode == HELD:
            return True
        # One that runs is in the hands of another replica, which took it when ours ended.
        if end == "closed" or folder.status != "queued":
            return False
        if end == "late":
            folder.fail(f"it took longer than {_LONGEST_S / 3600:.0f} h and was ended")
        else:
            folder.fail(
                f"the process that made the export ended with code {process.returncode}: "
                f"{folder.last_output or 'it said nothing'} (see export.log in {folder.root}; -9 "
                f"is too little memory). {_ADVICE}"
            )
        return False

    def _wait(self, process: subprocess.Popen[Any], folder: ExportFolder) -> _End:
        """How the process ended: by itself, too slow, with the service, or with its export."""
        for _ in range(int(_LONGEST_S / _POLL_S)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_POLL_S)
                # Whoever stops a host or a unit signals all of its processes, in any order.
                is_stopped = code in (-signal.SIGINT, -signal.SIGTERM)
                return "closed" if is_stopped and self._closing.wait(_STOP_WAIT_S) else "ended"
            if self._closing.is_set() or folder.is_deleted:
                _end(process)
                return "closed" if self._closing.is_set() else "deleted"
        _end(process)
        return "late"


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What a process that exports sees of our environment."""
    return {name: ours[name] for name in _PASSED if name in ours}


def with_keys_of_job(
    ours: Mapping[str, str], secrets: Mapping[str, str], *, may_choose_endpoint: bool
) -> dict[str, str]:
    """An environment in which storage is reached as the job does it, where its secrets say how.

    Ours and a job's are never mixed. A job names another endpoint only where all who submit are
    this host's own user: others could have it ask any server that this host reaches.
    """
    found = dict(ours)
    if "AWS_ACCESS_KEY_ID" in secrets:
        for name in (*_KEYS_OF_JOBS, *_IDENTITY):
            found.pop(name, None)
        found |= {name: secrets[name] for name in _KEYS_OF_JOBS if name in secrets}
    if may_choose_endpoint and _ENDPOINT in secrets:
        found[_ENDPOINT] = secrets[_ENDPOINT]
    return found
