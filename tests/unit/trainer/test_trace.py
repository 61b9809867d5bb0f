"""Tracing decisions of one rank: what starts a trace, what ends it, and what a fault costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainer import events
from trainer.metrics import Speedometer
from trainer.parallel.phases import HostClock, PhaseTimes
from trainer.run_dir import AttemptDir
from trainer.spec import TraceSpec
from trainer.trace import Tracer


class Bench:
    """A tracer on an attempt's folder, and what it emitted."""

    def __init__(self, root: Path, rank: int = 0, spec: TraceSpec | None = None) -> None:
        self.files = AttemptDir(root)
        self.emitted: list[events.Event] = []
        self.speed = Speedometer(1, PhaseTimes(HostClock()))
        self.tracer = Tracer(self.files, rank, spec, self.speed, self.emitted.append)

    def ask(self, trace_id: str, num_steps: int = 1, ranks: tuple[int, ...] = (0,)) -> None:
        request = {"id": trace_id, "num_steps": num_steps, "ranks": ranks}
        # Moved into place, as the service does it.
        partial = self.files.root / "partial"
        partial.write_text(json.dumps(request))
        partial.replace(self.files.trace_request_path)

    def take_steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.tracer.begin_step(step)
            torch.ones(2).sum()
            self.tracer.end_step(step)

    def written(self) -> list[tuple[str, int, int]]:
        return [
            (Path(event.path).name, event.step, event.num_steps)
            for event in self.emitted
            if isinstance(event, events.TraceWritten)
        ]


def test_a_spec_trace_covers_its_steps_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=TraceSpec(first_step=3, num_steps=2))
    bench.take_steps(1, 6)
    assert bench.written() == [("spec-rank0.json.gz", 4, 2)]


def test_ranks_that_are_not_asked_trace_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rank=1, spec=TraceSpec(first_step=1, ranks=(0, 2)))
    bench.take_steps(1, 6)
    assert bench.emitted == []
    assert not bench.files.traces_dir.exists()


def test_a_request_is_answered_once_also_by_workers_that_start_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ask("t-00000001")
    for step in (1, 2):
        bench.tracer.poll()
        bench.take_steps(step, step)
    restarted = Bench(tmp_path)
    restarted.tracer.poll()
    restarted.take_steps(1, 2)
    assert bench.written() == [("t-00000001-rank0.json.gz", 1, 1)]
    assert restarted.written() == []


def test_a_second_request_waits_for_the_trace_in_the_making(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ask("t-00000001", num_steps=3)
    bench.tracer.poll()
    bench.take_steps(1, 1)
    bench.ask("t-00000002")
    bench.tracer.poll()
    bench.take_steps(2, 5)
    names = ["t-00000001-rank0.json.gz", "t-00000002-rank0.json.gz"]
    assert bench.written() == [(names[0], 3, 3), (names[1], 4, 1)]


def test_a_request_does_not_displace_the_trace_of_the_spec_that_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=TraceSpec(first_step=2, num_steps=1))
    bench.ask("t-00000001", num_steps=2)
    bench.tracer.poll()
    bench.take_steps(1, 1)
    bench.tracer.begin_step(2)
    bench.ask("t-00000002")
    bench.tracer.poll()
    bench.tracer.end_step(2)
    bench.take_steps(3, 5)
    names = ["t-00000001-rank0.json.gz", "spec-rank0.json.gz", "t-00000002-rank0.json.gz"]
    assert bench.written() == [(names[0], 2, 2), (names[1], 3, 1), (names[2], 4, 1)]


def test_a_trace_that_is_stopped_early_says_how_many_steps_it_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=TraceSpec(first_step=1, num_steps=5))
    bench.take_steps(1, 2)
    bench.tracer.stop()
    bench.take_steps(3, 4)
    assert bench.written() == [("spec-rank0.json.gz", 2, 2)]


def test_phases_are_annotated_while_a_trace_is_made_and_not_after(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=TraceSpec(first_step=1, num_steps=2))
    bench.take_steps(1, 1)
    assert bench.speed.phases.annotate
    bench.take_steps(2, 2)
    assert not bench.speed.phases.annotate


def test_a_trace_that_cannot_be_written_costs_a_note_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=TraceSpec(first_step=1, num_steps=1))
    bench.files.traces_dir.write_text("a file where the folder should be")
    bench.take_steps(1, 2)
    (note,) = bench.emitted
    assert isinstance(note, events.Note)
    assert "spec-rank0.json.gz cannot be written" in note.message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\xff",
        '{"id": "t-00000001", "num_steps": 101, "ranks": [0]}',
        '{"id": "t-00000001", "num_steps": 1, "ranks": []}',
        '{"id": "t-00000001", "num_steps": 1, "ranks": [-1]}',
        '{"id": "../t-00000001", "num_steps": 1, "ranks": [0]}',
        '{"id": "spec", "num_steps": 1, "ranks": [0]}',
        '{"id": "t-00000001", "num_steps": 1, "ranks": [0], "stacks": true}',
    ],
)
def test_a_damaged_request_is_refused_once_and_removed_by_rank_0(tmp_path: Path, text: str) -> None:
    ranks = [Bench(tmp_path, rank) for rank in (1, 0)]
    ranks[0].files.trace_request_path.write_text(text, encoding="latin-1")
    for bench in ranks:
        for step in (1, 2):
            bench.tracer.poll()
            bench.take_steps(step, step)
    assert ranks[0].emitted == []
    (note,) = ranks[1].emitted
    assert isinstance(note, events.Note)
    assert note.level == "warning"
    assert not ranks[0].files.trace_request_path.exists()
