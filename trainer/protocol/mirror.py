"""A host's copy of a run folder that only the service has on its disk.

Where hosts and service share no file system (`SHARDLOOM_RUNS_SHARED=false`), every host has the run
folder at the same path on a disk of its own. One process of each keeps it alike, by HTTP, with the
token of the attempt: requests come from the service, logs, event records, traces and exports go
there, and what the hosts tell one another by files (a request to stop, rows to skip) goes both
ways. Drivers and workers read and write files as they do on shared storage.

The driver's host is served by a thread of the driver, which also takes the event records of the
others, any other by a process (`serve_host`) that lives as long as the attempt has a worker there.
The service being away stops nobody: what is new waits on the host's disk. Once the service has all
of an attempt that is over, it is removed there. A host that is lost takes with it what its last
seconds brought.

    GET    /v1/attempts/ID/files          what the service has for hosts: path -> version
    GET    /v1/attempts/ID/files/PATH     one of these, from a byte on
    PUT    /v1/attempts/ID/files/PATH     a piece of a file; the last one puts it in place
    DELETE /v1/attempts/ID/files/PATH
    POST   /v1/attempts/ID/logs/SOURCE    bytes to append to a log, which several hosts may write
    POST   /v1/attempts/ID/outbox/STREAM  bytes to append to a stream of records, which one writes

Standard library only at import: the process beside each worker waits without more.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from trainer.protocol.log_pump import detach, parts_of
from trainer.protocol.run_dir import AttemptDir, RunDir, write_whole

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)
INTERVAL_S = 1.0
# While the service asks for fewer requests: each host of a large job is one that asks.
_LONGEST_INTERVAL_S = 60.0
TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 20
# How long a host that starts or is done tries to reach the service: it may be started elsewhere.
PATIENCE_S = 600.0
_NAME = r"[A-Za-z0-9][\w.@-]{0,200}"
_FROM_SERVICE = (
    r"rewind\.json|secret-names\.json|code/[0-9a-f]{64}\.zip|"
    r"ATTEMPT/(spec|pause-request|resize-request|growth-limit|trace-request)\.json"
)
_BOTH_WAYS = (
    r"(skipped-rows|scales)\.json|sinks/[a-z_]{1,40}\.json|"
    r"ATTEMPT/((resolved-spec|stop-request)\.json|(stopping|completed)-\d{1,4})"
)
# Files of an export have names of the user's.
_ANY = r"[^/.\0][^/\0]{0,200}"
_FROM_HOSTS = rf"ATTEMPT/traces/{_NAME}\.json\.gz|exports/x-[0-9a-f]{{8}}/({_ANY}/){{0,16}}{_ANY}"
_STREAM = re.compile(rf"attempts/{_NAME}/outbox/{_NAME}\.jsonl")
# What says that all else is there: to readers of an export, and to workers that start.
_LAST = ("EXPORT.json", "resolved-spec.json")


@lru_cache
def _pattern(kinds: str, attempt_id: str) -> re.Pattern[str]:
    return re.compile(kinds.replace("ATTEMPT", f"attempts/{re.escape(attempt_id)}"))


def comes_from_service(path: str, attempt_id: str) -> bool:
    """Whether hosts take the file at `path` of a run folder from the service."""
    return bool(_pattern(f"{_FROM_SERVICE}|{_BOTH_WAYS}", attempt_id).fullmatch(path))


def goes_to_service(path: str, attempt_id: str) -> bool:
    """Whether hosts may write the file at `path` of a run folder."""
    return bool(_pattern(f"{_FROM_HOSTS}|{_BOTH_WAYS}", attempt_id).fullmatch(path))


def is_stream(path: str) -> bool:
    """Whether this is a stream of event records, of whichever attempt."""
    return bool(_STREAM.fullmatch(path))


def folders_of(attempt_id: str) -> tuple[str, ...]:
    """Folders with files that hosts take."""
    return ("", "code", "sinks", f"attempts/{attempt_id}")


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

    @property
    def is_of_service(self) -> bool:
        """Whether this host's folder is the service's own: its machine may be a host of Ray."""
        return RunDir(Path(self.run_dir)).job_path.exists()

    def connect(self) -> httpx.Client:
        return connect(self.token, self.ca_file, TIMEOUT_S)


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


class NotTaken(OSError):
    """The service does not take this file for now; others it may."""


class Refused(NotTaken):
    """The service does not take this file, and never will."""


class Mirror:
    """Exchanges what has changed on this host or at the service, each time `exchange` is called.

    With `takes_streams` this host gets the event records of all others.
    """

    def __init__(
        self, config: MirrorConfig, client: httpx.Client, *, takes_streams: bool = False
    ) -> None:
        self._root = Path(config.run_dir)
        self._attempt_id = config.attempt_id
        self._files = config.files
        self._client = client
        self._url = f"{config.service_url}/v1/attempts/{config.attempt_id}"
        self._takes_streams = takes_streams
        self._lock = threading.Lock()
        # path -> versions here and at the service when they were alike.
        self._alike: dict[str, tuple[str | None, str | None]] = {}
        # path -> version here, and how many bytes of it the service has.
        self._begun: dict[str, tuple[str, int]] = {}
        # path of another host's stream -> how many bytes of it are here.
        self._taken: dict[str, int] = {}
        # Log or stream -> bytes that the service has, and by how much its log is longer.
        self._sent: dict[str, tuple[int, int]] = {}
        # Log -> size of the piece whose answer is missing.
        self._unanswered: dict[str, int] = {}
        self._sent_path = self._files.root / "sent.json"
        with suppress(OSError, ValueError):
            # Of an earlier process on this host.
            found = json.loads(self._sent_path.read_bytes())
            self._sent = {name: (sent, ahead) for name, (sent, ahead) in found.items()}

    def exchange(self) -> None:
        """Make both sides alike; raises OSError, or `httpx.HTTPError` where nobody answers."""
        with self._lock:
            answer = self._ask("GET", "/files", query={"streams": self._takes_streams}).json()
            self._note_owner(answer["current"])
            sent = dict(self._sent)
            try:
                # A file that says that records are there, as the mark of an end, comes after them.
                ours = dict(self._ours())
                problems = [
                    *self._send_growing(),
                    *self._exchange_files(ours, answer["files"]),
                ]
            finally:
                if self._sent != sent:
                    with suppress(OSError):
                        write_whole(self._sent_path, json.dumps(self._sent).encode())
        if problems:
            raise min(problems, key=lambda problem: isinstance(problem, Refused))

    def _note_owner(self, attempt_id: str | None) -> None:
        """As on shared storage: where another attempt has the run folder, this one ends."""
        run = RunDir(self._root)
        owner = run.lock_owner()
        if attempt_id not in (None, self._attempt_id, owner):
            write_whole(run.lock_path, json.dumps({"name": attempt_id}).encode())
        elif attempt_id == self._attempt_id and owner not in (None, attempt_id):
            run.lock_path.unlink(missing_ok=True)  # what was noted for an attempt before

    def _exchange_files(self, ours: dict[str, str], theirs: dict[str, str]) -> list[OSError]:
        """Exchange each file that has changed; what went wrong with single ones."""
        problems: list[OSError] = []
        for path in theirs:
            if is_stream(path):
                self._take_stream(path, int(theirs[path]))
        paths = {path for path in theirs if not is_stream(path)} | set(ours) | set(self._alike)
        for path in sorted(paths, key=lambda path: (path.endswith(_LAST), path)):
            if problems and path.endswith(_LAST):
                continue
            try:
                self._exchange_file(path, ours.get(path), theirs.get(path))
            except (NotTaken, FileNotFoundError) as error:
                problems.append(error)
        return problems

    def _ours(self) -> Iterator[tuple[str, str]]:
        """Path and version of each file here that both sides may have."""
        folders = [self._root / each for each in folders_of(self._attempt_id)]
        folders += [self._files.traces_dir]
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
            here, there = self._take(path, there)
        else:
            return
        self._alike[path] = (here, there)

    def _send(self, path: str, here: str | None) -> str | None:
        """Give the service our file, or our having none; its version there."""
        if here is None:
            self._ask("DELETE", f"/files/{path}")
            return None
        begun, at = self._begun.pop(path, ("", 0))
        at = at if begun == here else 0
        with (self._root / path).open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            while True:
                self._begun[path] = (here, at)
                file.seek(at)
                piece = file.read(min(PIECE_BYTES, total - at))
                answer = self._put(path, piece, {"at": at, "total": total})
                if answer["version"] is not None:
                    del self._begun[path]
                    return str(answer["version"])
                if not piece or answer["size"] <= at:
                    self._begun[path] = (here, 0)
                    raise NotTaken(f"{path} was changed, here or there, while it was sent")
                at = answer["size"]

    def _put(self, path: str, piece: bytes, where: dict[str, Any]) -> Any:
        """What the service says to a piece of a file, once it is not too busy."""
        give_up_at = time.monotonic() + _LONGEST_INTERVAL_S
        while True:
            try:
                return self._ask("PUT", f"/files/{path}", piece, where).json()
            except TooManyRequests:
                if time.monotonic() > give_up_at:
                    raise
            time.sleep(INTERVAL_S)

    def _take(self, path: str, there: str | None) -> tuple[str | None, str | None]:
        """Put the service's file in place, or remove ours; the versions here and there."""
        target = self._root / path
        answer = self._ask("GET", f"/files/{path}", accepted=(404,)) if there else None
        if answer is None or not answer.is_success:
            target.unlink(missing_ok=True)
            return None, None
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, answer.content)
        return version_of(target.stat()), there

    def _take_stream(self, path: str, size: int) -> None:
        """Append what is new of a stream that another host writes."""
        target = self._root / path
        if path not in self._taken and target.exists():
            return
        at = self._taken.setdefault(path, 0)
        target.parent.mkdir(parents=True, exist_ok=True)
        while at < size:
            piece = self._ask("GET", f"/files/{path}", query={"at": at}).content
            if not piece:
                return
            with target.open("ab") as file:
                file.truncate(at)  # where a piece before was cut off
                file.write(piece)
            at = self._taken[path] = at + len(piece)

    def _send_growing(self) -> list[OSError]:
        """Send what is new of logs and streams; what went wrong with single ones."""
        problems: list[OSError] = []
        logs = sorted(self._files.logs_dir.glob("*.log"))
        sends = [partial(self._send_log, log, logs) for log in logs if "@" not in log.stem]
        for path in self._files.stream_paths():
            if str(path.relative_to(self._root)) not in self._taken:
                sends.append(partial(self._send_stream, path))
        for send in sends:
            try:
                send()
            except (NotTaken, FileNotFoundError) as error:
                problems.append(error)
        return problems

    def _send_stream(self, path: Path) -> None:
        name = f"outbox/{path.stem}"
        sent, _ = self._sent.get(name, (0, 0))
        while piece := _read_piece(path, sent):
            answer = self._ask("POST", f"/{name}", piece, {"at": sent}, accepted=(409,)).json()
            # Nobody else writes it: what the service has already is this.
            sent = answer["end"]
            self._sent[name] = (sent, 0)

    def _send_log(self, log: Path, parts: list[Path]) -> None:
        """Send what is new of one log, of which the service may have parts of other hosts."""
        name = f"logs/{log.stem}"
        if name not in self._sent:
            self._sent[name] = (0, self._ask("POST", f"/{name}", b"").json()["end"])
        sent, ahead = self._sent[name]
        while found := _read_chain(log, parts, sent, self._unanswered.get(name, PIECE_BYTES)):
            sent, piece = found
            is_again = name in self._unanswered
            self._unanswered[name] = len(piece)
            where = {"at": sent + ahead}
            answer = self._ask("POST", f"/{name}", piece, where, accepted=(409,)).json()
            del self._unanswered[name]
            end: int = answer["end"]
            if answer["taken"] or (is_again and end == sent + ahead + len(piece)):
                # Taken now, or before, and the answer was lost.
                sent += len(piece)
            ahead = end - sent
            self._sent[name] = (sent, ahead)

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        query: dict[str, Any] | None = None,
        accepted: tuple[int, ...] = (),
    ) -> httpx.Response:
        url = self._url + quote(path)
        response = self._client.request(method, url, content=content, params=query)
        status = response.status_code
        # Of the service itself, not of something that stands before it.
        kind_of_body = response.headers.get("content-type", "")
        is_ours = kind_of_body.startswith(("application/problem+json", "application/json"))
        if response.is_success or (status in accepted and is_ours):
            return response
        kinds = {429: TooManyRequests, 507: NotTaken}
        kind = kinds.get(status, Refused if response.is_client_error and is_ours else OSError)
        raise kind(f"{method} {path}: HTTP {status}: {response.text[:200]}")


