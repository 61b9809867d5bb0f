"""Goodput arithmetic, of groups and of the job domain: where the time went."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import checkpoint, progress, workers_started
from trainer.driver.job_runner import JobGoodput
from trainer.elastic.coordinator.goodput import CAUSES, GoodputMeter
from trainer.protocol.events import Event, Metrics, WorkersStarted
from trainer.protocol.outbox import EventWriter


def lost(meter: GoodputMeter, now: float) -> dict[str, float]:
    """Group-seconds lost until now, by the causes that cost any."""
    return {cause: each_s for cause, each_s in meter.read(now)[1].items() if each_s}


def test_time_counts_once_it_is_committed() -> None:
    meter = GoodputMeter()
    for group in (0, 1):
        meter.start(group, 0)
        meter.train(group, 10)
        meter.train(group, 16)  # Training again does not start the clock again.
    meter.commit({0, 1, 2}, 40)
    assert meter.read(40)[0] == 60
    assert lost(meter, 40) == {"start": 20}
    values = meter.metrics(40, step=7, durable_step=4)
    assert {name: each for name, each in values.items() if each} == {
        "goodput/share": 0.75,
        "goodput/lost_s/start": 20,
        "risk/steps_undurable": 3,
        "elastic/groups": 2,
    }
    fresh = GoodputMeter().metrics(0, 0, 0)
    assert fresh["goodput/share"] == 1
    assert {f"goodput/lost_s/{cause}" for cause in CAUSES} <= fresh.keys()


def test_the_work_of_a_lost_group_is_redone_and_its_absence_is_recovery() -> None:
    meter = GoodputMeter()
    meter.start(0, 0)
    meter.train(0, 0)
    meter.commit({0, 1, 2}, 10)
    meter.lose(0, 13)
    meter.start(0, 18)
    meter.train(0, 20)
    meter.commit({0, 1, 2}, 30)
    assert meter.read(30)[0] == 20
    assert lost(meter, 30) == {"redo": 3, "recovery": 7}
    assert meter.losses_per_s(30) == 1 / 30
    meter.lose(0, 30)
    meter.start(0, 40)
    meter.lose(0, 40)  # before it trained again
    assert meter.losses_per_s(40) == 2 / 40


def test_what_is_no_training_is_told_from_work_that_counts_or_is_lost() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.spend(0, "checkpoint", 2)
    meter.spend(0, "validation", 3)
    meter.commit({0, 1, 2}, 20)
    assert meter.read(20)[0] == 15
    meter.spend(0, "hang", 90)
    meter.lose(0, 120)
    assert lost(meter, 120) == {"checkpoint": 2, "validation": 3, "hang": 90, "redo": 10}


def test_only_groups_that_trained_what_is_committed_gain_by_it_and_others_have_waited() -> None:
    meter = GoodputMeter()
    for group in (0, 1):
        meter.train(group, 0)
    meter.spend(1, "checkpoint", 2)
    meter.commit({0}, 10)
    assert meter.read(10)[0] == 10
    assert lost(meter, 10) == {"checkpoint": 2, "recovery": 8}
    assert meter.num_training == 2


def test_a_group_that_left_costs_nothing_more() -> None:
    meter = GoodputMeter()
    meter.train(0, 0)
    meter.commit({0, 1, 2}, 5)
    meter.leave(0, 5)
    assert meter.read(50)[0] == 5
    assert not lost(meter, 50)
    assert meter.num_training == 0


def test_no_time_is_lost_of_lost_groups_that_the_job_does_not_want_back() -> None:
    meter = GoodputMeter()
    meter.want([0, 1], 0, now=0)
    for group in (0, 1):
        meter.train(group, 10)
    meter.commit({0, 1, 2}, 20)
    meter.lose(1, 20)
    meter.want([0], 1, now=25)
    meter.want([0, 1, 2], 0, now=30)  # it starts again, and a spare replaces one that is drained
    assert lost(meter, 40) == {"start": 30, "recovery": 20}
    meter.want([0, 2], 0, now=40)  # as after a resize
    assert lost(meter, 50) == {"start": 40, "recovery": 20}
    meter.want([2], 0, now=50)
    assert meter.num_training == 1, "who is asked to leave trains until then"


ACTIONS = st.sampled_from(["start", "train", "lose", "demote", "commit", "spend"])
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
            meter.commit({group}, now - amount_s)
        elif action == "spend":
            meter.spend(group, "checkpoint", amount_s)
        else:
            getattr(meter, action)(group, now)
            began.setdefault(group, now)
    useful_s, lost_s = meter.read(now)
    spans_s = [useful_s, *lost_s.values()]
    assert sum(spans_s) == pytest.approx(sum(now - since for since in began.values()))
    assert min(spans_s) >= -1e-9


def started(time: float, resumed_step: int = 0) -> WorkersStarted:
    return workers_started().model_copy(update={"time": time, "resumed_step": resumed_step})


@pytest.mark.parametrize("ahead_s", [-40.0, 40.0])
def test_a_host_whose_clock_is_off_makes_no_time_negative(ahead_s: float, tmp_path: Path) -> None:
    told: list[Metrics] = []
    goodput, stream = JobGoodput(told.append, lambda _: 0.0), tmp_path / "workers-0.jsonl"
    goodput.begin(stream, now=100.0)
    for event in (started(110.0 + ahead_s), checkpoint(20, time=120.0 + ahead_s)):
        EventWriter(stream).write(event)
    for now in (130.0, 140.0):
        goodput.end(now, is_lost=False)
    shares, *lost_s = zip(*(each.values.values() for each in told), strict=True)
    assert max(shares) <= 1 and min(map(min, lost_s)) >= 0


def test_time_since_the_newest_checkpoint_is_lost_with_the_workers(tmp_path: Path) -> None:
    told: list[Event] = []
    goodput = JobGoodput(told.append, lambda _: 0.0)
    first, second = tmp_path / "workers-0.jsonl", tmp_path / "workers-1.jsonl"
    goodput.begin(first, now=0.0)
    writer = EventWriter(first)
    for event in (
        started(10.0),
        checkpoint(20, time=30.0, duration_s=0.0),
        progress(40, time=50.0),
    ):
        writer.write(event)
    goodput.poll(50.0)
    assert isinstance(told[-1], Metrics)
    assert told[-1].values["risk/steps_undurable"] == 20.0
    goodput.end(50.0, is_lost=True)

    goodput.begin(second, now=60.0)
    EventWriter(second).write(started(70.0, resumed_step=20))
    EventWriter(second).write(checkpoint(40, time=90.0, duration_s=0.0))
    goodput.end(90.0, is_lost=False)
    values = told[-1].values
    assert values["goodput/lost_s/start"] == pytest.approx(10.0)
    assert values["goodput/lost_s/redo"] == pytest.approx(20.0)
    assert values["goodput/lost_s/recovery"] == pytest.approx(20.0)
    assert values["goodput/share"] == pytest.approx(40.0 / 90.0)
    assert values["risk/steps_undurable"] == 0.0
    assert told[-1].step == 40

    goodput.begin(tmp_path / "workers-2.jsonl", now=95.0)
    goodput.end(95.0, is_lost=True)
    assert told[-1].values["goodput/lost_s/start"] == pytest.approx(15.0)
    assert told[-1].values["goodput/lost_s/redo"] == pytest.approx(20.0)


def test_the_job_domain_tells_stalls_of_saves_and_hangs_from_work(tmp_path: Path) -> None:
    told: list[Metrics] = []
    goodput, stream = JobGoodput(told.append, lambda _: 0.0), tmp_path / "workers-0.jsonl"
    goodput.begin(stream, now=0.0)
    stall = Metrics(time=31.0, step=20, values={"checkpoint/stall_s": 2.0})
    for event in (
        started(10.0),
        checkpoint(20, time=30.0, duration_s=0.0),
        stall,
        progress(40, time=50.0),
    ):
        EventWriter(stream).write(event)
    goodput.end(140.0, is_lost=True, is_hung=True)
    lost_s = {name: each_s for name, each_s in told[-1].values.items() if "lost_s" in name}
    assert {name.rpartition("/")[2]: each_s for name, each_s in lost_s.items() if each_s} == {
        "start": 10.0,
        "checkpoint": 2.0,
        "hang": 90.0,
        "redo": 18.0,
    }


def test_what_is_trained_beside_a_save_is_not_in_that_checkpoint(tmp_path: Path) -> None:
    told: list[Metrics] = []
    goodput, stream = JobGoodput(told.append, lambda _: 0.0), tmp_path / "workers-0.jsonl"
    goodput.begin(stream, now=0.0)
    # The second one began before the first was there.
    saves = (checkpoint(20, time=50.0, duration_s=20.0), checkpoint(20, time=52.0, duration_s=30.0))
    for event in (started(10.0), *saves):
        EventWriter(stream).write(event)
    goodput.end(55.0, is_lost=True)
    assert told[-1].values["goodput/share"] == pytest.approx(20.0 / 55.0)
    assert told[-1].values["goodput/lost_s/redo"] == pytest.approx(25.0)
