"""Mutual proof, on a new connection, that both ends have the token of the same attempt.

All jobs of a cluster reach the ports of a coordinator, an agent, and a donor, with whom groups also
meet. The server sends a nonce; the client answers with a nonce of its own and HMAC-SHA256(token,
role, address, both nonces); the server does the same, or sends `_REFUSAL` and closes. Each message
has a fixed length, and neither end reads or says anything else before. With the address that the
client connected to in it, a proof is of no use at another port. What follows is neither encrypted
nor signed.

`multiprocessing.connection` has such a challenge, but with HMAC-MD5 of the nonce alone, which one
end can send back to the other, for blocking connections without a deadline.
"""

from __future__ import annotations

import hmac
import logging
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Generic, Literal, TypeVar

logger = logging.getLogger(__name__)
Connection = TypeVar("Connection")
PROOF_TIMEOUT_S = 10.0
"""In which a client must have proven itself."""
_NUM_BYTES = 32  # of a nonce, a proof, a token
RESPONSE_BYTES = 2 * _NUM_BYTES
"""Length of what a client answers."""
_REFUSAL = bytes(_NUM_BYTES)
_LOG_EVERY_S = 60.0
_FILE_SHARE = 4
_MAX_UNPROVEN = 512  # of a server in a rank, to which its peers may come at once
_ACCEPT_PAUSE_S = 0.1


class NotAuthenticated(ConnectionError):
    """The other end does not have this attempt's token, or did not prove in time that it has."""


def new_token() -> bytes:
    return secrets.token_bytes(_NUM_BYTES)


def _proof(token: bytes, role: Literal["client", "server"], address: str, nonces: bytes) -> bytes:
    return hmac.digest(token, f"{role} {address}\n".encode() + nonces, "sha256")


class Challenge:
    """A server's part on one connection that came to its `address` (host:port)."""

    def __init__(self, token: bytes, address: str) -> None:
        self._token, self._address = token, address
        self.nonce = secrets.token_bytes(_NUM_BYTES)
        """What the server says first."""

    def answer(self, response: bytes) -> tuple[bool, bytes]:
        """Whether the client's `response` is right, and what to send: a proof, or a refusal."""
        nonces, proof = self.nonce + response[:_NUM_BYTES], response[_NUM_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._token, "client", self._address, nonces)):
            return False, _REFUSAL
        return True, _proof(self._token, "server", self._address, nonces)


def challenge(connection: socket.socket, token: bytes, address: str, timeout_s: float) -> None:
    """Let a client prove itself. Raises `NotAuthenticated`, or OSError where it hangs up."""
    deadline = time.monotonic() + timeout_s
    task = Challenge(token, address)
    connection.settimeout(timeout_s)
    connection.sendall(task.nonce)
    is_proven, answer = task.answer(_read(connection, RESPONSE_BYTES, deadline))
    connection.sendall(answer)
    if not is_proven:
        raise NotAuthenticated("wrong token")


def authenticate(connection: socket.socket, token: bytes, address: str, timeout_s: float) -> None:
    """Prove this client to the server at `address`, and have that prove itself.

    Raises `NotAuthenticated`, or OSError where the server hangs up.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    own_nonce = secrets.token_bytes(_NUM_BYTES)
    nonces = _read(connection, _NUM_BYTES, deadline) + own_nonce
    connection.sendall(own_nonce + _proof(token, "client", address, nonces))
    answer = _read(connection, _NUM_BYTES, deadline)
    if hmac.compare_digest(answer, _REFUSAL):
        raise NotAuthenticated(
            f"{address} refused this rank's token: another attempt or job listens there now, or "
            "has started this rank"
        )
    if not hmac.compare_digest(answer, _proof(token, "server", address, nonces)):
        raise NotAuthenticated(
            f"{address} could not prove that it has this attempt's token: another program listens "
            "there"
        )


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many bytes, by a `deadline` of `time.monotonic` however slowly they come."""
    data = b""
    while len(data) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NotAuthenticated("no proof of the attempt's token came in time")
        connection.settimeout(left_s)
        try:
            part = connection.recv(num_bytes - len(data))
        except TimeoutError:
            continue
        if not part:
            raise ConnectionError("the other end closed the connection before it was proven")
        data += part
    return data


class UnprovenConnections(Generic[Connection]):
    """The connections of a server that have proven nothing yet; for several threads.

    There are at most `most`, or a quarter of the files that this process may open: beyond that the
    oldest is closed, as who has the token needs milliseconds. Refusals are logged once a minute.
    """

    def __init__(self, server: str, most: int, close: Callable[[Connection], None]) -> None:
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if max_files < 0 else min(most, max_files // _FILE_SHARE)
        self._server, self._close = server, close
        self._waiting: dict[Connection, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._logged_at = -math.inf
        self._num_unlogged = 0

    def add(self, connection: Connection) -> None:
        with self._lock:
            self._waiting[connection] = None
            oldest = next(iter(self._waiting)) if len(self._waiting) > self._most else None
            if oldest is not None:
                del self._waiting[oldest]
        if oldest is not None:
            self.log_refusal(f"{self._most} other connections came before its proof")
            self._close(oldest)

    def discard(self, connection: Connection) -> None:
        with self._lock:
            self._waiting.pop(connection, None)

    def log_refusal(self, cause: str, peer: object = "a connection") -> None:
        with self._lock:
            self._num_unlogged += 1
            if time.monotonic() < self._logged_at + _LOG_EVERY_S:
                return
            number, self._num_unlogged = self._num_unlogged, 0
            self._logged_at = time.monotonic()
        logger.warning(
            "the %s refused %s: %s (%d since the last such line): another job, or a program that "
            "looks for open ports, connects to it",
            *(self._server, peer, cause, number),
        )


class AuthenticatedServer:
    """Listens at a free port of `host`; serves who proves `token`, each in a thread of its own.

    `serve` is given the connection, whose end it may meet as an `OSError`.
    """

    def __init__(
        self, name: str, host: str, token: bytes, serve: Callable[[socket.socket], None]
    ) -> None:
        self._name, self._token, self._serve = name, token, serve
        self._unproven = UnprovenConnections(name, _MAX_UNPROVEN, shut_down)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_MAX_UNPROVEN)
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """Where it listens (host:port)."""
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        # Closing alone would leave the threads waiting for the next request.
        for each in (self._socket, *self._connections):
            shut_down(each)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:  # such as too many open files, for now
                    logger.warning("the %s could not accept a connection: %s", self._name, error)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            self._connections.add(connection)
            self._unproven.add(connection)
            answering = threading.Thread(
                target=self._answer, args=[connection], name=self._name, daemon=True
            )
            try:
                answering.start()
            except RuntimeError as error:  # such as too many threads, for now
                logger.warning("the %s could not answer a connection: %s", self._name, error)
                self._unproven.discard(connection)
                self._connections.discard(connection)
                connection.close()
                time.sleep(_ACCEPT_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            try:
                challenge(connection, self._token, self.address, PROOF_TIMEOUT_S)
            except NotAuthenticated as error:
                self._unproven.log_refusal(str(error), connection.getpeername())
                raise
            finally:
                self._unproven.discard(connection)
            self._serve(connection)
        self._connections.discard(connection)


def shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
