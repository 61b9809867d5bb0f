"""What of a shard is right while it is copied from a group that trains on meanwhile.

The joiner gets the donor's rows, chunk by chunk, as they are in memory at that moment: the donor
keeps no second copy and takes no lock. What arrives may belong to different moments, or be half of
one and half of the next. It ends exact all the same, because the joiner hears every commit from the
first chunk on, at weight 0, and applies it:

- A row that the donor changed since its last commit, or is changing, was marked as touched before
  the first of its bytes changed (the forward pass marks it, the backward pass writes). So it is in
  the next commit, whichever value was read.
- A row that a commit is writing in the donor while it is read is in that commit, which the joiner
  applies too, before or after the chunk lands.
- A row in a commit that the joiner has heard is *fresh*: chunks never overwrite it, so that what
  was read before the commit and arrives after it does no harm.
- Every other row is the same in the donor and in all copies, whenever it was read.

So all rows are right once a commit was heard that came after the last chunk, and that the donor was
in. If the donor is lost instead, what it changed since its last commit is in no later one: the rows
read after that commit's vote are read again from another donor. The vote is the border because the
donor cannot apply, and hence not train on, before the joiner has voted as well. If a commit is
missed, or a group must forget what it trained, everything is read again.

Tensors that are averaged whole (dense part, data-parallel tables) come with any commit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from trainer.parallel.touched_rows import RowNumbers

Life = tuple[int, int]
"""(group, incarnation)."""


class Superseded(Exception):
    """The copy goes on without this thread: with another donor, or not at all."""


@dataclass(frozen=True)
class Piece:
    """A tensor [rows, ...] of a shard; its rows have the numbers from `first` on."""

    tensor: torch.Tensor
    first: int

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return self.tensor[:1].nbytes

    def numbers(self, chunk: Chunk) -> slice:
        """Numbers of the rows of `chunk`."""
        return slice(self.first + chunk.start, self.first + chunk.stop)


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of piece number `piece`."""

    piece: int
    start: int
    stop: int


def pieces_of(numbers: RowNumbers) -> list[Piece]:
    """Weights and moments of all shards of this rank, in an order that every group has."""
    return [
        Piece(tensor.detach(), first)
        for shard, first in zip(numbers.shards, numbers.first, strict=True)
        for tensor in (shard.weight, *shard.states.values())
        if tensor.numel()
    ]


def chunks_of(pieces: Sequence[Piece], max_bytes: int) -> list[Chunk]:
    """All rows of `pieces` in chunks of at most `max_bytes`, but at least a row."""
    chunks = []
    for number, piece in enumerate(pieces):
        num_rows, step = piece.tensor.shape[0], max(1, max_bytes // piece.row_bytes)
        chunks += [Chunk(number, i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    return chunks


class FuzzyCopy:
    """What of a shard has been copied, and what of that is sure; for two threads.

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
        self._next = self._next_at_vote = self._sure = 0
        self.donor: Life | None = None
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether every row was copied, or is fresh."""
        return self._next == len(self._chunks)

    def roll_back(self) -> int:
        """Forget what is not sure, and whom it came from; the ticket for another donor."""
        with self._lock:
            self._ticket += 1
            self._next = self._next_at_vote = self._sure
            self.donor = None
            return self._ticket

    def begin(self, ticket: int, donor: Life) -> None:
        """The rows that come now are those of `donor`."""
        with self._lock:
            self._check(ticket)
            self.donor = donor

    def next_chunk(self, ticket: int) -> Chunk | None:
        """What to read next; None when all is there."""
        with self._lock:
            self._check(ticket)
            while not self.is_complete and self._is_fresh(self._chunks[self._next]):
                self._next += 1
            return None if self.is_complete else self._chunks[self._next]

    def _is_fresh(self, chunk: Chunk) -> bool:
        return bool(self._fresh[self._pieces[chunk.piece].numbers(chunk)].all())

    @torch.no_grad()
    def put(self, ticket: int, chunk: Chunk, values: torch.Tensor) -> None:
        """Write the `values` of what `next_chunk` gave, but not over fresh rows."""
        piece = self._pieces[chunk.piece]
        rows = piece.tensor[chunk.start : chunk.stop]
        with self._lock:
            self._check(ticket)
            stale = self._fresh[piece.numbers(chunk)].logical_not()
            places = stale.nonzero().view(-1)
            if places.numel() == rows.shape[0]:
                rows.copy_(values)
            else:
                rows.index_copy_(0, places, values.to(rows.device)[places])
            self.num_bytes += values.nbytes
            # A commit of all rows may have come in between.
            if not self.is_complete and self._chunks[self._next] == chunk:
                self._next += 1

    def _check(self, ticket: int) -> None:
        if ticket != self._ticket:
            raise Superseded

    def vote(self) -> None:
        """The joiner is about to vote: what is there now, the commit will make sure."""
        with self._lock:
            self._next_at_vote = self._next

    @contextmanager
    def hearing(self, rows: torch.Tensor | None) -> Iterator[None]:
        """While a commit is applied that has the row numbers `rows` (int64), or all when None."""
        with self._lock:
            yield
            if rows is None:
                self._fresh.fill_(True)
                self._next = self._next_at_vote = len(self._chunks)
            else:
                self._fresh.index_fill_(0, rows, True)
            self._sure = self._next_at_vote
