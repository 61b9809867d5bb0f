"""Serving a shard to a group that joins, and copying it there, rank by rank over TCP.

Rank s of the joiner connects to rank s of the donor, whose address the coordinator gives. It gets
one line that says who serves what (`DonorHeader`), then asks for chunks of rows, one at a time, and
gets their bare bytes. `trainer.elastic.fuzzy_copy` has the reasons why that ends exact although
the donor trains on.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from io import BufferedReader

import torch

from trainer.elastic import faults
from trainer.elastic.fuzzy_copy import Chunk, FuzzyCopy, Life, Piece, Superseded, pieces_of
from trainer.elastic.member import Identity
from trainer.elastic.protocol import Count, Message, Round
from trainer.parallel.touched_rows import RowNumbers

logger = logging.getLogger(__name__)

_IDLE_TIMEOUT_S = 60.0  # of a donor's connection to a joiner that asks for nothing
_ASK = struct.Struct("!IQQ")  # piece, first row, row after the last


class PeerCopyError(Exception):
    """A donor's shard is not the joiner's: other tables, sizes, or rank."""


class PieceLayout(Message):
    """Shape and dtype of one piece."""

    shape: tuple[Count, ...]
    dtype: str


class DonorHeader(Message):
    """First line of a donor: who it is and what it serves."""

    group: Count
    incarnation: Count
    rank: Count
    pieces: tuple[PieceLayout, ...]


def layout_of(pieces: Sequence[Piece]) -> tuple[PieceLayout, ...]:
    """What both sides must agree on."""
    return tuple(
        PieceLayout(shape=tuple(piece.tensor.shape), dtype=str(piece.tensor.dtype))
        for piece in pieces
    )


class DonorServer:
    """Serves this rank's shard, live, to whoever copies it, each in a thread of its own."""

    def __init__(self, identity: Identity, pieces: Sequence[Piece]) -> None:
        self._identity = identity
        self._pieces = pieces
        self._socket = socket.create_server((identity.host, 0))
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="donor", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens (host:port)."""
        return f"{self._identity.host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Serve nobody any more."""
        # Closing alone would leave the threads waiting for the next words.
        for open_socket in (self._socket, *self._connections):
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._connections.add(connection)
                args = [connection]
                threading.Thread(target=self._serve, args=args, name="donor", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_TIMEOUT_S)
        with closing(connection), suppress(OSError), connection.makefile("rb") as asked:
            connection.sendall(self._header().model_dump_json().encode() + b"\n")
            while len(ask := asked.read(_ASK.size)) == _ASK.size:
                connection.sendall(self._read(Chunk(*_ASK.unpack(ask))))
        self._connections.discard(connection)

    def _header(self) -> DonorHeader:
        return DonorHeader(
            group=self._identity.group,
            incarnation=self._identity.incarnation,
            rank=self._identity.rank,
            pieces=layout_of(self._pieces),
        )

    def _read(self, chunk: Chunk) -> memoryview:
        """The rows of `chunk` as they are, perhaps half written. On CPU not even a copy."""
        return _bytes_of(_on_cpu(self._pieces[chunk.piece].tensor[chunk.start : chunk.stop]))


