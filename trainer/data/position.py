"""Where training is in the data: spans of rows, the global position, rows that are skipped.

A set of rows is kept as sorted spans [start, stop). A position says which rows of an epoch's order
are consumed, by all ranks together. The order does not depend on the number of ranks T, so a job
that resumes at another T loses and repeats nothing. Every rank gets the same number of batches: the
last step of an epoch takes what is left, shared out evenly, and the batches are filled up with rows
of weight 0.

Rows on which the loss became NaN or infinite are kept in a file of the run: workers that restart
from a checkpoint skip them. Groups that are failure domains need none: the coordinator skips them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.coordination.messages import EpochRows, Ledger
from trainer.errors import TooFewRowsError
from trainer.protocol.run_dir import write_whole

Span = tuple[int, int]
"""Rows [start, stop)."""


class Spans:
    """A set of row numbers, kept as the bounds of spans that neither overlap nor touch."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """`spans` may come in any order, and may overlap; empty ones are left out."""
        self._bounds: list[int] = []  # start, stop, start, stop, ... in ascending order
        for start, stop in spans:
            self.add(start, stop)

    def __len__(self) -> int:
        return sum(self._bounds[1::2]) - sum(self._bounds[::2])

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(zip(self._bounds[::2], self._bounds[1::2], strict=True))

    def add(self, start: int, stop: int) -> None:
        """Take rows [start, stop) in."""
        self._replace(start, stop, is_in=True)

    def remove(self, start: int, stop: int) -> None:
        """Take rows [start, stop) out."""
        self._replace(start, stop, is_in=False)

    def _replace(self, start: int, stop: int, *, is_in: bool) -> None:
        if start >= stop:
            return
        first, last = bisect_left(self._bounds, start), bisect_right(self._bounds, stop)
        # An odd place is inside a span. A bound is needed where that changes at `start` or `stop`.
        new_start = [start] if first % 2 != is_in else []
        new_stop = [stop] if last % 2 != is_in else []
        self._bounds[first:last] = new_start + new_stop

    def gap(self, start: int, stop: int) -> Span | None:
        """The first run of rows in [start, stop) that are not in the set, if there are any."""
        place = bisect_right(self._bounds, start)
        if place % 2:
            start = self._bounds[place]
            place += 1
        if place < len(self._bounds):
            stop = min(stop, self._bounds[place])
        return (start, stop) if start < stop else None

    def gaps(self, start: int, stop: int) -> list[Span]:
        """All runs of rows in [start, stop) that are not in the set, in order."""
        found = []
        while (gap := self.gap(start, stop)) is not None:
            found.append(gap)
            start = gap[1]
        return found


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
    def begun(self) -> dict[int, Spans]:
        """Rows that are consumed of `epoch`, and of later epochs that are begun."""
        first = Spans([(0, self.row), *self.done])
        return {self.epoch: first, **{epoch: Spans(spans) for epoch, spans in self.later}}

    def rows_done(self, rows_per_epoch: int) -> int:
        """Rows consumed since the start of the run."""
        return self.epoch * rows_per_epoch + sum(map(len, self.begun.values()))


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

    def check(self, folder: Path) -> None:
        """Raise `TooFewRowsError` where the rows, those of `folder`, fill no step."""
        if self.num_rows < self.rows_per_step:
            raise TooFewRowsError(
                f"{folder} has {self.num_rows} rows, fewer than one step takes ({self.world_size} "
                f"workers x data.batch_size {self.batch_size}); lower either"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps that cover every row once."""
        return self.steps_for(self.num_rows)

    def steps_for(self, num_rows: int) -> int:
        """Steps that take `num_rows` rows, the last one perhaps fewer than the others."""
        return -(-num_rows // self.rows_per_step)


def step_start(position: DataPosition, shape: BatchShape) -> DataPosition:
    """Where the next step begins: here, or at a later epoch if nothing is left of this one."""
    while (begun := position.begun).pop(position.epoch).gap(0, shape.num_rows) is None:
        position = _position(position.epoch + 1, begun)
    return position


def step_rows(start: DataPosition, shape: BatchShape) -> list[Span]:
    """Rows that all ranks together take in the step that begins at `start`, as given there."""
    left = start.begun[start.epoch].gaps(0, shape.num_rows)
    return _first_rows(left, 0, shape.rows_per_step)


def advance(start: DataPosition, shape: BatchShape) -> DataPosition:
    """Position after a step that began at `start` (as given by `step_start`)."""
    begun = start.begun
    for span in step_rows(start, shape):
        begun[start.epoch].add(*span)
    return _position(start.epoch, begun)


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
    begun = [rows for epoch, rows in position.begun.items() if epoch < epochs]
    left = (sum(b - a for a, b in rows.gaps(0, shape.num_rows)) for rows in begun)
    untouched = max(0, epochs - position.epoch - len(begun))
    return sum(map(shape.steps_for, left)) + untouched * shape.steps_per_epoch


def ledger_of(position: DataPosition) -> Ledger:
    """The ledger of a run that stands at `position`, for groups to go on from."""
    open_epochs = tuple(
        EpochRows(epoch=n, done=rows.spans) for n, rows in position.begun.items() if rows.spans
    )
    return Ledger(epoch=position.epoch, open_epochs=open_epochs)


def position_of(ledger: Ledger) -> DataPosition:
    """Where committed syncs have come to, for any number of ranks to go on from."""
    return _position(ledger.epoch, {rows.epoch: Spans(rows.done) for rows in ledger.open_epochs})


def _position(epoch: int, begun: dict[int, Spans]) -> DataPosition:
    spans = begun.pop(epoch, Spans()).spans
    row = spans[0][1] if spans and spans[0][0] == 0 else 0
    later = tuple((later, rows.spans) for later, rows in sorted(begun.items()))
    return DataPosition(epoch, row, spans[1:] if row else spans, later)


EpochSpans = tuple[int, tuple[Span, ...]]
"""Rows of an epoch's order."""


class SkippedRows(BaseModel):
    """What the file holds: spans of each epoch's order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: tuple[tuple[int, tuple[Span, ...]], ...] = Field(default=())

    @classmethod
    def read(cls, path: Path) -> SkippedRows:
        """What `path` holds; nothing where there is no such file. Raises OSError."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            raise OSError(f"{path} is damaged: {error}; remove it to train all rows") from None

    def with_rows(self, more: Iterable[EpochSpans]) -> SkippedRows:
        together = {epoch: Spans(spans) for epoch, spans in self.epochs}
        for epoch, spans in more:
            rows = together.setdefault(epoch, Spans())
            for span in spans:
                rows.add(*span)
        return SkippedRows(epochs=tuple((n, rows.spans) for n, rows in sorted(together.items())))

    def write(self, path: Path) -> None:
        """Store it; the file appears whole. Raises OSError."""
        write_whole(path, self.model_dump_json().encode())


def rows_between(before: DataPosition, after: DataPosition, num_rows: int) -> list[EpochSpans]:
    """Rows consumed at `after` and not yet at `before`, in epochs of `num_rows` rows."""
    found = []
    for epoch in range(before.epoch, after.epoch + 1):
        rows = _consumed_rows(after, epoch, num_rows)
        for span in _consumed_rows(before, epoch, num_rows).spans:
            rows.remove(*span)
        if rows.spans:
            found.append((epoch, rows.spans))
    return found


def _consumed_rows(position: DataPosition, epoch: int, num_rows: int) -> Spans:
    if epoch < position.epoch:
        return Spans([(0, num_rows)])
    return position.begun.get(epoch, Spans())


def without(position: DataPosition, skipped: SkippedRows) -> DataPosition:
    """`position` with the skipped rows taken for consumed."""
    begun = position.begun
    for epoch, spans in skipped.epochs:
        if epoch >= position.epoch:
            for span in spans:
                begun.setdefault(epoch, Spans()).add(*span)
    return _position(position.epoch, begun)
