"""Metrics as TensorBoard's event files. Needs the package `tensorboard`, but not torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.protocol.events import Event, Metrics, WorkersStarted
from trainer.sinks.base import Memory


class TensorBoardSink:
    """Writes into one folder, attempt after attempt; TensorBoard reads its files as one run."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self, memory: Memory) -> None:
        """Begin a file of this attempt."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))

    def take(self, events: Sequence[Event]) -> None:
        """Write the metrics among some records."""
        for event in events:
            if isinstance(event, Metrics):
                self._writer.add_event(_values(event))
            elif isinstance(event, WorkersStarted) and event.resumed_step:
                self._writer.add_event(_resumed(event))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()


def _values(event: Metrics) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in event.values.items()]
    return BoardEvent(wall_time=event.time, step=event.step, summary=Summary(value=values))


def _resumed(event: WorkersStarted) -> Any:
    """What makes TensorBoard drop the steps that are trained again."""
    from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
    from tensorboard.compat.proto.event_pb2 import SessionLog

    log = SessionLog(status=SessionLog.START)
    return BoardEvent(wall_time=event.time, step=event.resumed_step + 1, session_log=log)
