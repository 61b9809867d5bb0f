"""Phase times under a fake clock: nothing is lost, counted twice, or counted while paused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.phases import PHASES, HostClock, Phase, PhaseTimes, clock_of


class FakeClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


def _nonzero(seconds: dict[Phase, float]) -> dict[Phase, float]:
    return {phase: value for phase, value in seconds.items() if value}


def test_a_phase_lasts_until_the_next_one_begins() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    clock.now_s = 1.0
    with times.during("dense"):
        clock.now_s = 3.0
        times.enter("input_dist")
        clock.now_s = 7.0
        times.enter("dense")
        clock.now_s = 7.5
    clock.now_s = 8.0
    times.step()
    assert _nonzero(times.read()) == {"other": 1.5, "dense": 2.5, "input_dist": 4.0}


def test_times_are_means_over_the_steps_of_a_window() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    for _ in range(4):
        with times.during("backward"):
            clock.now_s += 3.0
        times.step()
    assert _nonzero(times.read()) == {"backward": 3.0}
    with times.during("sync"):
        clock.now_s += 5.0
    times.step()
    assert _nonzero(times.read()) == {"sync": 5.0}


def test_a_pause_is_left_out_whatever_happens_in_it() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    with times.during("optimizer"):
        clock.now_s += 1.0
        with times.paused():
            with times.during("sync"), times.paused():
                clock.now_s += 10.0
            clock.now_s += 10.0
        clock.now_s += 2.0
    assert _nonzero(times.read()) == {"optimizer": 3.0}


def test_waiting_for_each_item_is_a_phase_and_using_it_is_not() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)

    def slow_items() -> Iterator[int]:
        for item in range(3):
            clock.now_s += 10.0
            yield item

    for item in times.around_each("data_wait", slow_items()):
        clock.now_s += item
    assert _nonzero(times.read()) == {"data_wait": 30.0, "other": 3.0}


def test_a_window_without_a_step_is_not_divided_by_zero() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    clock.now_s = 2.0
    assert _nonzero(times.read()) == {"other": 2.0}


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 1000)), max_size=60))
def test_phases_add_up_to_the_time_that_passed(entries: list[tuple[Phase, int]]) -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    expected = dict.fromkeys(PHASES, 0.0)
    for phase, seconds in entries:
        times.enter(phase)
        clock.now_s += seconds
        expected[phase] += seconds
    assert times.read() == expected


def test_long_windows_keep_few_marks_and_lose_nothing() -> None:
    clock = FakeClock()
    times = PhaseTimes(clock)
    for _ in range(5000):
        times.enter("lookup")
        clock.now_s += 1.0
        times.enter("dense")
        clock.now_s += 2.0
    assert len(times._marks) < 3000
    times.step()
    assert _nonzero(times.read()) == {"lookup": 5000.0, "dense": 10000.0}


def test_the_host_clock_is_in_seconds_and_serves_the_cpu() -> None:
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    assert clock.elapsed_s(1.5, 4.0) == 2.5
    assert clock.mark() <= clock.mark()


def test_ranges_show_in_a_profile_only_when_asked_for() -> None:
    times = PhaseTimes(HostClock())
    with torch.profiler.profile() as profile:
        with times.during("backward"):
            torch.ones(1)
        times.annotate = True
        with times.during("dense"):
            torch.ones(1)
    names = {event.name for event in profile.events() if event.name.startswith("shardloom/")}
    assert names == {"shardloom/forward"}


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_reported_even_if_it_never_began(phase: Phase) -> None:
    assert phase in PhaseTimes(FakeClock()).read()
