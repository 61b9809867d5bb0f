"""A host's copy of a run folder that only the service has on its disk.

Where hosts and service share no file system (`SHARDLOOM_RUNS_SHARED=false`), every host has the run
folder at the same path on a disk of its own. One process of each keeps it alike, by HTTP, with the
token of the attempt: requests come from the service, logs, traces and exports go there, event
records are posted, and what the hosts tell one another by files (a request to stop, rows to skip)
goes both ways. Drivers and workers read and write files as they do on shared storage.

The driver's host is served by a thread of the driver, any other by a process (`serve_host`) that
lives as long as the attempt has a worker there. The service being away stops nobody: what is new
waits on the host's disk. What the service has of an attempt that is over is removed there. A host
that is lost takes with it what its last seconds brought.

    GET    /v1/attempts/ID/files          what the service has for hosts: path -> version
    GET    /v1/attempts/ID/files/PATH     one of these
    PUT    /v1/attempts/ID/files/PATH     a piece of a file; the last one puts it in place
    DELETE /v1/attempts/ID/files/PATH
    POST   /v1/attempts/ID/logs/SOURCE    bytes to append to a log

Standard library only at import: the process beside each worker waits without more.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trainer.protocol.log_pump import parts_of
from trainer.protocol.run_dir import AttemptDir, RunDir, write_whole

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
# While the service asks for fewer requests: each host of a large job is one that asks.
_LONGEST_INTERVAL_S = 60.0
_TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 20
# How long a host that is done tries to reach the service.
PATIENCE_S = 600.0
_START_S = 60.0
_NAME = r"[A-Za-z0-9][\w.@-]{0,200}"
_FROM_SERVICE = re.compile(
    r"rewind\.json|secret-names\.json|code/[0-9a-f]{64}\.zip|"
    r"attempts/ATTEMPT/(spec|pause-request|resize-request|growth-limit|trace-request)\.json"
)
_BOTH_WAYS = re.compile(
    rf"skipped-rows\.json|sinks/{_NAME}\.json|"
    r"attempts/ATTEMPT/((resolved-spec|stop-request|save-request)\.json|stopping-\d{1,9})"
)
_FROM_HOSTS = re.compile(
    rf"attempts/ATTEMPT/traces/{_NAME}\.json\.gz|exports/x-[0-9a-f]{{8}}/({_NAME}/){{0,4}}{_NAME}"
)
_FOLDERS = ("", "code", "sinks", "attempts/ATTEMPT", "attempts/ATTEMPT/traces")
# What says that all else is there: to readers of an export, and to workers that start.
_LAST = ("EXPORT.json", "resolved-spec.json")


def comes_from_service(path: str, attempt_id: str) -> bool:
    """Whether hosts take the file at `path` of a run folder from the service."""
    general = path.replace(f"attempts/{attempt_id}/", "attempts/ATTEMPT/", 1)
    return bool(_FROM_SERVICE.fullmatch(general) or _BOTH_WAYS.fullmatch(general))


def goes_to_service(path: str, attempt_id: str) -> bool:
    """Whether hosts may write the file at `path` of a run folder."""
    general = path.replace(f"attempts/{attempt_id}/", "attempts/ATTEMPT/", 1)
    return bool(_FROM_HOSTS.fullmatch(general) or _BOTH_WAYS.fullmatch(general))


def folders_of(attempt_id: str) -> Iterator[str]:
    """Folders of a run folder whose files are exchanged; exports have folders below them."""
    return (each.replace("ATTEMPT", attempt_id) for each in _FOLDERS)


def version_of(status: os.stat_result) -> str:
    """Another one with each change of a file."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


@dataclass(frozen=True)
class MirrorConfig:
    """Which run folder is kept alike, and how its service is reached."""

    run_dir: str
    attempt_id: str
    service_url: str
    token: str = field(repr=False)
    ca_file: str | None = None

    @property
    def files(self) -> AttemptDir:
        return RunDir(Path(self.run_dir)).attempt(self.attempt_id)

    def connect(self) -> httpx.Client:
        return connect(self.token, self.ca_file, _TIMEOUT_S)


def connect(token: str, ca_file: str | None, timeout_s: float) -> httpx.Client:
    """An HTTP client of the service, with an attempt's token if there is one."""
    import ssl

    import httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
    # No proxy of the environment: the service is in the same network.
    return httpx.Client(headers=headers, timeout=timeout_s, trust_env=False, verify=verify)


class TooManyRequests(OSError):
    """The service wants to be asked less often."""


class Refused(OSError):
    """The service does not take a request, and never will."""