def _read_piece(path: Path, at: int, max_bytes: int = PIECE_BYTES) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(max_bytes)


def _read_chain(
    log: Path, parts: list[Path], offset: int, max_bytes: int
) -> tuple[int, bytes] | None:
    """The next piece of a log from a byte offset on, and where it begins; None at the end."""
    for start, path in parts_of(log, parts):
        with suppress(FileNotFoundError):
            if piece := _read_piece(path, max(0, offset - start), max_bytes):
                return max(start, offset), piece
    return None


class MirrorThread:
    """Exchanges again and again, in a thread of the driver, for the driver's host."""

    def __init__(self, config: MirrorConfig) -> None:
        self._files = config.files
        self._lock = _locked(config.files.root / "mirror.lock")
        self._mirror = Mirror(config, config.connect(), takes_streams=True)
        self._stopping = threading.Event()
        work = partial(_exchange_until, self._mirror, self._stopping.wait)
        self._thread = threading.Thread(target=work, name="mirror", daemon=True)

    def start(self) -> None:
        """Take what the service has for this attempt, then go on; raises OSError after a while."""
        _remove_others(self._files)
        shutil.rmtree(RunDir(self._files.root.parents[1]).exports_dir, ignore_errors=True)
        if (error := self.flush()) is not None:
            raise OSError(f"the service does not give the files of the run: {error}")
        self._thread.start()

    def flush(self, patience_s: float = PATIENCE_S) -> Exception | None:
        """Exchange, again while the service is away; what was wrong in the end."""
        return _exchange_once(self._mirror, patience_s)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Exchange a last time, and remove this host's copy of what the service has now."""
        self._stopping.set()
        self._thread.join()
        if _is_done(self.flush(patience_s)):
            _remove_copy(self._files)
        self._lock.close()


