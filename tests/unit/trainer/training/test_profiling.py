"""Speed, lookups, phases and traces of a rank, under a fake clock."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.clock import FakeClock
from tests.harness.small_model import fused_kernel, shards_of
from trainer.parallel.sync import SyncReport
from trainer.protocol import events
from trainer.protocol.events import PHASES, Phase
from trainer.protocol.run_dir import AttemptDir
from trainer.training.metrics import LookupCounter, lookups_by_table
from trainer.training.profiling import HostClock, PhaseTimes, Speedometer, Tracer


class FakeTime(FakeClock):
    """A clock that moves only when told to, and times phases."""

    mark = FakeClock.__call__
    device_time = math.inf

    def is_past(self, mark: float) -> bool:
        return mark <= self.device_time

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def speedometer(rows_per_step: int, clock: FakeTime) -> Speedometer:
    """A speedometer whose phases run by the same clock."""
    return Speedometer(rows_per_step, PhaseTimes(clock), clock)


def test_speed_leaves_out_what_was_not_training() -> None:
    clock = FakeTime()
    speed = speedometer(64, clock)

    for wait_s in (0.5, 1.5):
        with speed.phases.during("data_wait"):
            clock.now += wait_s
        speed.step()
        clock.now += 2.0 - wait_s
    with speed.paused():
        clock.now += 30.0
    assert _nonzero(speed.phases.read(speed.num_steps)) == {"data_wait": 1.0, "other": 1.0}
    assert speed.read() == {"speed/steps_per_s": 0.5, "speed/rows_per_s": 32.0}


def test_sync_is_reported_per_sync_and_only_where_there_was_one() -> None:
    clock = FakeTime()
    speed = speedometer(1, clock)
    speed.sync(SyncReport(num_bytes=100, density=0.1))
    speed.sync(SyncReport(num_bytes=300, density=0.3))
    for _ in range(4):
        speed.step()
    clock.now += 4.0
    values = speed.read(sync_s=0.75)
    assert (values["sync/time_s"], values["sync/bytes"]) == (1.5, 200.0)
    assert values["sync/density"] == pytest.approx(0.2)
    speed.sync(SyncReport(num_bytes=100, density=0.1))
    with speed.paused():  # before a validation: of no time of a step
        speed.sync(SyncReport(num_bytes=100, density=0.1))
    speed.step()
    assert speed.read(sync_s=0.5)["sync/time_s"] == 0.5
    clock.now += 1.0
    assert "sync/time_s" not in speed.read()


def test_each_window_starts_anew() -> None:
    clock = FakeTime()
    speed = speedometer(10, clock)
    speed.step()
    clock.now += 50.0
    speed.restart()
    speed.step()
    clock.now += 2.0
    assert speed.read()["speed/rows_per_s"] == 5.0
    # A window of no time has a finite speed.
    speed.step()
    assert speed.read()["speed/steps_per_s"] == pytest.approx(1e9)


# Two bags per feature. a: [1, 1], [2]; b: [2], []; c: [1], [1, 3]
IDS = torch.tensor([1, 1, 2, 2, 1, 1, 3])
OFFSETS = torch.tensor([0, 2, 3, 4, 4, 5, 7])


def test_lookups_hottest_rows_and_synced_rows_are_told_of_each_table() -> None:
    # Table 0 is read by features a and b, table 1 by feature c.
    adagrad = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    kernel = fused_kernel([10, 10], feature_table_map=[0, 0, 1], optimizer=adagrad)
    groups = SimpleNamespace(device=torch.device("cpu"))
    model = SimpleNamespace(
        embedding_kernels=lambda: [kernel], table_shards=lambda: shards_of(kernel), groups=groups
    )
    # Table 1 has another 4 columns elsewhere, and table 2 is on other ranks only.
    counter = LookupCounter(model, {"table_0": 4, "table_1": 8, "table_2": 4})
    kernel(indices=IDS, offsets=OFFSETS)
    assert counter.parts()[0].sums.tolist() == [0, 0]
    counter.sampling = True
    kernel.eval()
    with torch.no_grad():  # as in a validation
        kernel(indices=IDS, offsets=OFFSETS)
    # A user's network may have its tables so in a step, too, in which they learn all the same.
    kernel(indices=IDS, offsets=OFFSETS)
    for num_rows in (torch.tensor([2, 10]), None, torch.tensor([1, 10])):
        counter.add_sync(num_rows)
    counts, lookups, synced = counter.parts()
    assert counts.sums.tolist() == [7, 2 + 2], "rows are distinct within a table"
    assert lookups.read(lookups.sums, lookups.peaks) == {
        **{"table/table_0/lookups": 4.0, "table/table_0/hottest": 0.5},
        **{"table/table_1/lookups": 1.5, "table/table_1/hottest": pytest.approx(2 / 3)},
    }
    assert synced.read(synced.sums, synced.peaks) == {
        **{"table/table_0/synced": 0.15, "table/table_1/synced": 1.0}
    }
    assert not any(part.sums.any() for part in counter.parts()), "each report starts anew"


def test_of_very_many_tables_those_are_told_of_that_are_looked_up_most_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.training.metrics._MAX_TABLES", 2)
    groups = SimpleNamespace(device=torch.device("cpu"))
    model = SimpleNamespace(embedding_kernels=list, table_shards=list, groups=groups)
    counter = LookupCounter(model, {"a": 4, "b": 4, "c": 4})
    _, lookups, synced = counter.parts()
    told = []
    for counts in ([0, 0, 0], [1, 8, 2], [9, 9, 0], [9, 9, 9]):
        sums = torch.tensor([counts, counts], dtype=torch.float64).T.flatten()
        values = lookups.read(sums, lookups.peaks) | synced.read(sums, synced.peaks)
        told.append({name.removeprefix("table/") for name in values})
    kinds = ("lookups", "hottest", "synced")
    of_b, of_c = ({f"{table}/{kind}" for kind in kinds} for table in "bc")
    assert told == [set(), of_b | of_c, of_b, of_b | of_c]


def test_the_hottest_rows_are_a_hundredth_of_those_looked_up() -> None:
    # Row k of 200 is looked up once, but 7 and 9 ten times; another table has one row.
    rows = torch.tensor([*range(200), *([7] * 9), *([9] * 9), 200]).sort().values
    is_first = torch.ones(len(rows), dtype=torch.bool)
    is_first[1:] = rows[1:] != rows[:-1]
    found = lookups_by_table(rows, is_first, torch.tensor([200, 300]))
    assert found.tolist() == [[218.0, 20.0], [1.0, 1.0]]


def _nonzero(seconds: dict[Phase, float]) -> dict[Phase, float]:
    return {phase: value for phase, value in seconds.items() if value}


def test_times_are_means_over_the_steps_of_a_window() -> None:
    clock = FakeTime()
    times = PhaseTimes(clock)
    for _ in range(4):
        with times.during("backward"):
            clock.now += 3.0
    assert _nonzero(times.read(4)) == {"backward": 3.0}
    with times.during("sync"):
        clock.now += 5.0
    assert _nonzero(times.read(1)) == {"sync": 5.0}
    # One that begins in another interrupts it, and without a step nothing is divided.
    with times.during("dense"):
        clock.now += 2.0
        times.enter("input_dist")
        clock.now += 4.0
        times.enter("dense")
        clock.now += 0.5
    clock.now += 1.0
    assert _nonzero(times.read(0)) == {"dense": 2.5, "input_dist": 4.0, "other": 1.0}


def test_what_the_device_has_not_done_yet_counts_in_the_next_window() -> None:
    clock = FakeTime()
    speed = speedometer(1, clock)
    times = speed.phases
    for phase in ("dense", "backward"):
        with times.during(phase):
            clock.now += 3.0
    clock.device_time = -1.0
    assert _nonzero(times.read(1)) == {}
    clock.device_time = clock.now - 1.0
    assert _nonzero(times.read(1)) == {"dense": 3.0}
    speed.read()
    clock.now += 2.0
    clock.device_time = math.inf
    assert _nonzero(times.read(1)) == {"backward": 3.0, "other": 2.0}


def test_a_pause_is_left_out_whatever_happens_in_it() -> None:
    clock = FakeTime()
    times = PhaseTimes(clock)
    with times.during("optimizer"):
        clock.now += 1.0
        with times.paused():
            with times.during("sync"), times.paused():
                clock.now += 10.0
            clock.now += 10.0
        clock.now += 2.0
    assert _nonzero(times.read(0)) == {"optimizer": 3.0}


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 1000)), max_size=60))
def test_phases_add_up_to_the_time_that_passed(entries: list[tuple[Phase, int]]) -> None:
    clock = FakeTime()
    times = PhaseTimes(clock)
    expected = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in entries:
        times.enter(phase)
        clock.now += seconds
        expected[phase] += seconds
    assert times.read(1) == expected


class Bench:
    """A tracer on an attempt's folder, and what it emitted."""

    def __init__(self, root: Path, rank: int = 0) -> None:
        self.files = AttemptDir(root)
        self.emitted: list[events.Event] = []
        self.speed = Speedometer(1, PhaseTimes(HostClock()))
        self.tracer = Tracer(self.files, rank, self.speed, self.emitted.append)

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


def test_a_trace_that_is_stopped_early_says_how_many_steps_it_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ask("t-00000001", num_steps=5)
    bench.tracer.poll()
    bench.take_steps(1, 2)
    assert bench.speed.phases.annotate
    bench.tracer.stop()
    assert not bench.speed.phases.annotate
    bench.take_steps(3, 4)
    assert bench.written() == [("t-00000001-rank0.json.gz", 2, 2)]


def test_storage_that_is_away_costs_a_trace_and_a_note_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.files.traces_dir.write_text("a file where the folder should be")
    bench.ask("t-00000001")
    with patch.object(Path, "exists", side_effect=OSError(errno.ESTALE, "stale")):
        bench.tracer.poll()
    bench.take_steps(1, 1)
    (note,) = bench.emitted
    assert isinstance(note, events.Note)
    assert "t-00000001-rank0.json.gz cannot be written" in note.message


def test_a_request_that_names_another_folder_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.ask("../t-00000001")
    for step in (1, 2):
        bench.tracer.poll()
        bench.take_steps(step, step)
    assert bench.emitted == []
    (record,) = caplog.records
    assert "trace-request.json is refused" in record.message
    assert "\nid\n" in record.message
