"""Detection of hangs, stragglers, losses, bad hosts; and what a rank says of its progress."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.coordination import client as ranks
from trainer.coordination.detection import (
    Exclusion,
    HangDetector,
    HostRecord,
    LossWatch,
    RankId,
    StragglerDetector,
    times_needed,
)
from trainer.coordination.messages import Heartbeat
from trainer.failures import memory_shortage

A0, A1, B0 = RankId(0, 0, 0), RankId(0, 0, 1), RankId(1, 0, 0)


def hang_detector() -> HangDetector:
    return HangDetector(min_hang_s=10.0, hang_factor=20.0)


def beat(progress: int, phase: str, step_time_s: float = 0.0) -> Heartbeat:
    return Heartbeat(progress=progress, phase=phase, step=0, step_time_s=step_time_s)


def timed(step_time_s: float, local_s: float = 0.0) -> Heartbeat:
    return Heartbeat(progress=1, phase="train", step=1, step_time_s=step_time_s, local_s=local_s)


def test_a_rank_hangs_when_its_heartbeats_bring_no_progress() -> None:
    detector = hang_detector()
    for now in range(12):
        detector.observe(A0, beat(3, "backward"), now)
        detector.observe(B0, beat(now, "backward"), now)
    (hang,) = detector.check(11)
    assert (hang.rank, hang.phase, hang.idle_s) == (A0, "backward", 11)


def test_slow_steps_stretch_the_limit() -> None:
    detector = hang_detector()
    detector.observe(A0, beat(3, "backward", step_time_s=2.0), 0)
    assert detector.check(39) == []
    assert len(detector.check(41)) == 1


def test_who_waits_for_other_groups_does_not_hang() -> None:
    detector = hang_detector()
    detector.observe(A0, beat(3, "sync"), 0)
    assert detector.check(100, waiting={A0}) == []
    assert detector.check(109) == []
    assert len(detector.check(111)) == 1


def test_of_one_group_the_rank_that_stopped_first_is_named() -> None:
    detector = hang_detector()
    detector.observe(A1, beat(3, "lookup"), 0)
    detector.observe(A0, beat(3, "backward"), 1)
    assert [hang.rank for hang in detector.check(50)] == [A1]


def test_an_earlier_life_of_a_group_never_triggers() -> None:
    detector = hang_detector()
    detector.observe(A0, beat(3, "backward"), 0)
    reborn = RankId(0, 1, 0)
    detector.observe(reborn, beat(0, "start"), 49)
    detector.observe(A1, beat(3, "backward"), 0)
    assert detector.check(50) == []
    detector.forget(0)
    assert detector.check(500) == []


@given(st.lists(st.floats(0, 100), max_size=8), st.floats(0.1, 100))
def test_a_limit_is_never_below_the_minimum(times: list[float], min_hang_s: float) -> None:
    detector = HangDetector(min_hang_s, hang_factor=20.0)
    for rank, step_time_s in enumerate(times):
        detector.observe(RankId(0, 0, rank), beat(1, "train", step_time_s), 0.0)
    assert detector.check(min_hang_s) == []


HOSTS = {A0: "a", A1: "a", B0: "b"}


def test_a_rank_that_stays_slow_is_told_once() -> None:
    detector = StragglerDetector(factor=1.5)
    found = [detector.check({A0: 1.0, A1: 1.1, B0: 2.0}, HOSTS) for _ in range(7)]
    assert [len(each) for each in found] == [0, 0, 0, 0, 1, 0, 0]
    (straggler,) = found[4]
    assert (straggler.rank, straggler.host) == (B0, "b")
    assert straggler.slowdown == pytest.approx(2.0 / 1.1)


def test_a_rank_that_recovers_starts_over() -> None:
    detector = StragglerDetector(factor=1.5)
    slow, fast = {A0: 1.0, B0: 2.0}, {A0: 1.0, B0: 1.0}
    windows = [slow] * 4 + [fast] + [slow] * 5
    found = [len(detector.check(each, HOSTS)) for each in windows]
    assert found == [0] * 9 + [1]


def test_unknown_times_and_a_rank_alone_are_never_slow() -> None:
    detector = StragglerDetector(factor=1.5)
    for _ in range(6):
        assert detector.check({A0: 0.0, B0: 9.0}, HOSTS) == []


def test_of_ranks_that_step_together_the_one_that_is_waited_for_needs_the_time() -> None:
    together = {A0: timed(1.0, local_s=0.2), A1: timed(1.0, local_s=0.9)}
    assert times_needed(together) == pytest.approx({A0: 0.3, A1: 1.0})


def test_who_waits_long_for_its_reader_holds_the_others_up() -> None:
    # The reader's time is no part of the rank's own step; the others spend it waiting for the ids.
    needed = times_needed({A0: timed(1.0, local_s=0.1), A1: timed(0.2, local_s=0.9)})
    assert needed == pytest.approx({A0: 0.2, A1: 1.0})


def test_other_groups_are_not_waited_for() -> None:
    needed = times_needed({A0: timed(1.0, 0.5), A1: timed(1.0, 0.5), B0: timed(2.0, 0.7)})
    assert needed == {A0: 1.0, A1: 1.0, B0: 2.0}


def test_without_local_times_whole_steps_are_compared() -> None:
    assert times_needed({A0: timed(1.0, 0.5), A1: timed(1.2)}) == {A0: 1.0, A1: 1.2}


def test_a_loss_that_is_not_finite_fails_the_job_unless_told_otherwise() -> None:
    assert LossWatch().judge_loss(0.7).action == "go_on"
    for loss in (math.nan, math.inf):
        decision = LossWatch().judge_loss(loss)
        assert (decision.action, decision.cause) == ("fail", f"the training loss became {loss}")


def test_skipping_stops_helping_when_every_interval_is_skipped() -> None:
    watch = LossWatch("skip")
    losses = [math.nan] * 3 + [0.5] + [math.nan] * 4
    actions = [watch.judge_loss(loss).action for loss in losses]
    assert actions == ["skip"] * 3 + ["go_on"] + ["skip"] * 3 + ["fail"]


def test_an_entropy_that_explodes_fails_after_some_reports() -> None:
    watch = LossWatch()
    actions = [watch.judge_ne(ne).action for ne in (0.9, 3.0, 3.0, 0.9, 3.0, 3.0)]
    assert actions == ["go_on"] * 6
    decision = watch.judge_ne(3.0)
    assert decision.action == "fail"
    assert "after 0.9 at best" in decision.cause


def test_an_entropy_that_begins_high_does_not_explode() -> None:
    watch = LossWatch()
    assert {watch.judge_ne(ne).action for ne in (4.0, 4.5, 4.0, 4.2, math.nan)} == {"go_on"}


def test_a_host_is_left_out_for_a_while_after_some_failures() -> None:
    record = HostRecord(exclude_after=3, exclude_s=100.0)
    assert [record.fail("a", now) for now in (0, 10)] == [None, None]
    assert record.fail("a", 20) == Exclusion("a", 3, 120)
    assert record.excluded(119) == {"a"}
    assert record.excluded(120) == set()
    assert record.fail("a", 121) is None


def test_failures_long_ago_are_forgiven() -> None:
    record = HostRecord(exclude_after=2, exclude_s=100.0)
    assert [record.fail("a", now) for now in (0, 3700, 7400)] == [None, None, None]
    assert record.excluded(7401) == set()


def test_exhausted_memory_is_known_by_its_words() -> None:
    for shortage, message, *types in (
        ("device_oom", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("device_oom", "[enforce fail] allocation failed", "torch.OutOfMemoryError"),
        ("host_oom", "Task was killed due to the node running low on memory."),
        ("host_oom", "DefaultCPUAllocator: can't allocate memory: you tried"),
        ("host_oom", "", "MemoryError"),
        (None, "Connection closed by peer", "RuntimeError"),
    ):
        assert memory_shortage(message, types) == shortage


Beat = tuple[str, int, float, float]


class Heart:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []

    def progress(
        self, phase: str, step: int, step_time_s: float = 0.0, local_s: float = 0.0
    ) -> None:
        self.beats.append((phase, step, step_time_s, local_s))


def test_a_step_takes_the_time_between_its_begin_and_its_end() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 5.0, 6.0, 6.0, 20.0])
    heart = Heart()
    pulse = ranks.HeartbeatReporter(heart, clock=lambda: next(times))
    for step in (1, 2, 3):
        pulse.begin_step()
        pulse.end_step(step)
        pulse.local_s = 0.25
    # What lies between two steps is not theirs, and the median shrugs one slow step off.
    assert heart.beats == [("train", 1, 1.0, 0.0), ("train", 2, 1.0, 0.25), ("train", 3, 1.0, 0.25)]


def test_another_phase_is_told_with_its_step() -> None:
    heart = Heart()
    ranks.HeartbeatReporter(heart).enter("validation", 7)
    assert heart.beats == [("validation", 7, 0.0, 0.0)]
    ranks.HeartbeatReporter().enter("validation", 1)  # Without a heart nothing happens.
