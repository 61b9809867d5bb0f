"""Goodput of the job domain: what a loss takes away since the newest checkpoint is lost time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.service.builders import workers_started
from trainer.elastic.job_goodput import JobGoodput, StreamTail
from trainer.events import CheckpointCommitted, Event, Metrics, Note, Progress, WorkersStarted
from trainer.outbox import EventWriter


def progress(time: float, step: int) -> Progress:
    return Progress(
        time=time, step=step, total_steps=100, epoch=0, rows=0, rows_per_s=0.0, eta_s=0.0
    )


def started(time: float, resumed_step: int = 0) -> WorkersStarted:
    return workers_started().model_copy(update={"time": time, "resumed_step": resumed_step})


def checkpoint(time: float, step: int) -> CheckpointCommitted:
    return CheckpointCommitted(time=time, step=step, path="", size_bytes=0, duration_s=0.0)


def test_a_tail_reads_each_complete_record_once(tmp_path: Path) -> None:
    path = tmp_path / "stream.jsonl"
    tail = StreamTail(path)
    assert tail.read(0.0) == []
    note = Note(time=1.0, message="one")
    EventWriter(path).write(note)
    with path.open("ab") as file:
        file.write(b'{"time": 2.0, "kind"')
    assert tail.read(0.0) == [note]
    assert tail.read(0.0) == []
    with path.open("ab") as file:
        file.write(b': "note", "message": "two"}\n')
    assert tail.read(0.0) == [Note(time=2.0, message="two")]


def test_time_since_the_newest_checkpoint_is_lost_with_the_workers(tmp_path: Path) -> None:
    told: list[Event] = []
    goodput = JobGoodput(told.append)
    first, second = tmp_path / "workers-0.jsonl", tmp_path / "workers-1.jsonl"
    goodput.begin(first, now=0.0)
    writer = EventWriter(first)
    for event in (
        started(10.0),
        checkpoint(30.0, step=20),
        progress(50.0, step=40),
    ):
        writer.write(event)
    goodput.look(50.0)
    assert isinstance(told[-1], Metrics)
    assert told[-1].values["risk/steps_undurable"] == 20.0
    goodput.end(50.0, is_lost=True)

    goodput.begin(second, now=60.0)
    EventWriter(second).write(started(70.0, resumed_step=20))
    EventWriter(second).write(checkpoint(90.0, step=40))
    goodput.end(90.0, is_lost=False)
    values = told[-1].values
    assert values["goodput/lost_s/start"] == pytest.approx(20.0)
    assert values["goodput/lost_s/redo"] == pytest.approx(20.0)
    assert values["goodput/lost_s/recovery"] == pytest.approx(10.0)
    assert values["goodput/share"] == pytest.approx(40.0 / 90.0)
    assert values["risk/steps_undurable"] == 0.0
    assert told[-1].step == 40