def _on_cpu(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type != "cuda":
        return rows.contiguous()
    # Beside the training's stream, which would hold up the copy, and be held up by it.
    with torch.cuda.stream(torch.cuda.Stream(rows.device)):
        return rows.cpu()


def _bytes_of(rows: torch.Tensor) -> memoryview:
    return rows.reshape(-1).view(torch.uint8).numpy().data


class Joiner:
    """Copies this rank's shard from a donor, in a thread, while the rank hears the commits.

    The rank calls `attend`, `vote` and `hearing` in each round, in that order.
    """

    chunk_bytes = 4 * 2**20

    def __init__(self, identity: Identity, numbers: RowNumbers, timeout_s: float) -> None:
        self._identity = identity
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._pieces = pieces_of(numbers)
        self._commit: int | None = None  # the newest heard, once something was asked for
        self._asked = ""
        self._thread: Future[None] | None = None
        self._copied_bytes = 0
        self._renew()

    def _renew(self) -> None:
        self._copy = FuzzyCopy(self._pieces, self._numbers.num_rows, self.chunk_bytes)
        self._has_heard = False

    @property
    def is_complete(self) -> bool:
        """Whether all is exact once one more commit is heard.

        What is averaged whole came with one that was heard already.
        """
        return self._has_heard and self._copy.is_complete

    @property
    def num_bytes(self) -> int:
        """What was copied, with what had to be copied again."""
        return self._copied_bytes + self._copy.num_bytes

    def restart(self) -> None:
        """Begin anew: a commit was missed."""
        self.close()
        self._copied_bytes += self._copy.num_bytes
        self._renew()
        self._commit = None

    def close(self) -> None:
        """Copy no more. The thread may end later, but writes nothing."""
        self._copy.roll_back()
        self._thread = None

    def attend(self, round: Round) -> None:
        """A round has begun: copy from its donor, if something is missing.

        Raises `PeerCopyError` when the donor has another shard.
        """
        self._raise_problem()
        if self._commit is not None and round.commit != self._commit + 1:
            self.restart()
        donors = {(m.group, m.incarnation) for m in round.members if m.standing != "listening"}
        donor = self._copy.donor
        is_lost = donor not in donors if donor else round.donor != self._asked
        if is_lost:
            self.close()
        if self._thread is None and round.donor and not self._copy.is_complete:
            self._start(round.donor, donors)
        if self._asked:
            self._commit = round.commit - 1

    def _raise_problem(self) -> None:
        if self._thread is None or not self._thread.done():
            return
        problem, self._thread = self._thread.exception(), None
        if isinstance(problem, OSError):
            logger.warning("the copy from %s broke off: %s", self._asked, problem)
        elif problem:
            raise problem

    def _start(self, address: str, donors: Collection[Life]) -> None:
        self._asked = address
        self._thread = Future()
        work = (self._thread, self._copy, self._copy.roll_back(), address, donors)
        threading.Thread(target=self._run, args=work, name="joiner", daemon=True).start()

    def vote(self) -> None:
        """The rank is about to vote."""
        self._copy.vote()

    @contextmanager
    def hearing(self, rows: torch.Tensor | None, is_idle: bool) -> Iterator[None]:
        """While a commit is applied: with the row numbers `rows` (int64), or all when None."""
        with self._copy.hearing(rows):
            yield
        if self._commit is not None:
            self._commit += 1
            self._has_heard |= not is_idle

    def _run(
        self,
        done: Future[None],
        copy: FuzzyCopy,
        ticket: int,
        address: str,
        donors: Collection[Life],
    ) -> None:
        try:
            with suppress(Superseded):
                self._fetch(copy, ticket, address, donors)
        except BaseException as error:  # whatever it is, the rank must see it
            done.set_exception(error)
        else:
            done.set_result(None)

    def _fetch(self, copy: FuzzyCopy, ticket: int, address: str, donors: Collection[Life]) -> None:
        """Copy what is missing."""
        started = time.perf_counter()
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), self._timeout_s)
        with closing(connection), connection.makefile("rb") as answers:
            donor = self._greet(answers)
            if donor not in donors:
                raise ConnectionError(f"group {donor[0]} is not in the round")
            copy.begin(ticket, donor)
            while chunk := copy.next_chunk(ticket):
                faults.point("join", self._identity.group, self._identity.rank, 0)
                connection.sendall(_ASK.pack(chunk.piece, chunk.start, chunk.stop))
                copy.put(ticket, chunk, self._receive(answers, chunk))
        time_s = time.perf_counter() - started
        logger.info("copied %d bytes from group %d in %.2f s", copy.num_bytes, donor[0], time_s)

    def _greet(self, answers: BufferedReader) -> Life:
        line = answers.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the donor closed the connection")
        header = DonorHeader.model_validate_json(line)
        if (header.rank, header.pieces) != (self._identity.rank, layout_of(self._pieces)):
            raise PeerCopyError(
                f"rank {header.rank} of group {header.group} serves another shard than rank "
                f"{self._identity.rank} of group {self._identity.group} holds; all groups of a "
                "job must be planned alike"
            )
        return header.group, header.incarnation

    def _receive(self, answers: BufferedReader, chunk: Chunk) -> torch.Tensor:
        tensor = self._pieces[chunk.piece].tensor
        shape = (chunk.stop - chunk.start, *tensor.shape[1:])
        values = torch.empty(shape, dtype=tensor.dtype)
        if answers.readinto(_bytes_of(values)) != values.nbytes:
            raise ConnectionError("the donor closed the connection")
        return values
