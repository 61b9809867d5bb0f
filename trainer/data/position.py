"""Where training is in the data: spans of rows, the global position, rows that are skipped.

A set of rows is kept as sorted spans [start, stop). A position says which rows of an epoch's order
are consumed, by all ranks together. The order does not depend on the number of ranks T, so a job
that resumes at another T loses and repeats nothing. What is left of an epoch is cut into T stripes,
and each rank reads its own. Every rank gets the same number of batches: the last step of an epoch
takes what is left, shared out evenly, and the batches are filled up with rows of weight 0.

Rows on which the loss became NaN or infinite are kept in a file of the run: workers that restart
from a checkpoint skip them. Groups that are failure domains need none: the coordinator skips them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pydantic import BaseModel, ValidationError

from trainer.coordination.messages import EpochRows, Ledger
from trainer.errors import TooFewRowsError
from trainer.protocol.run_dir import write_whole
from trainer.storage import Location

Span = tuple[int, int]
"""Rows [start, stop)."""
EpochSpans = tuple[int, tuple[Span, ...]]
"""Rows of an epoch's order."""


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
        self._replace(start, stop, is_in=True)

    def remove(self, start: int, stop: int) -> None:
        self._replace(start, stop, is_in=False)

    def _replace(self, start: int, stop: int, *, is_in: bool) -> None:
        if start >= stop:
            return
        first, last = bisect_left(self._bounds, start), bisect_right(self._bounds, stop)
        # An odd place is inside a span. A bound is needed where that changes at `start` or `stop`.
        new_start = [start] if first % 2 != is_in else []
        new_stop = [stop] if last % 2 != is_in else []
        self._bounds[first:last] = new_start + new_stop

    def run_at(self, row: int) -> Span | None:
        """The span that `row` is in, if it is in the set."""
        place = bisect_right(self._bounds, row)
        return (self._bounds[place - 1], self._bounds[place]) if place % 2 else None

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

    `done` are spans beyond `row`, sorted and apart: what ranks have read of their stripes, or
    groups trained out of turn. `later` holds such spans of later epochs: (epoch, spans).
    """

    epoch: int = 0
    row: int = 0
    done: tuple[Span, ...] = ()
    later: tuple[EpochSpans, ...] = ()

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

    def check(self, folder: Location) -> None:
        """Raise `TooFewRowsError` where the rows, those of `folder`, fill no step."""
        if self.num_rows < self.rows_per_step:
            raise TooFewRowsError(
                f"{folder} has {self.num_rows} rows, fewer than one step takes ({self.world_size} "
                f"workers x data.batch_size {self.batch_size}); lower either"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.steps_for(self.num_rows)

    def steps_for(self, num_rows: int) -> int:
        """Steps that take `num_rows` rows, the last one perhaps fewer than the others."""
        return -(-num_rows // self.rows_per_step)


def step_start(position: DataPosition, shape: BatchShape) -> DataPosition:
    """Where the next step begins: here, or at a later epoch if nothing is left of this one."""
    while (begun := position.begun).pop(position.epoch).gap(0, shape.num_rows) is None:
        position = _position(position.epoch + 1, begun)
    return position


class Stripes:
    """Rows that ranks take in equal steps, each from a part of its own.

    The rows, in order, are cut into one stripe for each of T ranks, whose sizes differ by at most
    one row, and a step takes the next `batch_size` rows of every stripe. So a rank reads on where
    it stopped, and decodes 1/T of the rows and at most two windows that others decode too. Cutting
    what is left after any step anew for T ranks gives what is left of each stripe, so a resumed run
    takes the steps of an uninterrupted one. Equal shares count each row alike, as gradients are
    means over a rank's rows and then over the ranks.
    """

    def __init__(self, rows: Sequence[Span], num_ranks: int, batch_size: int) -> None:
        """`rows` are sorted spans that are not empty."""
        self._rows = rows
        self._starts = list(accumulate((stop - start for start, stop in rows), initial=0))
        self._num_ranks = num_ranks
        self._batch_size = batch_size

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    @property
    def num_steps(self) -> int:
        """Steps that take all rows, the last one perhaps fewer than the others."""
        return -(-self.num_rows // (self._num_ranks * self._batch_size))

    def num_rows_of(self, num_steps: int) -> int:
        """Rows that the first `num_steps` steps take on all ranks together."""
        shorter, num_longer = divmod(self.num_rows, self._num_ranks)
        most = num_steps * self._batch_size
        num_shorter = self._num_ranks - num_longer
        return num_shorter * min(shorter, most) + num_longer * min(shorter + 1, most)

    def share(self, step: int, rank: int) -> list[Span]:
        """What `rank` takes in step number `step`, from 0; may be empty."""
        return self._stripe(rank, step * self._batch_size, (step + 1) * self._batch_size)

    def of(self, rank: int) -> list[Span]:
        """What `rank` takes in all steps together."""
        return self._stripe(rank, 0, self.num_rows)

    def padding(self, rank: int) -> list[Span]:
        """A row to fill up batches with where the share of `rank` is empty, near those before."""
        last = max(1, self.num_rows * (rank + 1) // self._num_ranks)
        return self._slice(last - 1, last)

    def taken(self, num_steps: int) -> Iterator[Span]:
        """What all ranks have taken after `num_steps` steps."""
        for rank in range(self._num_ranks):
            yield from self._stripe(rank, 0, num_steps * self._batch_size)

    def _stripe(self, rank: int, first: int, last: int) -> list[Span]:
        begin, end = (self.num_rows * place // self._num_ranks for place in (rank, rank + 1))
        return self._slice(begin + first, min(begin + last, end))

    def _slice(self, first: int, last: int) -> list[Span]:
        """Rows `first` to `last` (excluded), counted over all of them."""
        found = []
        place = bisect_right(self._starts, first) - 1
        while first < last:
            start, stop = self._rows[place]
            begin = start + first - self._starts[place]
            end = min(stop, begin + last - first)
            found.append((begin, end))
            first += end - begin
            place += 1
        return found


@dataclass(frozen=True)
class Step:
    """Step number `number` (from 0) of those that take what was left of an epoch at `start`."""

    start: DataPosition
    stripes: Stripes
    number: int

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @property
    def num_rows(self) -> int:
        """Rows of all ranks together."""
        return self.stripes.num_rows_of(self.number + 1) - self.stripes.num_rows_of(self.number)

    @property
    def is_last(self) -> bool:
        return self.number + 1 == self.stripes.num_steps

    @property
    def end(self) -> DataPosition:
        """The position after it; costs time proportional to T, so not for each step."""
        begun = self.start.begun
        for span in self.stripes.taken(self.number + 1):
            begun[self.epoch].add(*span)
        return _position(self.epoch, begun)


def steps_from(position: DataPosition, shape: BatchShape, epochs: int) -> Iterator[Step]:
    """The steps from `position` to the end of the last of `epochs` epochs."""
    while (start := step_start(position, shape)).epoch < epochs:
        left = start.begun[start.epoch].gaps(0, shape.num_rows)
        stripes = Stripes(left, shape.world_size, shape.batch_size)
        for number in range(stripes.num_steps):
            yield (step := Step(start, stripes, number))
        position = step.end


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


class SkippedRows(BaseModel, extra="forbid", frozen=True):
    """What the file holds: spans of each epoch's order."""

    epochs: tuple[EpochSpans, ...] = ()

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