def _exchange_once(mirror: Mirror, patience_s: float = PATIENCE_S) -> Exception | None:
    give_up_at = time.monotonic() + patience_s
    while not _is_done(error := _tried(mirror)) and time.monotonic() < give_up_at:
        time.sleep(INTERVAL_S)
    return error


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


def _is_done(error: Exception | None) -> bool:
    """Whether the service has all that it will ever take."""
    return error is None or isinstance(error, Refused)


def _remove_copy(files: AttemptDir) -> None:
    """Remove what the service has now, unless workers are left here: who serves them does then."""
    if (alone := _lock_if_free(files.root / "workers.lock")) is None:
        return
    _remove_others(files)
    shutil.rmtree(files.root, ignore_errors=True)
    alone.close()
    with suppress(OSError):  # another attempt is here
        files.root.parent.rmdir()
        shutil.rmtree(files.root.parents[1], ignore_errors=True)


def _remove_others(files: AttemptDir) -> None:
    """Remove what attempts left here that nobody serves: the service has what it will ever have."""
    for other in files.root.parent.iterdir():
        if other != files.root and (lock := _lock_if_free(other / "mirror.lock")):
            shutil.rmtree(other, ignore_errors=True)
            lock.close()


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
    give_up_at = time.monotonic() + PATIENCE_S
    while not files.resolved_spec_path.exists():
        if time.monotonic() > give_up_at:
            raise OSError(f"no files of the run came from {config.service_url}")
        time.sleep(0.05)


