"""Metrics as TensorBoard's event files. Needs the package `tensorboard`, but not torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.protocol.events import Event, Metrics, WorkersStarted


class TensorBoardSink:
    """Writes into one folder, attempt after attempt; TensorBoard reads its files as one run."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def open(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))

    def take(self, events: Sequence[Event]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as BoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self.open()
        # One that has failed would fail for ever, as its thread is dead.
        writer, self._writer = self._writer, None
        for event in events:
            if isinstance(event, Metrics):
                values = [Summary.Value(tag=tag, simple_value=v) for tag, v in event.values.items()]
                summary = Summary(value=values)
                record = BoardEvent(wall_time=event.time, step=event.step, summary=summary)
                writer.add_event(record)
            elif isinstance(event, WorkersStarted) and event.resumed_step:
                # It makes TensorBoard drop the steps that are trained again.
                log, step = SessionLog(status=SessionLog.START), event.resumed_step + 1
                writer.add_event(BoardEvent(wall_time=event.time, step=step, session_log=log))
        writer.flush()
        self._writer = writer

    def close(self) -> None:
        self._writer.close()
