"""Live state transfer: a joining group copies its shard from a donor that trains on meanwhile.

Rank s of the joiner connects to rank s of the donor by TCP, at the address that the coordinator
gives. Once both have proven that they are of one attempt, it says what it wants (`PeerRequest`),
gets one line that describes the shard (`DonorHeader`), then asks for chunks of rows, one at a time,
and gets their bare bytes. The chunks are the rows as they are in memory at that moment: the donor
keeps no second copy and takes no lock. What arrives may belong to different moments, or be half of
one and half of the next. The result is exact all the same, because the joiner takes part in every
commit from the first chunk on, at weight 0, and applies it:

- A row that the donor changed since its last commit, or is changing, was marked as touched before
  the first of its bytes changed (the forward pass marks it, the backward pass writes). So it is in
  the next commit, whichever value was read.
- A row that a commit is writing in the donor while it is read is in that commit, which the joiner
  applies too, before or after the chunk lands.
- A row in a commit that the joiner has applied is *fresh*: chunks never overwrite it, so that what
  was read before the commit and arrives after it does no harm.
- Every other row is the same in the donor and in all copies, whenever it was read.

So all rows are right once a commit was applied that came after the last chunk, with the donor in
it. If the donor is lost instead, what it changed since its last commit is in no later one: the rows
read after that commit's vote are read again from another donor. The vote is the border because the
donor cannot apply, and hence not train on, before the joiner has voted as well. If a commit is
missed, or a group must forget what it trained, everything is read again.

Tensors that are averaged whole (dense part, data-parallel tables) come with any commit.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader

import torch

from trainer.coordination.authentication import AuthenticatedServer, authenticate
from trainer.coordination.client import Identity
from trainer.coordination.messages import Count, Message, Round
from trainer.elastic.rendezvous import PeerRequest, RendezvousServer, line_of
from trainer.parallel.collectives import in_background
from trainer.parallel.row_store import CachedRows, RowStore
from trainer.parallel.touched_rows import RowNumbers, Rows

logger = logging.getLogger(__name__)
_IDLE_TIMEOUT_S = 60.0  # of a donor's connection to a joiner that requests nothing
_CHUNK_REQUEST = struct.Struct("!IQQ")  # piece, first row, row after the last
Incarnation = tuple[int, int]
"""(group, incarnation)."""


class Superseded(Exception):
    """The copy goes on without this thread: with another donor, or not at all."""


@dataclass(frozen=True)
class Piece:
    """Rows [n, ...] of a shard; they have the numbers from `first` on. `place` says of what.

    A row's moments have other numbers than its weights: a commit may be about one of them alone.
    """

    store: RowStore
    first: int
    place: str = ""

    @property
    def tensor(self) -> torch.Tensor:
        return self.store.tensor

    @property
    def row_bytes(self) -> int:
        return self.tensor[:1].nbytes

    def numbers(self, chunk: Chunk) -> slice:
        return slice(self.first + chunk.start, self.first + chunk.stop)

    def rows(self, chunk: Chunk) -> RowStore:
        return self.store.part(slice(chunk.start, chunk.stop))


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of piece number `piece`."""

    piece: int
    start: int
    stop: int


def pieces_of(numbers: RowNumbers) -> list[Piece]:
    """Weights and moments of all shards of this rank, in an order that every group has.

    Rows have their numbers for the weights; those for the moments follow after all of these.
    """
    return [
        Piece(
            store,
            first if store is shard.rows[0] else numbers.num_rows + first,
            f"{shard.table}[{shard.row_offset}, {shard.column_offset}]",
        )
        for shard, first in zip(numbers.shards, numbers.first, strict=True)
        for store in shard.rows
        if store.tensor.numel()
    ]


