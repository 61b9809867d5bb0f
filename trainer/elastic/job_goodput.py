"""Goodput of the domain `job`, which the driver reckons from what the workers tell.

All workers are one group, and a commit is a checkpoint: what was trained since the newest one is
lost with the workers. Metrics as in `trainer.elastic.goodput`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.elastic.goodput import GoodputMeter, steps_undurable
from trainer.events import (
    CheckpointCommitted,
    Event,
    Metrics,
    Progress,
    WorkersStarted,
    read_record,
)

_ALL = 0  # the one group
_EVERY_S = 10.0


@dataclass
class StreamTail:
    """The records of a growing stream, as they come."""

    path: Path
    _offset: int = 0

    def read(self, now: float) -> list[Event]:
        """Records that were completed since the last call; none while storage is away."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                found = file.read()
        except OSError:
            return []
        complete = found[: found.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [read_record(line, now) for line in complete.splitlines()]


@dataclass
class JobGoodput:
    """Goodput over all lives of an attempt's workers; `now` is Unix time in seconds."""

    write: Callable[[Event], None]
    step: int = 0
    durable_step: int = 0
    _meter: GoodputMeter = field(default_factory=GoodputMeter)
    _tail: StreamTail | None = None
    _told_at: float = 0.0

    def begin(self, stream: Path, now: float) -> None:
        """Workers that write to `stream` are started."""
        self._meter.start(_ALL, now)
        self._tail = StreamTail(stream)
        self._told_at = now

    def look(self, now: float) -> None:
        """Take in what the workers have told, and tell of it now and then."""
        for record in self._tail.read(now) if self._tail else []:
            self._take(record)
        if now - self._told_at >= _EVERY_S:
            self._tell(now)

    def end(self, now: float, *, is_lost: bool) -> None:
        """The workers ended: with a checkpoint, or lost with what they trained since."""
        self.look(now)
        if is_lost:
            self._meter.lose(_ALL, now)
            self.step = self.durable_step
        else:
            self._meter.commit(now)
        self._tell(now)

    def _take(self, record: Event) -> None:
        if isinstance(record, WorkersStarted):
            self.step = self.durable_step = record.resumed_step
            self._meter.train(_ALL, record.time)
        elif isinstance(record, Progress):
            self.step = record.step
        elif isinstance(record, CheckpointCommitted):
            self.durable_step = record.step
            self.step = max(self.step, record.step)
            self._meter.commit(record.time)

    def _tell(self, now: float) -> None:
        self._told_at = now
        values = self._meter.read(now).metrics() | {
            "risk/steps_undurable": float(steps_undurable(self.step, self.durable_step)),
            "elastic/groups": float(self._meter.num_training),
        }
        self.write(Metrics(time=now, step=self.step, values=values))