_held: list[IO[bytes]] = []


def _locked(path: Path, kind: int = fcntl.LOCK_EX) -> IO[bytes]:
    """A file that is locked until it is closed; raises OSError.

    Whoever held it before may have removed it, with its folder.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), path.open("ab") as file:
            fcntl.flock(file, kind)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                # Another descriptor of the same lock: this one is closed here.
                return os.fdopen(os.dup(file.fileno()), "ab")


def _lock_if_free(path: Path) -> IO[bytes] | None:
    """As `_locked`, without waiting; None where some process has locked it."""
    try:
        return _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def main() -> None:
    """Keep the copy of this host, until no worker is there; one process waits to go on after it."""
    config = MirrorConfig(**json.loads(sys.stdin.buffer.read()))
    detach()
    root = config.files.root
    if (turn := _lock_if_free(root / "next-mirror.lock")) is None:
        return
    with _locked(root / "mirror.lock"):
        turn.close()
        if _serve(config, root / "workers.lock"):
            _remove_copy(config.files)


def _serve(config: MirrorConfig, workers: Path) -> bool:
    """Keep this host's copy until no worker holds the lock; whether the service has all then."""
    mirror = Mirror(config, config.connect())

    def is_over(wait_s: float) -> bool:
        time.sleep(wait_s)
        if (lock := _lock_if_free(workers)) is None:
            return False
        lock.close()
        return True

    _tried(mirror)
    _exchange_until(mirror, is_over)
    # The last words of a process are written after its end.
    time.sleep(INTERVAL_S)
    return _is_done(_exchange_once(mirror))


if __name__ == "__main__":
    main()
