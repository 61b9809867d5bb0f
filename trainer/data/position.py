"""Where training is in the data, and which rows each rank takes next. Pure arithmetic.

A position says which rows of an epoch's order are consumed, by all ranks together. The order does
not depend on the number of ranks T, so a job that resumes at another T loses and repeats nothing.
Every rank gets the same number of batches: the last step of an epoch takes what is left, shared out
evenly, and the batches are filled up with rows of weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.spans import Span, Spans
from trainer.elastic.protocol import EpochRows, Ledger


@dataclass(frozen=True, order=True)
class DataPosition:
    """Rows [0, `row`) of the order of epoch `epoch` (from 0) are consumed, and those of `done`.

    Without leases nothing is in `done`: spans beyond `row`, sorted and apart, that groups trained
    out of turn. `later` holds such spans of later epochs: (epoch, spans).
    """

    epoch: int = 0
    row: int = 0
    done: tuple[Span, ...] = ()
    later: tuple[tuple[int, tuple[Span, ...]], ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of epoch `epoch` that are consumed."""
        return len(_consumed(self))

    def rows_done(self, rows_per_epoch: int) -> int:
        """Rows consumed since the start of the run."""
        later = sum(len(Spans(spans)) for _, spans in self.later)
        return self.epoch * rows_per_epoch + self.num_rows + later


START = DataPosition()
"""Position of a job that has seen nothing yet."""


@dataclass(frozen=True)
class BatchShape:
    """Rows of a split and how one step divides them: T ranks of up to `batch_size` rows each."""

    num_rows: int
    world_size: int
    batch_size: int

    @property
    def rows_per_step(self) -> int:
        """Rows that one step takes on all ranks together, but for the last of an epoch."""
        return self.world_size * self.batch_size

    @property
    def fills_a_step(self) -> bool:
        """Whether there are rows enough for one whole step."""
        return self.num_rows >= self.rows_per_step

    @property
    def steps_per_epoch(self) -> int:
        """Steps that cover every row once."""
        return self.steps_for(self.num_rows)

    def steps_for(self, num_rows: int) -> int:
        """Steps that take `num_rows` rows, the last one perhaps fewer than the others."""
        return -(-num_rows // self.rows_per_step)


def step_start(position: DataPosition, shape: BatchShape) -> DataPosition:
    """Where the next step begins: here, or at a later epoch if nothing is left of this one."""
    while _consumed(position).gap(0, shape.num_rows) is None:
        later = dict(position.later)
        epoch = position.epoch + 1
        position = _position(epoch, Spans(later.pop(epoch, ())), later)
    return position


def step_rows(start: DataPosition, shape: BatchShape) -> list[Span]:
    """Rows that all ranks together take in the step that begins at `start`, as given there."""
    return _first_rows(_consumed(start).gaps(0, shape.num_rows), 0, shape.rows_per_step)


def advance(start: DataPosition, shape: BatchShape) -> DataPosition:
    """Position after a step that began at `start` (as given by `step_start`)."""
    consumed = _consumed(start)
    for span in step_rows(start, shape):
        consumed.add(*span)
    return _position(start.epoch, consumed, dict(start.later))


def rank_rows(rows: list[Span], rank: int, num_ranks: int) -> list[Span]:
    """What `rank` takes of a step's rows, which are shared out evenly; may be empty.

    An equal share counts each row alike, as gradients are means over a rank's rows and then over
    the ranks.
    """
    num_rows = sum(stop - start for start, stop in rows)
    first, last = (num_rows * place // num_ranks for place in (rank, rank + 1))
    return _first_rows(rows, first, last)


def _first_rows(spans: list[Span], first: int, last: int) -> list[Span]:
    """Rows `first` to `last` (excluded) of `spans`, counted over all of them."""
    found, passed = [], 0
    for start, stop in spans:
        begin, end = max(start, start + first - passed), min(stop, start + last - passed)
        if begin < end:
            found.append((begin, end))
        passed += stop - start
    return found


def remaining_steps(position: DataPosition, shape: BatchShape, epochs: int) -> int:
    """Steps from `position` to the end of the last of `epochs` epochs."""
    if position.epoch >= epochs:
        return 0
    begun = {position.epoch: _consumed(position)}
    begun |= {epoch: Spans(spans) for epoch, spans in position.later if epoch < epochs}
    left = (sum(b - a for a, b in rows.gaps(0, shape.num_rows)) for rows in begun.values())
    untouched = epochs - position.epoch - len(begun)
    return sum(map(shape.steps_for, left)) + untouched * shape.steps_per_epoch


def ledger_of(position: DataPosition, rows_trained: int = 0, best: float | None = None) -> Ledger:
    """The ledger of a run that stands at `position`, for groups to go on from."""
    begun = {position.epoch: _consumed(position).spans, **dict(position.later)}
    open_epochs = tuple(EpochRows(epoch=n, done=done) for n, done in begun.items() if done)
    return Ledger(
        epoch=position.epoch, open_epochs=open_epochs, rows_trained=rows_trained, best=best
    )


def position_of(ledger: Ledger) -> DataPosition:
    """Where committed syncs have come to, for any number of ranks to go on from."""
    begun = {rows.epoch: rows.done for rows in ledger.open_epochs}
    return _position(ledger.epoch, Spans(begun.pop(ledger.epoch, ())), begun)


def _consumed(position: DataPosition) -> Spans:
    return Spans([(0, position.row), *position.done])


def _position(epoch: int, consumed: Spans, later: dict[int, tuple[Span, ...]]) -> DataPosition:
    spans = consumed.spans
    row = spans[0][1] if spans and spans[0][0] == 0 else 0
    return DataPosition(epoch, row, spans[1:] if row else spans, tuple(sorted(later.items())))
