"""Goodput arithmetic: where the groups' time went, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.elastic.goodput import CAUSES, GoodputMeter, steps_undurable


def test_time_counts_once_it_is_committed() -> None:
    meter = GoodputMeter()
    for group in (0, 1):
        meter.start(group, 0)
        meter.train(group, 10)
    meter.commit(40)
    goodput = meter.read(40)
    assert (goodput.useful_s, goodput.lost_s["start"]) == (60, 20)
    assert goodput.share == 0.75


def test_the_work_of_a_lost_group_is_redone_and_its_absence_is_recovery() -> None:
    meter = GoodputMeter()
    meter.start(0, 0)
    meter.train(0, 0)
    meter.commit(10)
    meter.lose(0, 13)
    meter.start(0, 18)
    meter.train(0, 20)
    meter.commit(30)
    goodput = meter.read(30)
    assert goodput.useful_s == 20
    assert dict(goodput.lost_s) == {"redo": 3, "recovery": 5, "start": 2}


def test_a_hang_is_told_from_work_that_was_lost() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.lose(0, 100, hung_s=90)
    assert dict(meter.read(100).lost_s) == {"hang": 90, "redo": 10, "recovery": 0}


def test_saving_and_validating_are_no_training() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.spend(0, "checkpoint", 2)
    meter.spend(0, "validation", 3)
    meter.commit(20)
    goodput = meter.read(20)
    assert (goodput.useful_s, dict(goodput.lost_s)) == (15, {"checkpoint": 2, "validation": 3})


def test_a_group_that_left_costs_nothing_more() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.commit(5)
    meter.leave(0, 5)
    assert meter.read(50).share == 1.0
    assert meter.num_training == 0


def test_training_again_does_not_start_the_clock_again() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.train(0, 6)
    meter.commit(10)
    assert meter.read(10).useful_s == 10


def test_metrics_name_every_cause() -> None:
    meter = GoodputMeter()
    assert meter.read(0).share == 1.0
    names = meter.read(0).metrics()
    assert set(names) == {"goodput/share"} | {f"goodput/lost_s/{cause}" for cause in CAUSES}


def test_commit_intervals_have_a_median() -> None:
    meter = GoodputMeter()
    assert meter.commit_interval_s == 0.0
    for now in (0, 1, 2, 9):
        meter.commit(now)
    assert meter.commit_interval_s == 1


def test_steps_since_the_newest_durable_checkpoint_are_at_risk() -> None:
    assert steps_undurable(120, 100) == 20
    assert steps_undurable(0, 0) == 0


ACTIONS = st.sampled_from(["start", "train", "lose", "commit", "spend"])
HAPPENINGS = st.lists(
    st.tuples(ACTIONS, st.integers(0, 2), st.integers(0, 20), st.integers(0, 30)), max_size=30
)


@given(HAPPENINGS)
def test_every_second_of_every_group_is_accounted_for(
    happenings: list[tuple[str, int, int, int]],
) -> None:
    meter, now, began = GoodputMeter(), 0, {}
    for action, group, wait_s, amount_s in happenings:
        now += wait_s
        if action == "commit":
            meter.commit(now)
        elif action == "spend":
            meter.spend(group, "checkpoint", amount_s)
        else:
            getattr(meter, action)(group, now)
            began.setdefault(group, now)
    goodput = meter.read(now)
    total_s = goodput.useful_s + sum(goodput.lost_s.values())
    assert total_s == pytest.approx(sum(now - since for since in began.values()))
    assert goodput.useful_s >= -1e-9
    assert all(each >= -1e-9 for each in goodput.lost_s.values())
