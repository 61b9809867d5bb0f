"""Detection of hangs, stragglers, losses, bad hosts; and what a rank says of its progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.coordination.client import HeartbeatReporter
from trainer.coordination.detection import (
    HeartbeatMonitor,
    HostRecord,
    RankId,
    ReplacementPolicy,
    Suspect,
    SuspicionFilter,
    slowness_of,
    times_needed,
)
from trainer.coordination.messages import Heartbeat
from trainer.protocol.events import HostExcluded
from trainer.spec.training import RecoverySpec

A0, A1, B0 = RankId(0, 0, 0), RankId(0, 0, 1), RankId(1, 0, 0)


def monitor(min_hang_s: float = 10.0) -> HeartbeatMonitor:
    return HeartbeatMonitor(RecoverySpec(heartbeat_timeout_s=1.0, min_hang_s=min_hang_s))


def timed(step_time_s: float, local_s: float = 0.0, progress: int = 1) -> Heartbeat:
    times = {"step_time_s": step_time_s, "local_s": local_s}
    return Heartbeat(progress=progress, phase="train", **times)


STILL = timed(0.0)


def test_while_none_is_heard_none_is_silent() -> None:
    watch = monitor()
    for rank in (A0, B0):
        watch.hear(rank, 0.0)
    watch.hear(A0, 0.8)  # the connection of the other sends again later
    assert not watch.silent(1.7)
    for at in (1.2, 1.6):
        watch.hear(A0, at)
    assert watch.silent(1.81) == [B0]


def test_a_rank_does_not_hang_while_the_one_that_watches_it_sleeps() -> None:
    watch = monitor()
    watch.wake(0.0)
    watch.beat(A0, STILL, 0.0)
    watch.wake(100.0)
    watch.beat(A0, STILL, 101.0)
    assert watch.hangs(101.0) == []
    assert watch.hangs(110.5)


def test_whom_nobody_hears_has_as_long_as_others_have_been_fine_to_be_heard_again() -> None:
    judge = SuspicionFilter(alone_s=1000.0).judge
    groups = range(3)
    silent = {n: Suspect(RankId(n, 0, 0), "silent", "train", 5.0, 5.0, ()) for n in groups}
    assert judge(silent, (), groups, 0.0) == (set(), set(groups), set())
    assert not judge(silent, (), groups, 50.0)[0]
    del silent[2]
    assert not judge(silent, (), groups, 54.0)[0]
    assert judge(silent, (), groups, 56.0)[0] == {0, 1}


def test_slow_steps_stretch_the_limit() -> None:
    detector = monitor()
    detector.beat(A0, timed(2.0), 0)
    assert detector.hangs(39) == []
    assert len(detector.hangs(41)) == 1


def test_of_ranks_that_wait_for_each_other_the_one_that_began_fewer_steps_hangs() -> None:
    within, before = STILL.model_copy(update={"num_steps": 8}), STILL
    for beats, named, alike in (
        # The heartbeat of the one that waits came first.
        ({A0: within, A1: before}, A1, {A1}),
        # Nobody knows for whom the others wait in the middle of a step.
        ({A1: within, A0: within}, A1, {A0, A1}),
    ):
        detector = monitor()
        for at, rank in enumerate(beats):
            detector.beat(rank, beats[rank], float(at))
        (hang,) = detector.hangs(10.5)
        assert (hang.rank, set(hang.alike)) == (named, alike)


@given(st.lists(st.floats(0, 100), max_size=8), st.floats(0.1, 100))
def test_a_limit_is_never_below_the_minimum(times: list[float], min_hang_s: float) -> None:
    detector = monitor(min_hang_s)
    for rank, step_time_s in enumerate(times):
        detector.beat(RankId(0, 0, rank), timed(step_time_s), 0.0)
    assert detector.hangs(min_hang_s) == []


Windows = list[dict[RankId, float]]


def stragglers(windows: list[dict[RankId, Heartbeat]] | Windows) -> Windows:
    """Slowdown of whom is found in each window, by the heartbeats or step times in it."""
    detector = monitor()
    detector.stragglers((), 0)
    found = []
    for number, beats in enumerate(windows, start=1):
        for rank, each in beats.items():
            beat = each if isinstance(each, Heartbeat) else timed(each)
            detector.beat(rank, beat, 10 * number)
        groups = {rank.group for rank in beats}
        slow = detector.stragglers(groups, 10 * number)
        found.append({rank: each.slowdown for rank, each in slow.items()})
    return found


def test_a_rank_that_stays_slow_is_told_once() -> None:
    found = stragglers([{A0: 1.0, A1: 1.1, B0: 2.0}] * 7)
    assert found == [{}] * 4 + [{B0: pytest.approx(2.0 / 1.1)}] + [{}] * 2


def test_a_rank_that_recovers_starts_over_and_one_that_hardly_does_is_no_news() -> None:
    slow, middling, fast = {A0: 1.0, B0: 2.0}, {A0: 1.0, B0: 1.4}, {A0: 1.0, B0: 1.2}
    assert stragglers([slow] * 4 + [fast] + [slow] * 5) == [{}] * 9 + [{B0: 2.0}]
    assert stragglers([slow] * 4 + [middling, slow]) == [{}] * 5 + [{B0: 2.0}]
    assert stragglers([slow] * 5 + [middling, slow] * 9)[5:] == [{}] * 18
    assert stragglers([slow, fast] * 9) == [{}] * 18


def test_unknown_times_and_a_rank_alone_are_never_slow() -> None:
    assert stragglers([{A0: 0.0, B0: 9.0}] * 6) == stragglers([{}] * 6) == [{}] * 6


RANKS = [RankId(0, 0, rank) for rank in range(4)]
# Heartbeats of four ranks that step together, one of them on a CPU with half the speed: local times
# of a step in seconds in windows of 10 s, and whole steps, which all wait for the slow one.
LOCAL_S = [
    (0.031, 0.034, 0.066, 0.030),
    (0.033, 0.029, 0.071, 0.032),
    (0.030, 0.047, 0.064, 0.033),
    (0.036, 0.031, 0.068, 0.031),
    (0.032, 0.033, 0.070, 0.029),
    (0.031, 0.032, 0.065, 0.034),
]
STEP_S = 0.21


def series(local_s: list[tuple[float, ...]], step_s: float) -> list[dict[RankId, Heartbeat]]:
    return [
        {rank: timed(step_s, own) for rank, own in zip(RANKS, window, strict=True)}
        for window in local_s
    ]


def test_of_ranks_that_step_together_the_one_is_found_that_has_more_to_do_on_its_own() -> None:
    found = stragglers(series(LOCAL_S, STEP_S))
    assert found[:4] == [{}] * 4
    assert found[4].keys() == {RANKS[2]}
    assert found[4][RANKS[2]] == pytest.approx(0.070 / 0.032)
    uniform = [(2 * each[0],) * 4 for each in LOCAL_S]
    assert stragglers(series(uniform, 2 * STEP_S)) == [{}] * 6, "the whole job is slow"
    spiky = [
        tuple(0.07 if number % 4 == rank else 0.03 for rank in range(4)) for number in range(20)
    ]
    assert stragglers(series(spiky, STEP_S)) == [{}] * 20
    # What is twice nothing holds nobody up.
    assert stragglers(series(LOCAL_S, step_s=2.0)) == [{}] * 6
    assert slowness_of({RANKS[0]: timed(0.2, 0.1)})[RANKS[0]].slowdown == 1
    assert slowness_of({A0: timed(0.2), A1: timed(0.2, 0.1)})[A1].slowdown == 1, "one is not timed"


def test_of_the_two_measures_of_slowness_the_greater_counts() -> None:
    group, fast = {A0: timed(1.0, 0.1), A1: timed(1.0, 0.2)}, timed(0.25, 0.1)
    assert slowness_of(group)[A1].slowdown == 2
    assert slowness_of(group | {B0: fast, RankId(2, 0, 0): fast})[A1].slowdown == 4


def test_no_host_and_no_place_is_replaced_twice_and_few_are_in_all() -> None:
    policy = ReplacementPolicy(is_wanted=True, most=2)
    assert not policy.replaces("a", has_room=False)
    assert policy.replaces("a", has_room=True, place=3)
    assert not policy.replaces("a", has_room=True, place=1)
    assert not policy.replaces("b", has_room=True, place=3), "there is more to do at that place"
    assert policy.replaces("b", has_room=True)
    assert not policy.replaces("c", has_room=True)
    assert not ReplacementPolicy(is_wanted=False).replaces("a", has_room=True)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ({A0: timed(1.0, 0.2), A1: timed(1.0, 0.9)}, {A0: 0.3, A1: 1.0}),
        # The time of a reader is no part of the rank's own step; the others spend it waiting.
        ({A0: timed(1.0, 0.1), A1: timed(0.2, 0.9)}, {A0: 0.2, A1: 1.0}),
        # Other groups are not waited for.
        (
            {A0: timed(1.0, 0.5), A1: timed(1.0, 0.5), B0: timed(2.0, 0.7)},
            {A0: 1.0, A1: 1.0, B0: 2.0},
        ),
        # Without local times whole steps are compared.
        ({A0: timed(1.0, 0.5), A1: timed(1.2)}, {A0: 1.0, A1: 1.2}),
    ],
)
def test_of_ranks_that_step_together_the_one_that_is_waited_for_needs_the_time(
    beats: dict[RankId, Heartbeat], expected: dict[RankId, float]
) -> None:
    assert times_needed(beats) == pytest.approx(expected)


def test_a_host_is_left_out_for_a_while_after_some_failures() -> None:
    record = HostRecord(exclude_after=3, exclude_s=100.0)
    assert [record.fail("a", now) for now in (0, 10, 10, 10.5)] == [None] * 4
    assert record.fail("a", 20) == HostExcluded(time=20, host="a", num_failures=3, until=120)
    assert record.excluded(119) == {"a"}
    assert record.excluded(120) == set()
    assert [record.fail("a", now) for now in (121, 122)] == [None, None]
    # Failures long ago are forgiven.
    assert record.fail("a", 3800) is None


def test_groups_that_a_host_loses_at_once_are_one_failure_but_not_one_after_the_other() -> None:
    record = HostRecord(exclude_after=1, exclude_s=100.0)
    assert record.fail("a", 0)
    assert record.fail("a", 0.5) is None
    record = HostRecord(exclude_after=3, exclude_s=100.0)
    assert any(record.fail("a", 0.75 * number) for number in range(8))


def test_a_step_takes_the_time_between_its_begin_and_its_end() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 5.0, 6.0, 6.0, 20.0])
    reporter = HeartbeatReporter(clock=lambda: next(times))
    assert reporter.heartbeat(3) == Heartbeat(rank=3, progress=0, phase="start")
    for _ in range(3):
        reporter.begin_step()
        reporter.end_step()
    reporter.local_s = 0.25
    # What lies between two steps is not theirs, and the median shrugs one slow step off.
    said = {"rank": 3, "step_time_s": 1.0, "local_s": 0.25}
    said |= {"num_steps": 3}
    assert reporter.heartbeat(3) == Heartbeat(progress=6, phase="train", **said)
    reporter.enter("validation")
    reporter.advance()
    assert reporter.heartbeat(3) == Heartbeat(progress=8, phase="validation", **said)


def test_a_step_after_a_phase_is_watched_as_training_but_the_first_of_all_as_the_start() -> None:
    reporter = HeartbeatReporter()
    for before, within in (("start", "start"), ("checkpoint", "train"), ("data_wait", "train")):
        reporter.enter(before)
        reporter.begin_step()
        assert reporter.heartbeat(0).phase == within
        reporter.end_step()
