"""Rows that a run leaves out because the loss became NaN or infinite on them: a file of the run.

In the domain `job` the workers start again from the newest checkpoint, which holds no NaN, and take
these rows for done. Groups that are failure domains need no file: the coordinator skips the lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.data.position import DataPosition, ledger_of, position_of
from trainer.data.spans import Span, Spans
from trainer.elastic.protocol import EpochRows

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
        """These rows and `more`."""
        together = {epoch: Spans(spans) for epoch, spans in self.epochs}
        for epoch, spans in more:
            rows = together.setdefault(epoch, Spans())
            for span in spans:
                rows.add(*span)
        return SkippedRows(epochs=tuple((n, rows.spans) for n, rows in sorted(together.items())))

    def write(self, path: Path) -> None:
        """Store it; the file appears whole. Raises OSError."""
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text(self.model_dump_json())
        partial.replace(path)


def rows_between(before: DataPosition, after: DataPosition, num_rows: int) -> list[EpochSpans]:
    """Rows consumed at `after` and not yet at `before`, in epochs of `num_rows` rows."""
    found = []
    for epoch in range(before.epoch, after.epoch + 1):
        rows = _consumed(after, epoch, num_rows)
        for span in _consumed(before, epoch, num_rows).spans:
            rows.remove(*span)
        if rows.spans:
            found.append((epoch, rows.spans))
    return found


def _consumed(position: DataPosition, epoch: int, num_rows: int) -> Spans:
    if epoch < position.epoch:
        return Spans([(0, num_rows)])
    begun = {rows.epoch: rows.done for rows in ledger_of(position).open_epochs}
    return Spans(begun.get(epoch, ()))


def without(position: DataPosition, skipped: SkippedRows) -> DataPosition:
    """`position` with the skipped rows taken for consumed."""
    ledger = ledger_of(position)
    begun = SkippedRows(epochs=tuple((rows.epoch, rows.done) for rows in ledger.open_epochs))
    ahead = [(epoch, spans) for epoch, spans in skipped.epochs if epoch >= position.epoch]
    rows = tuple(EpochRows(epoch=n, done=done) for n, done in begun.with_rows(ahead).epochs)
    return position_of(ledger.model_copy(update={"open_epochs": rows}))