def chunks_of(pieces: Sequence[Piece], max_bytes: int) -> list[Chunk]:
    """All rows of `pieces` in chunks of at most `max_bytes`, but at least a row."""
    chunks = []
    for number, piece in enumerate(pieces):
        num_rows, step = piece.tensor.shape[0], max(1, max_bytes // piece.row_bytes)
        chunks += [Chunk(number, i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    return chunks


class LiveCopy:
    """Which chunks of a shard have been copied, and which of them are final; for two threads.

    The copying thread holds a ticket, which `roll_back` makes void: with a void one its methods
    raise `Superseded` and change nothing.
    """

    def __init__(self, pieces: Sequence[Piece], num_rows: int, max_bytes: int) -> None:
        device = pieces[0].tensor.device if pieces else None
        self._pieces = pieces
        self._chunks = chunks_of(pieces, max_bytes)
        self._fresh = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._lock = threading.Lock()
        self._ticket = 0
        self._next = self._next_at_vote = self._final = 0
        self.donor: Incarnation | None = None
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether every row was copied, or is fresh."""
        return self._next == len(self._chunks)

    def roll_back(self) -> int:
        """Forget what is not final, and the donor; returns the ticket for another donor."""
        with self._lock:
            self._ticket += 1
            self._next = self._next_at_vote = self._final
            self.donor = None
            return self._ticket

    def begin(self, ticket: int, donor: Incarnation) -> None:
        """The next rows come from `donor`."""
        with self._lock:
            self._check(ticket)
            self.donor = donor

    def next_chunk(self, ticket: int) -> Chunk | None:
        """What to read next; None when all is copied."""
        with self._lock:
            self._check(ticket)
            while not self.is_complete:
                chunk = self._chunks[self._next]
                if not self._fresh[self._pieces[chunk.piece].numbers(chunk)].all():
                    return chunk
                self._next += 1
            return None

    @torch.no_grad()
    def put(self, ticket: int, chunk: Chunk, values: torch.Tensor) -> None:
        """Write the `values` of what `next_chunk` gave, but not over fresh rows."""
        piece = self._pieces[chunk.piece]
        rows = piece.rows(chunk)
        with self._lock:
            self._check(ticket)
            stale = self._fresh[piece.numbers(chunk)].logical_not()
            places = stale.nonzero().view(-1)
            if places.numel() == len(values):
                rows.write(values)
            else:
                rows.write(values.to(places.device)[places], places)
            self.num_bytes += values.nbytes
            # A commit of all rows may have come in between.
            if not self.is_complete and self._chunks[self._next] == chunk:
                self._next += 1

    def _check(self, ticket: int) -> None:
        if ticket != self._ticket:
            raise Superseded

    def vote(self) -> None:
        """The joiner is about to vote: the commit will make final what is copied by now."""
        with self._lock:
            self._next_at_vote = self._next

    @contextmanager
    def applying(self, rows: torch.Tensor | None) -> Iterator[None]:
        """While a commit of the row numbers `rows` (int64) is applied, or of all rows when None."""
        with self._lock:
            yield
            if rows is None:
                self._fresh.fill_(True)
                self._next = self._next_at_vote = len(self._chunks)
            else:
                self._fresh.index_fill_(0, rows, True)
            self._final = self._next_at_vote


class PeerCopyError(Exception):
    """A donor's shard is not the joiner's: other tables, sizes, or rank."""


PieceLayout = tuple[str, tuple[int, ...], str]
"""Place, shape and dtype of one piece."""


class DonorHeader(Message):
    """First line of a donor: its identity, and the pieces that it serves."""

    group: Count
    incarnation: Count
    rank: Count
    pieces: tuple[PieceLayout, ...]


def layout_of(pieces: Sequence[Piece]) -> tuple[PieceLayout, ...]:
    """Layout of the pieces, which must be the same on both sides."""
    return tuple((each.place, tuple(each.tensor.shape), str(each.tensor.dtype)) for each in pieces)


class DonorServer:
    """Serves this rank's shard, live, to joiners with its `token`, each in a thread of its own; and
    the stores of generations in which the ranks with this shard meet."""

    def __init__(self, identity: Identity, pieces: Sequence[Piece], token: bytes) -> None:
        self._identity = identity
        self._pieces = pieces
        on_gpu = (piece.tensor.device for piece in pieces if piece.tensor.is_cuda)
        self._device = next(on_gpu, torch.device("cpu"))
        self._stores = RendezvousServer()
        self._server = AuthenticatedServer("donor", identity.host, token, self._answer)
        self.address = self._server.address  # host:port

    def close(self) -> None:
        self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_IDLE_TIMEOUT_S)
        with connection.makefile("rb") as requests:
            try:
                wanted = PeerRequest.model_validate_json(requests.readline())
            except ValueError as error:
                logger.warning("a peer sent what this version does not know: %s", error)
                return
            if wanted.generation is not None:
                self._stores.serve(connection, requests, wanted.generation)
            else:
                self._serve_shard(connection, requests)

    def _serve_shard(self, connection: socket.socket, requests: BufferedReader) -> None:
        header = DonorHeader(
            group=self._identity.group,
            incarnation=self._identity.incarnation,
            rank=self._identity.rank,
            pieces=layout_of(self._pieces),
        )
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # or this thread takes memory of GPU 0, too
            stream = torch.cuda.Stream()
        connection.sendall(line_of(header))
        while len(request := requests.read(_CHUNK_REQUEST.size)) == _CHUNK_REQUEST.size:
            connection.sendall(self._read(Chunk(*_CHUNK_REQUEST.unpack(request)), stream))

    def _read(self, chunk: Chunk, stream: torch.cuda.Stream | None) -> memoryview:
        """The rows of `chunk` as they are, perhaps half written. On CPU not even a copy."""
        rows = self._pieces[chunk.piece].rows(chunk)
        if stream is None:
            return _bytes_of(rows.read().contiguous())
        # On a stream of its own: neither the copy nor the training waits for the other. But forward
        # passes move cached rows, which must not happen while one is read.
        is_cached = isinstance(rows, CachedRows)
        with torch.cuda.stream(torch.cuda.default_stream() if is_cached else stream):
            return _bytes_of(rows.read().cpu())


def _bytes_of(rows: torch.Tensor) -> memoryview:
    return rows.reshape(-1).view(torch.uint8).numpy().data


class Joiner:
    """Copies this rank's shard from a donor, in a thread, while the rank applies the commits.

    The rank calls `attend`, `vote` and `applying` in each round, in that order.
    """

    chunk_bytes = 4 * 2**20

    def __init__(
        self, identity: Identity, numbers: RowNumbers, timeout_s: float, token: bytes
    ) -> None:
        self._identity = identity
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._token = token
        self._pieces = pieces_of(numbers)
        self._commit: int | None = None  # the newest applied, once a donor was asked
        self._donor_address = ""
        self._thread: Future[None] | None = None
        self._copied_bytes = 0
        self._renew()

    def _renew(self) -> None:
        self._copy = LiveCopy(self._pieces, 2 * self._numbers.num_rows, self.chunk_bytes)
        self._has_applied = False

    @property
    def is_complete(self) -> bool:
        """Whether all is exact once one more commit is applied.

        What is averaged whole came with one that was applied already.
        """
        return self._has_applied and self._copy.is_complete

    @property
    def num_bytes(self) -> int:
        """Bytes copied, repeated ones included."""
        return self._copied_bytes + self._copy.num_bytes

    def restart(self) -> None:
        """Begin anew: a commit was missed."""
        self.close()
        self._copied_bytes += self._copy.num_bytes
        self._renew()
        self._commit = None

    def close(self) -> None:
        """Stop copying. The thread may end later, but writes nothing."""
        self._copy.roll_back()
        self._thread = None

    def attend(self, round: Round) -> bool:
        """A round has begun: copy from its donor, if something is missing.

        Returns whether a commit was missed, after which everything is. Raises `PeerCopyError` when
        the donor has another shard.
        """
        if self._thread is not None and self._thread.done():
            problem, self._thread = self._thread.exception(), None
            if isinstance(problem, OSError | Superseded):
                logger.warning("the copy from %s broke off: %s", self._donor_address, problem)
            elif problem:
                raise problem
        has_missed = self._commit is not None and round.commit != self._commit + 1
        if has_missed:
            self.restart()
        donors = {(m.group, m.incarnation) for m in round.members if m.standing != "listening"}
        address = round.donors[self._identity.rank] if round.donors else ""
        donor = self._copy.donor
        is_lost = donor not in donors if donor else address != self._donor_address
        if is_lost:
            self.close()
        if self._thread is None and address and not self._copy.is_complete:
            self._donor_address = address
            work = partial(self._fetch, self._copy, self._copy.roll_back(), address, donors)
            self._thread = in_background(work, "joiner")
        if self._donor_address:
            self._commit = round.commit - 1
        return has_missed

    def vote(self) -> None:
        self._copy.vote()

    @contextmanager
    def applying(
        self, rows: Rows | None, moment_rows: Rows | None, is_idle: bool
    ) -> Iterator[None]:
        """While a commit of the weights of `rows` is applied, and of the moments of `moment_rows`;
        or of everything when both are None.
        """
        numbers = None
        if rows is not None and moment_rows is not None:
            numbers = torch.cat([rows.numbers, self._numbers.num_rows + moment_rows.numbers])
        with self._copy.applying(numbers):
            yield
        if self._commit is not None:
            self._commit += 1
            self._has_applied |= not is_idle

    def _fetch(
        self, copy: LiveCopy, ticket: int, address: str, donors: Collection[Incarnation]
    ) -> None:
        started = time.perf_counter()
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), self._timeout_s)
        with closing(connection), connection.makefile("rb") as answers:
            authenticate(connection, self._token, address, self._timeout_s)
            connection.settimeout(self._timeout_s)
            connection.sendall(line_of(PeerRequest()))
            donor = self._read_header(answers)
            if donor not in donors:
                raise ConnectionError(f"group {donor[0]} is not in the round")
            copy.begin(ticket, donor)
            while chunk := copy.next_chunk(ticket):
                connection.sendall(_CHUNK_REQUEST.pack(chunk.piece, chunk.start, chunk.stop))
                copy.put(ticket, chunk, self._receive(answers, chunk))
        time_s = time.perf_counter() - started
        logger.info("copied %d bytes from group %d in %.2f s", copy.num_bytes, donor[0], time_s)

    def _read_header(self, answers: BufferedReader) -> Incarnation:
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