class Mirror:
    """Exchanges what has changed on this host or at the service, each time `exchange` is called."""

    def __init__(self, config: MirrorConfig, client: httpx.Client) -> None:
        self._root = Path(config.run_dir)
        self._attempt_id = config.attempt_id
        self._files = config.files
        self._client = client
        self._url = f"{config.service_url}/v1/attempts/{config.attempt_id}"
        # path -> versions here and at the service when they were alike.
        self._alike: dict[str, tuple[str | None, str | None]] = {}
        # Log source -> bytes that the service has, and by how much its log is longer.
        self._sent: dict[str, tuple[int, int | None]] = {}
        self._sent_path = self._files.root / "sent-logs.json"
        with suppress(OSError, ValueError):
            # Of an earlier process on this host.
            self._sent = {
                k: (v[0], v[1]) for k, v in json.loads(self._sent_path.read_bytes()).items()
            }

    def exchange(self) -> None:
        """Make both sides alike; raises OSError, or `httpx.HTTPError` where nobody answers."""
        answer = self._ask("GET", "/files").json()
        theirs: dict[str, str] = answer["files"]
        if answer["current"] not in (None, self._attempt_id):
            # As on shared storage: another attempt has the run folder, and this one ends.
            owner = json.dumps({"name": answer["current"]}).encode()
            write_whole(RunDir(self._root).lock_path, owner)
        ours = dict(self._ours())
        paths = set(theirs) | set(ours) | set(self._alike)
        problem: OSError | None = None
        for path in sorted(paths, key=lambda path: (path.endswith(_LAST), path)):
            try:
                self._exchange_file(path, ours.get(path), theirs.get(path))
            except (Refused, FileNotFoundError) as error:  # of this file alone
                problem = error
        self._send_logs()
        if problem is not None:
            raise problem

    def _ours(self) -> Iterator[tuple[str, str]]:
        """Path and version of each file here that both sides may have."""
        folders = [self._root / each for each in folders_of(self._attempt_id)]
        folders += [path for path in self._root.glob("exports/x-*/**") if path.is_dir()]
        for folder in folders:
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    path = str((folder / entry.name).relative_to(self._root))
                    is_known = comes_from_service(path, self._attempt_id)
                    if is_known or goes_to_service(path, self._attempt_id):
                        with suppress(FileNotFoundError):
                            if entry.is_file(follow_symlinks=False):
                                yield path, version_of(entry.stat())

    def _exchange_file(self, path: str, here: str | None, there: str | None) -> None:
        may_send = goes_to_service(path, self._attempt_id)
        may_take = comes_from_service(path, self._attempt_id)
        is_new = path not in self._alike
        was_here, was_there = self._alike.get(path, (None, None))
        # What an earlier attempt left on this host is older than what the service has.
        if may_send and here != was_here and not (is_new and there is not None):
            there = self._send(path, here)
        elif may_take and (there != was_there or (is_new and not may_send)):
            here = self._take(path, there)
        else:
            return
        self._alike[path] = (here, there)

    def _send(self, path: str, here: str | None) -> str | None:
        """Give the service our file, or our having none; its version there."""
        if here is None:
            self._ask("DELETE", f"/files/{path}")
            return None
        with (self._root / path).open("rb") as file:
            total, at, version = os.fstat(file.fileno()).st_size, 0, None
            while version is None:
                piece = file.read(min(PIECE_BYTES, total - at))
                if at + len(piece) < total and not piece:
                    raise OSError(f"{path} became shorter while it was sent")
                where = {"at": at, "total": total}
                version = self._ask("PUT", f"/files/{path}", piece, where).json()["version"]
                at += len(piece)
        return str(version)

    def _take(self, path: str, there: str | None) -> str | None:
        """Put the service's file in place, or remove ours; its version here."""
        target = self._root / path
        if there is None:
            target.unlink(missing_ok=True)
            return None
        answer = self._ask("GET", f"/files/{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, answer.content)
        return version_of(target.stat())

    def _send_logs(self) -> None:
        before = dict(self._sent)
        try:
            listing = sorted(self._files.logs_dir.glob("*.log"))
            for log in listing:
                if "@" not in log.stem:
                    self._send_log(log, listing)
        finally:
            if self._sent != before:
                with suppress(OSError):
                    write_whole(self._sent_path, json.dumps(self._sent).encode())

    def _send_log(self, log: Path, listing: list[Path]) -> None:
        """Send what is new of one log, of which the service may have parts of other hosts."""
        sent, ahead = self._sent.get(log.stem, (0, None))
        while found := _read_chain(log, listing, sent):
            sent, piece = found
            at = {} if ahead is None else {"at": sent + ahead}
            answer = self._ask("POST", f"/logs/{log.stem}", piece, at, accepted=(409,)).json()
            end: int = answer["end"]
            if answer["taken"] or (ahead is not None and end == sent + ahead + len(piece)):
                # Taken now, or before, and the answer was lost.
                sent += len(piece)
            ahead = end - sent
            self._sent[log.stem] = (sent, ahead)

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        query: dict[str, int] | None = None,
        accepted: tuple[int, ...] = (),
    ) -> httpx.Response:
        response = self._client.request(method, self._url + path, content=content, params=query)
        status = response.status_code
        if response.is_success or status in accepted:
            return response
        kind = {429: TooManyRequests}.get(status, Refused if response.is_client_error else OSError)
        raise kind(f"{method} {path}: HTTP {status}: {response.text[:200]}")


