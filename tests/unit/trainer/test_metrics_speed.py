"""The speedometer under a fake clock, and the lookup counter on a real FBGEMM kernel."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from trainer.balance import LookupCounter
from trainer.metrics import Speedometer
from trainer.parallel.phases import PhaseTimes
from trainer.parallel.sync import SyncReport


class FakeTime:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def speedometer(rows_per_step: int, clock: FakeTime) -> Speedometer:
    """A speedometer whose phases run by the same clock."""
    return Speedometer(rows_per_step, PhaseTimes(clock), clock)


def test_speed_leaves_out_what_was_not_training() -> None:
    clock = FakeTime()
    speed = speedometer(64, clock)
    for wait_s in (0.5, 1.5):
        speed.step(wait_s)
        clock.now_s += 2.0
    with speed.paused():
        clock.now_s += 30.0
    assert speed.phases.read()["other"] == 2.0
    assert speed.read() == {
        "speed/steps_per_s": 0.5,
        "speed/rows_per_s": 32.0,
        "data/wait_s": 1.0,
    }


def test_sync_is_reported_per_sync_and_only_where_there_was_one() -> None:
    clock = FakeTime()
    speed = speedometer(1, clock)
    speed.sync(SyncReport(time_s=1.0, num_bytes=100, density=0.1))
    speed.sync(SyncReport(time_s=2.0, num_bytes=300, density=0.3))
    speed.step(0.0)
    clock.now_s += 4.0
    values = speed.read()
    assert (values["sync/time_s"], values["sync/bytes"]) == (1.5, 200.0)
    assert values["sync/density"] == pytest.approx(0.2)
    clock.now_s += 1.0
    assert "sync/time_s" not in speed.read()


def test_a_pause_within_a_pause_is_left_out_once() -> None:
    clock = FakeTime()
    speed = speedometer(10, clock)
    speed.step(0.0)
    clock.now_s += 2.0
    with speed.paused():
        clock.now_s += 5.0
        with speed.paused():
            clock.now_s += 3.0
    assert speed.read()["speed/steps_per_s"] == 0.5


def test_each_window_starts_anew() -> None:
    clock = FakeTime()
    speed = speedometer(10, clock)
    speed.step(9.0)
    clock.now_s += 50.0
    speed.restart()
    speed.step(0.25)
    clock.now_s += 2.0
    assert speed.read()["speed/rows_per_s"] == 5.0
    speed.step(0.0)
    clock.now_s += 1.0
    assert speed.read()["data/wait_s"] == 0.0


def test_a_window_of_no_time_has_a_finite_speed() -> None:
    speed = speedometer(10, FakeTime())
    speed.step(0.0)
    assert speed.read()["speed/steps_per_s"] == pytest.approx(1e9)


class OneKernel:
    """A model of one kernel: table 0 read by features a and b, table 1 by feature c."""

    def __init__(self) -> None:
        place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(10, 4, *place), (10, 4, *place)], feature_table_map=[0, 0, 1]
        )

    def embedding_kernels(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        return [self.kernel]


# Two bags per feature. a: [1, 1], [2]; b: [2], []; c: [1], [1, 3]
IDS = torch.tensor([1, 1, 2, 2, 1, 1, 3])
OFFSETS = torch.tensor([0, 2, 3, 4, 4, 5, 7])


def test_rows_are_distinct_within_a_table_over_all_its_features() -> None:
    model = OneKernel()
    counter = LookupCounter(model)
    counter.sampling = True
    model.kernel(IDS, OFFSETS)
    assert counter.counts == (7, 2 + 2)
    model.kernel(indices=IDS, offsets=OFFSETS)
    assert counter.counts == (14, 8)


def test_lookups_count_only_while_sampling_and_training() -> None:
    model = OneKernel()
    counter = LookupCounter(model)
    model.kernel(IDS, OFFSETS)
    counter.sampling = True
    model.kernel.eval()
    model.kernel(IDS, OFFSETS)
    assert counter.counts == (0, 0)


def test_a_lookup_of_nothing_counts_nothing() -> None:
    model = OneKernel()
    counter = LookupCounter(model)
    counter.sampling = True
    model.kernel(IDS[:0], torch.zeros(7, dtype=torch.long))
    assert counter.counts == (0, 0)
