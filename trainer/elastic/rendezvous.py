"""The store in which the ranks of one generation with the same shard meet, to form a process group.

The rank of one group serves it (`Round.stores`), at the port of its donor: who comes has proven to
have the attempt's token, for which torch's TCPStore does not ask. A key is written once, by one
rank. Each rank is sent all entries as they come and reads what it was sent, so that M ranks cost
the one that serves M connections and M entries on each; entries that come together travel together.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from io import BufferedReader
from multiprocessing.connection import wait as wait_for_input

import torch.distributed as dist
from pydantic import ConfigDict

from trainer.coordination.authentication import (
    PROOF_TIMEOUT_S,
    NotAuthenticated,
    authenticate,
    shut_down,
)
from trainer.coordination.messages import Count, Message

_CONNECT_TRY_S = 1.0
_POLL_S = 0.02
_GATHER_S = 0.001


class PeerRequest(Message):
    """First line to the server of a rank: the store of `generation` is meant, else its shard."""

    generation: Count | None = None


class _Entries(Message):
    """Keys that were written, with their values."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    entries: tuple[tuple[str, bytes], ...]


def line_of(message: Message) -> bytes:
    return message.model_dump_json().encode() + b"\n"


class _Generation:
    """The entries of one generation so far, and who reads them."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes]] = []
        self.changed = threading.Condition()
        self.connections: set[socket.socket] = set()


class RendezvousServer:
    """Serves the stores of the newest generation and of the one before, whose ranks may be late."""

    def __init__(self) -> None:
        self._generations: dict[int, _Generation] = {}
        self._lock = threading.Lock()

    def serve(self, connection: socket.socket, lines: BufferedReader, generation: int) -> None:
        """Serve one rank, whose `lines` come from the connection, until it hangs up."""
        with self._lock:
            for older in [number for number in self._generations if number < generation - 1]:
                for each in self._generations.pop(older).connections:
                    shut_down(each)
            store = self._generations.setdefault(generation, _Generation())
            store.connections.add(connection)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        has_ended = threading.Event()
        heard = lines, store, has_ended
        threading.Thread(target=self._hear, args=heard, name="rendezvous", daemon=True).start()
        try:
            self._tell(connection, store, has_ended)
        finally:
            with self._lock:
                store.connections.discard(connection)

    @staticmethod
    def _hear(lines: BufferedReader, store: _Generation, has_ended: threading.Event) -> None:
        try:
            with suppress(OSError, ValueError):
                for line in lines:
                    told = _Entries.model_validate_json(line)
                    with store.changed:
                        store.entries += told.entries
                        store.changed.notify_all()
        finally:
            with store.changed:
                has_ended.set()
                store.changed.notify_all()

    @staticmethod
    def _tell(connection: socket.socket, store: _Generation, has_ended: threading.Event) -> None:
        num_told = 0
        while not has_ended.is_set():
            with store.changed:
                while len(store.entries) == num_told and not has_ended.is_set():
                    store.changed.wait()
            time.sleep(_GATHER_S)  # of M ranks that come at once, one line
            news = tuple(store.entries[num_told:])
            connection.sendall(line_of(_Entries(entries=news)))
            num_told += len(news)


class RendezvousStore(dist.Store):
    """A rank's view of a generation's store, as torch's process groups want it; for one thread.

    Every method raises `DistStoreError` where the connection has broken, or the rank `is_given_up`;
    what waits also at its time limit.
    """

    def __init__(
        self,
        address: str,
        generation: int,
        token: bytes,
        is_given_up: Callable[[], bool],
        *,
        connect_s: float,
        wait_s: float,
    ) -> None:
        """Connect to the rank that serves it at `address` (host:port), in `connect_s` at most.

        A key is waited for `wait_s`. Raises OSError where that rank cannot be reached, or is none
        of this attempt.
        """
        super().__init__()
        self._wait_s, self._is_given_up = wait_s, is_given_up
        self._values: dict[str, bytes] = {}
        self._received = bytearray()
        self._connection = self._connect(address, token, time.monotonic() + connect_s)
        self._connection.settimeout(wait_s)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(line_of(PeerRequest(generation=generation)))

    def _connect(self, address: str, token: bytes, deadline: float) -> socket.socket:
        """Try until the deadline: a rank to which hundreds come at once may close some."""
        host, _, port = address.rpartition(":")
        while True:
            left_s = max(_POLL_S, deadline - time.monotonic())
            try:
                found = socket.create_connection((host, int(port)), min(_CONNECT_TRY_S, left_s))
                try:
                    authenticate(found, token, address, min(left_s, PROOF_TIMEOUT_S))
                except OSError:
                    found.close()
                    raise
                return found
            except NotAuthenticated:
                raise
            except OSError:
                if self._is_given_up() or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)

    def close(self) -> None:
        self._connection.close()

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        try:
            self._connection.sendall(line_of(_Entries(entries=((key, data),))))
        except OSError as error:
            raise _broken(error) from None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are written, as far as is known without waiting."""
        self._receive(0)
        return self._values.keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._wait_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while missing := set(keys) - self._values.keys():
            if self._is_given_up():
                raise dist.DistStoreError("this rank was told to give up")
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank wrote {min(missing)} within {limit_s:g} s")
            self._receive(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def clone(self) -> RendezvousStore:
        return self

    def _receive(self, timeout_s: float) -> None:
        """Take in what was sent, and wait for it at most so long."""
        try:
            while wait_for_input([self._connection], timeout_s):
                data = self._connection.recv(1 << 16)
                if not data:
                    raise ConnectionError("the rank that serves the store has closed it")
                self._received += data
                timeout_s = 0
        except (OSError, ValueError) as error:
            raise _broken(error) from None
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            self._values.update(_Entries.model_validate_json(line).entries)


def _broken(error: Exception) -> dist.DistStoreError:
    return dist.DistStoreError(f"the store where the copies meet is gone: {error}")