def _read_chain(log: Path, listing: list[Path], offset: int) -> tuple[int, bytes] | None:
    """The next piece of a log from a byte offset on, and where it begins; None at the end."""
    for start, path in parts_of(log, listing):
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, offset - start))
            if piece := file.read(PIECE_BYTES):
                return max(start, offset), piece
    return None


class MirrorThread:
    """Exchanges again and again, in a thread of the driver, for the driver's host."""

    def __init__(self, config: MirrorConfig) -> None:
        self._files = config.files
        self._lock = _locked(config.files.root / "mirror.lock")
        self._mirror = Mirror(config, config.connect())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """Take what the service has for this attempt, then go on; raises OSError after a while."""
        if (error := _exchange_once(self._mirror)) is not None:
            raise OSError(f"the service does not give the files of the run: {error}")
        self._thread.start()

    def close(self) -> None:
        """Exchange a last time; waits for a service that is away."""
        self._stopping.set()
        self._thread.join()
        _exchange_once(self._mirror)

    def remove(self) -> None:
        """Remove this host's copy of what the service has of the attempt now."""
        _remove_copy(self._files)
        self._lock.close()

    def _run(self) -> None:
        _exchange_until(self._mirror, self._stopping.wait)


def _exchange_once(mirror: Mirror) -> Exception | None:
    """Exchange, again while the service is away; what was wrong in the end."""
    give_up_at = time.monotonic() + PATIENCE_S
    while error := _tried(mirror):
        if isinstance(error, Refused) or time.monotonic() > give_up_at:
            break
        time.sleep(INTERVAL_S)
    return error


def _remove_copy(files: AttemptDir) -> None:
    shutil.rmtree(files.root, ignore_errors=True)
    shutil.rmtree(RunDir(files.root.parents[1]).exports_dir, ignore_errors=True)


def _exchange_until(mirror: Mirror, wait: Callable[[float], bool]) -> None:
    """Exchange until `wait` (given seconds) is true."""
    interval_s, is_away = INTERVAL_S, False
    while not wait(interval_s):
        error = _tried(mirror)
        if error is not None and not is_away:
            logger.warning("files of the run wait on this host for now: %s", error)
        is_away = error is not None
        is_slowed = isinstance(error, TooManyRequests)
        interval_s = min(_LONGEST_INTERVAL_S, 2 * interval_s) if is_slowed else INTERVAL_S


def _tried(mirror: Mirror) -> Exception | None:
    """Exchange once; what went wrong."""
    try:
        mirror.exchange()
    except Exception as error:  # a fault of ours must not end what carries the job's files
        return error
    return None


# ---- hosts without the driver


def serve_host(config: MirrorConfig) -> None:
    """In a worker: have this host's copy kept until the host has no more workers of the attempt.

    Returns once the driver's files are here; raises OSError where they do not come.
    """
    files = config.files
    # Shared by all workers here, and free when the last one has ended, however it ended.
    _held.append(_locked(files.root / "workers.lock", fcntl.LOCK_SH))
    command = [sys.executable, "-m", "trainer.protocol.mirror"]
    # Returns once the process has detached itself: Ray would end a child.
    subprocess.run(
        command, input=json.dumps(asdict(config)).encode(), stdout=subprocess.DEVNULL, check=True
    )
    give_up_at = time.monotonic() + _START_S
    while not files.resolved_spec_path.exists():
        if time.monotonic() > give_up_at:
            raise OSError(f"no files of the run came from {config.service_url}")
        time.sleep(0.05)


_held: list[IO[bytes]] = []


def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> IO[bytes]:
    """A file that is locked until it is closed; waits for it, and raises OSError.

    Whoever held it before may have removed it, with its folder.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        fcntl.flock(file, kind)
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def _lock_if_free(path: Path) -> IO[bytes] | None:
    """A file that is locked until it is closed; None where some process has locked it."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def main() -> None:
    """Keep the copy of this host, one process after another: each waits for the one before."""
    config = MirrorConfig(**json.loads(sys.stdin.buffer.read()))
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    files = config.files
    workers = files.root / "workers.lock"
    with _locked(files.root / "mirror.lock"):
        if (alone := _lock_if_free(workers)) is None:
            _serve(config, workers)
            alone = _lock_if_free(workers)
        if alone is not None:
            _remove_copy(files)
            alone.close()


def _serve(config: MirrorConfig, workers: Path) -> None:
    """Keep this host's copy until no worker holds the lock, and all was sent."""
    from trainer.protocol.outbox import OutboxPoster

    client = config.connect()
    mirror = Mirror(config, client)
    url = f"{config.service_url}/v1/attempts/{config.attempt_id}/events"
    poster = OutboxPoster(config.files, client, url)
    poster.start()

    def is_over(wait_s: float) -> bool:
        time.sleep(wait_s)
        lock = _lock_if_free(workers)
        if lock is not None:
            lock.close()
        return lock is not None

    _tried(mirror)
    is_last = False
    while not is_last:
        _exchange_until(mirror, is_over)
        # The last words of a process are written after its end.
        is_last = is_over(INTERVAL_S)
    _exchange_once(mirror)
    poster.close(_TIMEOUT_S)


if __name__ == "__main__":
    main()
