"""What the coordinator decides, case by case; `test_membership_machine` mixes the cases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from tests.unit.trainer.elastic.coordinator import elastic_world
from tests.unit.trainer.elastic.coordinator.elastic_world import (
    COPIED_BYTES,
    EPOCHS,
    NUM_RANKS,
    ROWS,
    Checkpoint,
    World,
)
from tests.unit.trainer.spec.test_spec import changed
from trainer.checkpoint.manager import SaveStanding, TrainState
from trainer.coordination.client import LOCATE_S, finding_s
from trainer.coordination.detection import RankId
from trainer.coordination.messages import (
    Arrive,
    EpochRows,
    Heartbeat,
    Hello,
    LeaderProgress,
    Ledger,
    RankProcess,
    Report,
    RoundResult,
    Welcome,
)
from trainer.coordination.sync_tuner import Observation, SyncTuner
from trainer.data.position import DataPosition
from trainer.elastic.coordinator.goodput import RunMetrics
from trainer.elastic.coordinator.groups import (
    Group,
    choose_donor,
    choose_start,
    copies_alive,
)
from trainer.elastic.coordinator.interface import MembershipPolicy
from trainer.elastic.coordinator.rounds import OpenRound
from trainer.elastic.group_session import GroupSession, Interval
from trainer.errors import TooManyBadRowsError
from trainer.failures import EndReason
from trainer.spec.parallelism import SyncSpec
from trainer.training.metrics import QuarantineReporter


def running(num_groups: int = 3, commit: int = 2, **policy) -> World:
    world = World(num_groups, **policy)
    world.tend()
    world.run_to_commit(commit)
    return world


def standings(world: World) -> dict[int, str]:
    return {group.group: group.standing for group in world.status.groups}


def beat(
    world: World, group: int, rank: int, progress: int, phase: str = "train", **times: Any
) -> None:
    speaker = RankId(group, world.incarnations[group], 0)
    values = {"progress": progress, "phase": phase, "step_time_s": 0.1} | times
    heartbeat = Heartbeat(rank=rank, **values)
    world.act(world.membership.on_heartbeats(speaker, [heartbeat], world.now))


def begun_alone(**policy) -> World:
    """A job of which only the first of three groups has come."""
    world = World(3, **policy)
    world.start_group(0)
    world.exchange(20)
    return world


def goodput(world: World) -> tuple[float, float]:
    """Group-seconds until now that count, and those lost to recovery."""
    useful_s, lost_s = world.membership._metrics.goodput.read(world.now)
    return useful_s, lost_s["recovery"]


def current(world: World) -> int:
    """How many groups train, as the metrics say."""
    return world.membership._metrics.goodput.num_training


def listening(world: World, group: int) -> bool:
    """Whether a group copies what it is to train."""
    return standings(world).get(group) == "listening" and bool(world.groups[group].copy)


def has_ready(world: World, group: int, kind: str) -> bool:
    """Whether a group is about to send this message."""
    outbox = world.groups[group].outbox
    return bool(outbox) and outbox[0].body.kind == kind


def tick(world: World, seconds: float) -> None:
    """Time passes without heartbeats."""
    world.now += seconds
    world.act(world.membership.tick(world.now))


def test_the_first_round_waits_for_every_group():
    world = World(num_groups=3)
    world.start_group(0)
    world.start_group(1)
    world.exchange(20)
    world.wait(1)
    assert world.leader is None
    world.start_group(2)
    world.run_to_commit(1)
    assert set(standings(world).values()) == {"current"}


def test_the_first_round_does_not_wait_for_ever():
    world = begun_alone(start_grace_s=30.0)
    for _ in range(60):
        world.wait(0.5)
    world.run_to_commit(1)
    assert standings(world) == {0: "current"}
    world.kill(0)
    world.start_group(0)
    world.exchange(20)
    assert world.leader is None, "to start over, others are waited for again"


def test_fewer_groups_are_enough_once_no_more_are_expected():
    world = begun_alone()
    world.want(0)
    world.run_to_commit(1)
    assert standings(world) == {0: "current"}


def test_below_min_groups_nothing_is_trained_until_enough_have_copied_the_state():
    world = running(3, min_groups=2)
    world.kill(1)
    world.kill(2)
    for _ in range(5):  # what was leased is trained
        world.wait(2)
        world.exchange(50)
    rows, commit = world.ledger.rows_done, world.ledger.commit
    useful_s, recovery_s = goodput(world)
    for _ in range(3):
        world.wait(2)
        world.exchange(50)
    assert world.ledger.rows_done == rows < ROWS * EPOCHS
    assert world.ledger.commit <= commit + 3, "a round a second at most, for who copies"
    assert goodput(world) == (useful_s, recovery_s + 3 * 6), "the group that waits trains nothing"
    world.start_group(1)
    for _ in range(10):
        world.wait(2)
        world.exchange(50)
        world.copy_all()
    assert standings(world) == {0: "current", 1: "current"}
    assert world.ledger.rows_done > rows
    notes = [event.message for event in world.events if event.kind == "note"]
    assert [note.split(":")[0] for note in notes] == [
        "training waits for more",
        "training goes on",
    ]


def test_a_run_that_loses_nothing_has_nothing_to_recover_from():
    world = running(3)
    world.run_to_end()
    assert goodput(world)[1] == 0


def test_a_job_does_not_begin_below_min_groups():
    world = begun_alone(start_grace_s=1.0, min_groups=2)
    for _ in range(10):
        world.wait(2)
        world.exchange(50)
    assert standings(world) == {0: "current"}
    assert world.ledger.rows_done == 0
    world.start_group(1)
    for _ in range(10):
        world.wait(2)
        world.exchange(50)
        world.copy_all()
    assert world.ledger.rows_done > 0


def with_rows_done(num_rows: int) -> Checkpoint:
    """The checkpoint of commit 7, by which so many rows were trained."""
    rows = (EpochRows(epoch=0, done=((0, num_rows),)),)
    return Checkpoint(Ledger(commit=7, round=9, open_epochs=rows, rows_trained=num_rows), {})


def test_a_group_that_starts_from_an_older_checkpoint_copies():
    world = World(num_groups=3)
    world.start_group(0)
    world.checkpoint = with_rows_done(20)
    world.start_group(1)
    world.start_group(2)
    world.run_to_commit(8)
    assert standings(world) == {0: "listening", 1: "current", 2: "current"}
    assert world.ledger.rows_trained == 20


def test_a_ledger_of_other_data_fails_the_run():
    world = World(num_groups=1)
    world.checkpoint = with_rows_done(ROWS + 1)
    world.start_group(0)
    world.exchange(20)
    assert world.status.failure is not None
    assert world.status.failure.reason == "data_error"
    assert "the data has changed" in world.status.failure.message


def test_groups_weigh_as_many_rows_as_they_trained():
    world = running(commit=1)
    world.run_until(lambda: any(group.num_rows for group in world.lives()))
    world.run_to_commit(2)
    (opened,) = (each for each in world.rounds.values() if each.commit == 2)
    assert opened.weights == (4, 4, 4)


def test_a_refused_round_is_tried_again_with_the_same_rows():
    world = running()
    trained = world.ledger.rows_trained
    world.groups[1].will_refuse = True
    world.run_to_commit(3)
    assert world.ledger.rows_trained == trained + 12
    (recovered,) = world.told("recovered")
    assert (recovered.num_tries, recovered.syncs_lost) == (2, 0)
    assert recovered.cause.startswith("group 1 refused")
    refused, again = [each.generation for each in world.rounds.values() if each.commit == 3]
    assert again > refused, "what failed is formed anew"


def test_a_group_that_refuses_again_and_again_is_lost():
    world = running()

    def refuse() -> bool:
        world.groups[1].will_refuse = True
        # The last group hears of a round when it has failed, and gives up.
        newest = [body.kind for _, body in world.groups[2].inbox][-1:]
        world.hung = {2} if newest == ["round"] else set()
        return bool(world.told("group_lost"))

    world.run_until(refuse)
    (lost,) = world.told("group_lost")
    assert (lost.group, lost.reason) == (1, "exchange")
    world.hung.clear()
    world.run_to_commit(3)


def test_faults_with_commits_between_them_lose_no_group(monkeypatch):
    monkeypatch.setattr(elastic_world, "ROWS", 400)
    world = joining()
    for _ in range(6):
        world.groups[0].will_refuse = True
        world.run_until(lambda: not world.groups[0].will_refuse)
        world.run_to_commit(world.ledger.commit + 2)  # without the listener, and with it
    assert standings(world) == {0: "current", 1: "current", 2: "listening"}
    assert [lost.reason for lost in world.told("group_lost")] == ["connection"]


@pytest.mark.parametrize("cut_off", [0, 2])
def test_the_group_that_most_others_cannot_reach_is_lost_whoever_complains_first(cut_off):
    world = running()
    world.cut_off.add(cut_off)
    world.run_until(lambda: world.told("group_lost"))
    (lost,) = world.told("group_lost")
    assert (lost.group, lost.reason) == (cut_off, "exchange")
    assert "2 other groups cannot reach it" in lost.message
    world.run_to_commit(4)
    assert standings(world).keys() == {0, 1, 2} - {cut_off}


def test_of_two_groups_that_cannot_reach_each_other_the_newcomer_is_lost():
    world = running(num_groups=2)
    world.kill(0)
    world.now += 1
    world.start_group(0)
    world.run_until(lambda: listening(world, 0))
    world.copy_all()
    world.run_until(lambda: standings(world)[0] == "current")
    world.cut_off.add(1)
    world.run_until(lambda: len(world.told("group_lost")) == 2)
    assert world.told("group_lost")[1].group == 0


def joining(**policy) -> World:
    """A job of three groups, of which the last copies."""
    world = running(**policy)
    world.kill(2)
    world.start_group(2)
    world.run_until(lambda: listening(world, 2))
    return world


def test_a_listener_that_refuses_is_not_waited_for_and_the_next_round_is_without_it():
    world = joining()
    world.groups[2].will_refuse = True
    world.run_until(lambda: not world.groups[2].will_refuse)
    refused = world.groups[2].round
    world.hung |= {0, 1}  # their exchange waits for it
    world.exchange(20)
    for group in (0, 1):
        _, told = world.groups[group].inbox[-1]
        assert isinstance(told, RoundResult)
        assert (told.round, told.committed) == (refused.round, False)
    world.hung.clear()
    world.run_to_commit(refused.commit)
    assert [each.group for each in world.groups[0].round.members] == [0, 1]
    assert standings(world)[2] == "listening"
    world.run_to_end()
    world.check_rows()


def test_a_listener_that_does_not_vote_delays_a_commit_by_a_second():
    world = joining(heartbeat_timeout_s=60.0)
    world.run_until(lambda: has_ready(world, 2, "vote"))
    commit = world.ledger.commit
    world.hung.add(2)
    world.exchange(20)
    assert world.ledger.commit == commit
    tick(world, 1.1)
    assert world.ledger.commit == commit + 1
    world.hung.clear()
    world.copy_all()
    world.run_until(lambda: world.groups[2].copy is None)
    assert standings(world)[2] == "listening", "it has missed a commit"
    world.run_to_end()
    world.check_rows()


def with_late_listener(num_missed: int = 1) -> World:
    """A job of three groups, of which the last copies and votes late: all have committed."""
    world = joining(heartbeat_timeout_s=60.0)
    for _ in range(num_missed):
        world.run_until(lambda: has_ready(world, 2, "vote"))
        world.hung = {2}
        world.exchange(20)
        tick(world, 1.1)
        world.hung = {0, 1}
        world.run_until(lambda: not world.groups[2].outbox or 2 not in standings(world))
        world.hung.clear()
    return world


def test_a_round_with_a_group_that_missed_a_commit_forms_its_process_groups_anew():
    world = with_late_listener()
    missed = world.groups[2].round
    while world.groups[2].inbox:
        world.groups[2].hear()
    world.deliver(world.groups[2])  # it arrives first
    world.run_until(lambda: max(world.rounds) > missed.round)
    opened = world.rounds[max(world.rounds)]
    assert opened.members == missed.members
    assert opened.generation > missed.generation, "it has dropped those that it had"


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_listener_that_missed_a_commit_copies_anew_once(is_repeated: bool):
    world = with_late_listener()
    listener = world.groups[2]
    if is_repeated:
        listener.connect()  # the answer was lost
    world.run_until(lambda: listener.copy is None)
    world.run_until(lambda: listener.copy)
    anew = listener.copy
    world.run_to_commit(world.ledger.commit + 2)
    assert listener.copy is anew
    world.run_to_end()
    world.check_rows()


def test_a_listener_that_misses_three_commits_in_a_row_is_lost():
    assert standings(with_late_listener(2))[2] == "listening"
    world = with_late_listener(3)
    lost = world.told("group_lost")[-1]
    assert (lost.group, lost.reason) == (2, "exchange")
    assert 2 not in standings(world)


def test_rounds_go_on_without_a_listener_that_makes_them_fail_and_it_is_lost_in_the_end():
    world = joining()
    world.cut_off.add(2)
    world.run_to_commit(world.ledger.commit + 1)
    world.run_until(lambda: 2 not in standings(world))
    lost = world.told("group_lost")[-1]
    assert (lost.group, lost.reason) == (2, "exchange")
    assert "while it copied" in lost.message
    assert standings(world) == {0: "current", 1: "current"}


def test_a_lost_group_ends_the_round_and_others_train_its_rows():
    world = running()
    world.run_until(lambda: world.groups[0].round is not None)
    world.kill(2)
    (lost,) = world.told("group_lost")
    assert (lost.group, lost.reason, lost.rows_returned) == (2, "connection", 8)
    world.now += 1.0
    world.run_to_commit(3)
    (recovered,) = world.told("recovered")
    assert recovered.syncs_lost == 1
    assert recovered.pause_s == pytest.approx(1.0)
    world.run_to_end()
    world.check_rows()


def test_silence_loses_a_group_unless_the_coordinator_slept():
    world = running()
    world.hung.add(1)
    for _ in range(3):
        world.wait(0.3)
    assert 1 in standings(world)
    world.wait(0.2)
    assert [lost.reason for lost in world.told("group_lost")] == ["silent"]
    world = running()
    world.wait(0.1)
    tick(world, 3600)
    assert not world.told("group_lost") and not world.told("note")


def test_a_rank_that_gets_nothing_done_loses_its_group_although_it_beats():
    world = running(min_hang_s=20.0, hang_factor=2.0)
    world.run_until(lambda: has_ready(world, 0, "arrive"))
    world.hung.add(0)
    world.exchange(20)
    for _ in range(60):
        for group in standings(world):
            for rank in (0, 1):
                beat(world, group, rank, progress=1, is_waiting=(group, rank) == (0, 0))
        tick(world, 0.4)
    (found,) = world.told("hang_found")
    assert (found.group, found.rank) == (0, 1), "the other waits for it"
    assert found.idle_s == pytest.approx(20, abs=1)
    assert standings(world).keys() == {1, 2}, "who waits for a hung group does not hang"
    assert world.status.departures[-1].host == found.host


@pytest.mark.parametrize("num_steps", [7, 8])
def test_a_rank_and_its_host_are_to_blame_for_a_hang_only_if_it_got_less_far_than_the_others(
    num_steps: int,
):
    world = running(spreads=True, min_hang_s=20.0)
    world.run_until(lambda: has_ready(world, 0, "arrive"))
    world.hung.add(0)
    world.exchange(20)
    while not world.told("hang_found"):
        for group in standings(world):
            beat(world, group, 0, progress=1, num_steps=8)
            beat(world, group, 1, progress=1, num_steps=num_steps)
        tick(world, 0.4)
    departed = world.status.departures[-1]
    assert departed.host == ("host-0-1" if num_steps < 8 else "")
    named = "rank 1 on host-0-1 got" if num_steps < 8 else "rank 0 or 1 on host-0-0 or host-0-1 got"
    assert departed.message.startswith(named)
    assert departed.message.endswith("one of them hangs") == (num_steps == 8)


def test_a_rank_may_stand_still_for_longer_outside_of_training():
    world = running(num_groups=2, min_hang_s=20.0, heartbeat_timeout_s=60.0)
    world.run_until(lambda: has_ready(world, 0, "arrive"))
    world.hung.add(0)
    world.exchange(20)
    while not world.told("hang_found"):
        for rank in (0, 1):
            beat(world, 1, rank, progress=1)
            beat(world, 0, rank, progress=1, phase="validation")
        tick(world, 25.0)
    (found,) = world.told("hang_found")
    assert (found.group, found.phase, found.idle_s) == (0, "validation", 225.0)


def beat_all(world: World, *but: int, progress: int | None = None) -> None:
    """All ranks beat, and get on unless told how far they are, but those of some groups."""
    for group in standings(world).keys() - set(but):
        for rank in range(NUM_RANKS):
            beat(world, group, rank, int(world.now * 10) if progress is None else progress)


def test_a_coordinator_that_hears_nobody_gives_nobody_up():
    world = running()
    for group in range(3):  # the network of its host fails between their heartbeats
        beat_all(world, *({0, 1, 2} - {group}))
        tick(world, 0.1)
    for _ in range(100):
        tick(world, 0.2)
    assert not world.told("group_lost")
    held = [note.message for note in world.told("note") if note.level == "warning"]
    assert "groups 0 (silent)" in held[0] and "network of the coordinator's host" in held[0]
    for group in range(3):  # when it is mended, not all are heard at once
        beat_all(world, *range(group + 1, 3))
        tick(world, 0.2)
    assert any("are fine" in note.message for note in world.told("note"))
    world.run_to_commit(3)
    assert not world.told("group_lost")


def test_all_are_given_up_when_the_coordinator_has_heard_nobody_for_as_long_as_a_hang_takes():
    world = running(min_hang_s=60.0)
    beat_all(world)
    for _ in range(300):  # a suspicion begins with the first time-out
        tick(world, 0.2)
    assert not world.told("group_lost")
    for _ in range(10):
        tick(world, 0.2)
    assert [(lost.group, lost.reason) for lost in world.told("group_lost")] == [
        (group, "silent") for group in range(3)
    ]


def test_two_of_three_that_stay_silent_are_lost_but_not_at_once():
    world = running()
    for _ in range(8):
        beat_all(world, 1, 2)
        tick(world, 0.2)
    assert standings(world).keys() == {0, 1, 2}
    for _ in range(11):
        beat_all(world, 1, 2)
        tick(world, 0.2)
    assert [(lost.group, lost.reason) for lost in world.told("group_lost")] == [
        (1, "silent"),
        (2, "silent"),
    ]
    world.run_to_commit(3)


def test_the_last_copy_is_not_given_up_for_its_silence_but_if_the_driver_saw_it_end():
    world = running(num_groups=2)
    world.kill(1)
    for _ in range(100):
        tick(world, 0.2)
    assert standings(world) == {0: "current"}
    world.act(world.membership.drop(0, 0, "node_lost", world.now))
    assert not standings(world)


def test_all_that_wait_for_storage_are_given_up_one_wait_later_and_only_if_it_stays_away():
    world = running(min_hang_s=20.0)
    world.run_until(lambda: has_ready(world, 0, "arrive"))
    for _ in range(60):
        beat_all(world, progress=1)
        tick(world, 0.4)
    assert not world.told("group_lost")
    beat_all(world, progress=2)
    tick(world, 0.4)
    for _ in range(130):
        beat_all(world, progress=2)
        tick(world, 0.4)
    assert {lost.reason for lost in world.told("group_lost")} == {"hang"}


def test_the_time_for_votes_begins_when_a_group_has_averaged_all_its_shards():
    world = running(heartbeat_timeout_s=60.0)
    world.run_until(lambda: all(has_ready(world, group, "vote") for group in range(3)))
    tick(world, 20.0)
    assert not world.told("hang_found") and not world.told("note")
    for group in (0, 1):
        world.deliver(world.groups[group])
    beat(world, 2, 0, progress=1, is_waiting=True)  # has voted in its group
    beat(world, 2, 1, progress=1)
    tick(world, 4.9)
    tick(world, 3600)  # the coordinator slept
    assert not world.told("hang_found")
    beat(world, 2, 1, progress=2)  # which is no vote
    tick(world, 0.2)
    (found,) = world.told("hang_found")
    assert (found.group, found.rank, found.phase) == (2, 1, "sync")
    world.run_to_commit(3)


def test_votes_that_miss_on_most_copies_are_waited_for_once_more():
    world = running(heartbeat_timeout_s=60.0)
    world.run_until(lambda: all(has_ready(world, group, "vote") for group in range(3)))
    world.deliver(world.groups[0])
    tick(world, 5.1)
    assert not world.told("hang_found")
    for group in world.lives():
        while group.outbox:
            world.deliver(group)
    assert world.ledger.commit == 3


def test_a_connection_that_breaks_after_silence_is_no_end_of_its_rank():
    world = running()
    rank = RankId(1, 0, 0)
    world.now += 0.8
    assert world.membership.on_disconnect(rank, world.now, is_broken=True) == []
    beat_all(world, 1)  # where nobody was heard until now, its silence counts from here
    assert world.membership.on_disconnect(rank, world.now, is_broken=True) == []
    beat_all(world)
    world.act(world.membership.on_disconnect(rank, world.now, is_broken=True))
    assert [lost.reason for lost in world.told("group_lost")] == ["connection"]


def test_a_group_that_connects_again_trains_on():
    world = running(commit=3)
    world.now += 5
    world.groups[1].connect()
    world.run_to_commit(5)
    assert set(standings(world).values()) == {"current"} and current(world) == 3
    assert not world.told("group_lost") and not world.told("recovered")


def test_a_newer_life_fences_the_older_one():
    world = running()
    old = world.groups.pop(1)
    world.incarnations[1] = 1
    world.start_group(1)
    world.exchange(20)
    assert [lost.reason for lost in world.told("group_lost")] == ["replaced"]
    world.groups[1] = old
    old.connect()
    world.exchange(2)
    assert old.is_fenced
    world.act(world.membership.drop(1, 0, "workers_lost", world.now))
    assert 1 in standings(world), "it is the older one that the driver lost"


def test_a_listener_counts_after_the_commit_that_follows_its_copy():
    world = running(num_groups=2)
    world.kill(1)
    world.run_to_commit(3)
    world.start_group(1)
    world.run_until(lambda: listening(world, 1))
    world.copy_all()
    world.run_until(lambda: standings(world)[1] == "current")
    joined = world.told("group_joined")
    assert [each.how for each in joined] == ["start", "start", "peer_copy"]
    assert [each.copied_bytes for each in joined] == [0, 0, COPIED_BYTES]
    assert [each.donor for each in joined] == [None, None, 0]
    donors = [each.donor for told in world.told("membership_changed") for each in told.groups]
    assert donors.count(0) == 1, "it is told while the copy is made"


def test_a_listener_without_a_donor_ends():
    world = running(num_groups=2)
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: listening(world, 1))
    world.kill(0)
    world.exchange(20)
    reasons = [lost.reason for lost in world.told("group_lost")]
    assert reasons == ["connection", "connection", "no_donor"]
    world.run_to_end()
    world.check_rows()


def test_whose_tables_are_sharded_otherwise_is_lost_before_anything_is_averaged_with_it():
    world = World(3)
    world.tend()
    for commit in (2, 4):  # beside others that begin, and beside such that train
        odd = world.groups[0]
        odd.hello = odd.hello.model_copy(update={"plan": "another"})
        odd.connect()
        world.run_to_commit(commit)
        assert odd.is_fenced and odd.round is None
        world.kill(0)
        world.start_group(0)
    lost = world.told("group_lost")
    assert [(each.group, each.reason) for each in lost] == [(0, "other_plan")] * 2
    world.run_to_end()
    world.check_rows()


def test_a_group_that_is_asked_to_leaves_at_the_next_commit():
    world = running()
    world.want(0, 2, leaving={1: "resize"})
    began_s = goodput(world)[0]
    world.now += 7
    world.run_until(lambda: world.groups[1].is_through)
    assert goodput(world)[0] == began_s + 3 * 7, "what it trained last is in the commit too"
    (left,) = world.told("group_left")
    assert (left.group, left.cause) == (1, "resize")
    assert not world.told("group_lost")
    assert standings(world).keys() == {0, 2}
    assert not world.membership._rounds._book.held(1), "others train what it held"
    for num_groups in (1, 2):
        last = running(num_groups)
        last.want(leaving=dict.fromkeys(range(num_groups), "drain"))
        last.run_to_commit(5)
        stay = dict.fromkeys(range(num_groups), "current")
        assert standings(last) == stay, "the last groups do not leave"


def with_spare(**policy: Any) -> World:
    """Two groups that train and a third that waits."""
    world = World(2, **policy)
    world.start_group(2, "spare")
    world.exchange(20)
    assert world.leader is None
    world.tend()
    world.run_to_commit(2)
    assert standings(world) == {0: "current", 1: "current", 2: "spare"}
    return world


def test_a_spare_is_in_no_round_until_it_is_promoted_and_then_copies_and_trains():
    world = with_spare()
    world.wait(300)
    world.run_to_commit(4)
    assert {m.group for each in world.rounds.values() for m in each.members} == {0, 1}
    members = world.told("membership_changed")[-1]
    assert [each.standing for each in members.groups] == ["current", "current", "spare"]
    assert members.copies_alive == 2
    values = world.membership._metrics.goodput.metrics(world.now, 0, 0)
    assert values["elastic/groups"] == 2
    assert values["goodput/lost_s/start"] == 0, "the job does not wait for it"
    world.kill(1)
    world.want(0, 2)
    world.run_until(lambda: listening(world, 2))
    world.copy_all()
    world.run_until(lambda: standings(world) == {0: "current", 2: "current"})
    (joined,) = [each for each in world.told("group_joined") if each.group == 2]
    assert (joined.how, joined.copied_bytes) == ("peer_copy", COPIED_BYTES)
    assert joined.duration_s < 300, "it has not copied before"
    lost_s = world.membership._metrics.goodput.read(world.now + 300)[1]
    assert lost_s["recovery"] < 300, "nobody waits for the lost group any more"
    world.run_to_end()
    world.check_rows()


def test_spares_end_well_when_the_training_does_or_when_they_are_not_wanted():
    world = with_spare()
    world.start_group(3, "spare")
    world.exchange(1)
    assert isinstance(world.groups[3].inbox[-1][1], Welcome), "it has not heard that it may wait"
    world.want(0, 1, leaving={2: "drain", 3: "drain"})
    world.exchange(4)
    assert world.groups[2].is_dismissed and world.groups[3].is_dismissed
    assert [left.group for left in world.told("group_left")] == [2, 3]
    world = with_spare()
    world.run_to_end()
    world.tend()
    world.wait(1)
    world.exchange(4)
    assert world.groups[2].is_dismissed
    assert not world.told("group_lost")
    world.check_rows()


def test_a_spare_outlives_a_coordinator_and_its_loss_is_nothing_to_recover_from():
    world = with_spare()
    world.start_coordinator()
    world.run_to_commit(4)
    assert standings(world)[2] == "spare"
    world.want(0, 1, 2)
    world.start_coordinator()
    world.run_to_commit(6)
    assert standings(world)[2] == "spare", "it had heard of no round: the driver says so again"
    world.kill(2)
    world.run_to_commit(8)
    (lost,) = world.told("group_lost")
    assert lost.is_spare
    assert {each.cause for each in world.told("recovered")} == {"the coordinator was restarted"}


def straggling(world: World, times_of: Callable[[int, int], tuple[float, float]]) -> None:
    """Two minutes in which each rank takes the step and local times given."""
    for window in range(30):
        for group in sorted(world.groups):
            for rank in (0, 1):
                step_time_s, local_s = times_of(group, rank)
                beat(world, group, rank, window, step_time_s=step_time_s, local_s=local_s)
        tick(world, 4)


def test_the_driver_is_told_of_stragglers_by_name():
    world = running(heartbeat_timeout_s=60.0)
    straggling(world, lambda group, rank: (0.5 if group == 1 else 0.1, 0.0))
    found = world.status.stragglers
    assert {(each.group, each.host, each.slowdown) for each in found} == {(1, "host-1", 5.0)}
    assert {(each.own_s, each.median_s) for each in found} == {(0.5, 0.1)}
    # A rank that holds up its own group.
    world = running(heartbeat_timeout_s=60.0)
    slow = (0.1, 0.09)
    straggling(
        world, lambda *rank: slow if rank == (1, 1) else (0.1 if rank[0] == 1 else 0.05, 0.04)
    )
    assert [(each.group, each.rank) for each in world.status.stragglers] == [(1, 1)]
    # All workers are one group that is in no round: only watched.
    watched = World(1, heartbeat_timeout_s=60.0)
    watched.start_group(0)
    watched.exchange(1)
    straggling(watched, lambda group, rank: (0.2, 0.1 if rank else 0.04))
    assert [(each.group, each.rank) for each in watched.status.stragglers] == [(0, 1)]


@pytest.mark.parametrize(("num_groups", "rows"), [(1, [5]), (2, [1, 5]), (3, [5])])
def test_rows_that_poison_the_loss_are_left_out_and_their_group_starts_over(num_groups, rows):
    world = World(num_groups)
    world.poison = {(0, row) for row in rows}
    world.tend()
    if len(rows) == num_groups:
        world.run_until(lambda: world.told("group_left"))
        assert {each.cause for each in world.told("group_left")} == {"poisoned"}
        assert not world.told("group_lost")
    else:
        world.run_until(lambda: current(world) == num_groups)
        useful_s, recovery_s = goodput(world)
        world.now += 7
        world.run_until(lambda: world.told("rows_skipped"))
        assert current(world) == num_groups - 1
        world.now += 5
        others_s = (num_groups - 1) * (7 + 5)
        assert goodput(world) == (useful_s + others_s, recovery_s + 5), "but not what it skipped"
        assert not world.membership._metrics.goodput.losses_per_s(world.now)
        (skipped,) = world.told("rows_skipped")
        assert skipped.start <= 5 < skipped.stop
        assert list(standings(world).values()).count("listening") == 1
    world.run_to_end()
    world.check_rows()
    assert world.end
    assert world.end.ledger.rows_skipped == 4 * len(rows)


@pytest.mark.parametrize(("last", "fails"), [(12, True), (16, False)])
def test_leaving_rows_out_stops_helping_where_every_interval_is_poisoned(last, fails):
    world = World(num_groups=1)
    world.poison = {(0, row) for row in (0, 4, 8, last)}
    world.run_until(lambda: world.tend() or world.status.failure or world.end)
    assert fails == ("4 intervals in a row" in str(world.status.failure))


def test_a_group_whose_loss_is_nan_whatever_it_trains_is_lost_and_the_job_goes_on(monkeypatch):
    monkeypatch.setattr(elastic_world, "ROWS_PER_LEASE", 2)
    world = running()
    world.poisoned_groups.add(1)
    world.run_until(lambda: world.copy_all() or world.told("group_lost"))
    (lost,) = world.told("group_lost")
    assert (lost.group, lost.reason) == (1, "non_finite")
    assert len(world.told("rows_skipped")) == 3, "what it held the last time is trained by others"
    assert world.status.failure is None


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_group_whose_copy_differs_gives_its_rows_back_and_copies_another(overlaps):
    world = running(overlaps=overlaps, on_divergence="rebroadcast")
    world.spoilt.add((1, 1))
    world.run_until(lambda: world.told("divergence"))
    (found,) = world.told("divergence")
    assert (found.table, found.shard, found.ranks) == ("users", 1, [NUM_RANKS + 1])
    assert found.action == "rebroadcast"
    world.run_until(lambda: standings(world)[1] == "listening")
    assert current(world) == 2, "whoever copies does not train"
    world.run_to_end()
    world.check_rows()
    assert not world.spoilt and len(world.told("divergence")) == 1


@pytest.mark.parametrize(
    ("action", "spoilt", "ranks"),
    [
        ("fail", [(2, 0)], "4"),
        ("rebroadcast", [(1, 0), (2, 0), (0, 1)], "2, 4; users, shard 1, on rank(s) 1"),
    ],
)
def test_copies_that_differ_end_the_run_where_asked_or_where_no_group_is_whole(
    action, spoilt, ranks
):
    world = running(on_divergence=action)
    world.spoilt.update(spoilt)
    world.run_until(lambda: world.status.failure)
    failure = world.status.failure
    assert failure and failure.reason == EndReason.DIVERGED
    assert f"users, shard 0, on rank(s) {ranks}" in failure.message
    told = world.events.copy()
    tick(world, 0.1)
    assert world.events == told, "it is told once"


def test_what_follows_from_copies_that_differ_is_what_the_spec_says():
    for action in ("fail", "rebroadcast"):
        check = f"parallelism.divergence_check={{every_syncs: 2, action: {action}}}"
        spec = changed("parallelism.placement=inter_host", check)
        assert MembershipPolicy.of(spec, 2).on_divergence == action


def test_poison_fails_the_run_where_that_is_asked_for():
    world = World(on_non_finite="fail")
    world.poison.add((0, 5))
    world.tend()
    world.run_until(lambda: world.status.failure)
    assert world.status.failure
    assert world.status.failure.reason == "non_finite"
    world.exchange(10)
    assert all(group.is_fenced for group in world.lives())


def test_the_lowest_group_leads_until_it_is_lost():
    world = running()
    assert world.leader == 0
    assert world.ledger.metrics.keys() == {"of group 0"}
    world.kill(0)
    assert world.leader == 1
    world.start_group(0)
    world.run_until(lambda: listening(world, 0))
    world.copy_all()
    world.run_until(lambda: standings(world)[0] == "current")
    assert world.leader == 1
    assert world.ledger.metrics.keys() == {"of group 0", "of group 1"}


def test_a_listener_hears_of_the_end_too():
    world = running(num_groups=2)
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: world.groups[1].copy and has_ready(world, 1, "arrive"))
    world.hung.add(1)
    world.run_until(lambda: world.status.has_finished)
    world.hung.clear()
    world.run_until(lambda: all(group.is_through for group in world.lives()))
    assert world.ledger.epoch == EPOCHS
    assert world.told("metrics"), "the last metrics go out"


def test_a_sync_that_one_group_heard_of_counts_for_all():
    world = running()
    world.run_until(lambda: all(has_ready(world, group, "vote") for group in range(3)))
    for group in world.lives():
        world.deliver(group)
    heard = world.groups[0]
    heard.hear()
    assert [group.ledger.commit for group in world.lives()] == [3, 2, 2]
    world.start_coordinator()
    world.run_until(lambda: all(group.ledger.commit >= 3 for group in world.lives()))
    assert {group.applied[3] for group in world.lives()} == {heard.applied[3]}
    assert not world.told("group_lost")


def test_what_a_leader_reports_counts_though_a_restarted_coordinator_hears_it_first():
    world = running(commit=1)
    world.run_until(lambda: all(has_ready(world, group, "arrive") for group in range(3)))
    assert not world.ledger.metrics
    world.start_coordinator()
    while world.groups[0].outbox:
        world.deliver(world.groups[0])
    world.run_to_commit(2)
    assert world.ledger.metrics == {"of group 0": 1.0}


def test_a_group_that_holds_another_sync_of_the_same_number_is_lost():
    world = running()
    life = world.groups[1]
    ledger = life.hello.ledger.model_copy(update={"round": 99})
    life.hello = life.hello.model_copy(update={"ledger": ledger})
    world.start_coordinator()
    world.run_to_commit(4)
    assert [(lost.group, lost.reason) for lost in world.told("group_lost")] == [(1, "stale")]


def test_a_group_that_trained_what_it_does_not_hold_is_lost_and_the_others_go_on():
    world = running()
    arrive = Arrive(commit=2, leases=(99,), num_rows=4)
    world.act(world.membership.on_arrive(world.groups[1].id, 9, arrive, world.now))
    assert [(lost.group, lost.reason) for lost in world.told("group_lost")] == [(1, "stale")]
    world.run_to_end()
    world.check_rows()


def test_a_round_is_exact_for_all_where_one_group_asks_for_it_or_copies():
    world = running(overlaps=True)
    newest = world.groups[0].round
    assert newest and newest.overlaps and not newest.is_exact
    world.needing_exact.add(1)
    world.run_to_commit(world.ledger.commit + 3)
    rounds = [group.round for group in world.lives()]
    assert all(each and each.is_exact and not each.overlaps for each in rounds)
    world.needing_exact.clear()
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: listening(world, 1))
    joining = world.groups[1].round
    assert joining and joining.is_exact
    world.needing_exact.add(0)
    world.run_to_end()
    last = world.groups[0].round
    assert last and not last.is_idle and not any(last.weights)


def test_a_run_that_goes_back_to_its_checkpoint_has_not_finished_as_a_lost_leader_said():
    world = running()
    world.run_until(lambda: world.membership._rounds.report.has_finished)
    for group in list(world.groups):
        world.kill(group)
    world.run_to_end()
    world.check_rows()


def test_a_run_goes_on_from_its_checkpoint_though_coordinators_die_before_its_first_sync():
    world = running(2, commit=4)
    world.save()
    saved = world.checkpoint.ledger
    for group in (0, 1):
        world.kill(group)
    world.start_coordinator()
    world.tend()
    world.run_until(lambda: all(has_ready(world, group, "vote") for group in (0, 1)))
    world.start_coordinator()  # which knows of no run: nobody has trained
    while waiting := [g for g in (0, 1) if not has_ready(world, g, "arrive")]:
        for life in (world.groups[group] for group in waiting):
            if life.inbox:
                life.hear()  # that the round has failed, by who knows no run
            elif life.outbox:
                world.deliver(life)
        world.wait(0.05)
    for life in world.lives():
        life.connect()
    world.run_until(lambda: world.ledger.commit > 0)
    now = world.ledger
    assert (now.commit, now.rows_trained) >= (saved.commit, saved.rows_trained)
    world.run_to_end()
    world.check_rows()


def test_who_refused_a_round_is_told_by_no_coordinator_that_it_took_part():
    world = running(3)
    world.kill(2)
    world.tend()
    world.run_until(lambda: listening(world, 2))
    listener, others = world.groups[2], [world.groups[0], world.groups[1]]
    listener.will_refuse = True
    world.run_until(lambda: listener.has_refused)
    assert has_ready(world, 2, "vote")
    refused = listener.round.commit
    world.hung.add(2)
    world.run_until(lambda: all(each.round.commit == refused and each.request for each in others))
    for each in (*others, listener):  # the others hold the averages, and go on without it
        if each.outbox:
            world.deliver(each)
    for each in others:
        while each.inbox:
            each.hear()
    assert all(refused in each.applied for each in others)
    world.hung.discard(2)
    world.start_coordinator()
    assert not listener.inbox, "the answer is lost with the coordinator"
    while not any(isinstance(body, RoundResult) for _, body in listener.inbox):
        for life in world.lives():
            if life.outbox:
                world.deliver(life)
        world.wait(0.05)
    world.run_to_commit(refused + 2)
    assert refused not in listener.applied


def test_a_restarted_coordinator_gives_a_lost_group_no_rows_that_others_hold_by_now():
    world = running()
    lost = world.groups[0]
    held = {span for lease in lost.hello.leases for span in lease.spans}
    world.hung.add(0)
    world.act(world.membership.drop(0, 0, "silent", world.now))
    lost.inbox.clear()  # it is cut off

    def is_trained_anew() -> bool:
        done = [group for group in (1, 2) if has_ready(world, group, "arrive")]
        leases = [lease for group in done for lease in world.groups[group].interval]
        return bool(held & {span for lease in leases for span in lease.spans})

    world.run_until(is_trained_anew)
    world.hung.clear()
    world.start_coordinator()
    world.exchange(20)
    _, *told = world.told("group_lost")
    assert [(each.group, each.reason) for each in told] == [(0, "stale")]


def test_a_recovery_does_not_wait_for_whom_the_driver_has_seen_end():
    world = running(heartbeat_timeout_s=30.0)
    world.start_coordinator()
    world.hung.add(2)
    world.exchange(5)
    world.wait(0.5)
    assert world.membership._is_recovering
    world.act(world.membership.drop(2, 0, "workers_lost", world.now))
    world.run_to_commit(4)
    world.hung.clear()
    world.exchange(10)
    assert world.groups[2].is_fenced


@pytest.mark.parametrize("reason", ["host_lost", ""])
def test_a_group_lost_while_the_coordinator_restarted_is_told_once_and_not_waited_for(reason: str):
    world = running(heartbeat_timeout_s=30.0)
    del world.groups[2]
    world.incarnations[2] += 1
    world.start_coordinator()
    world.want(0, 1, reason=reason)
    world.exchange(5)
    for _ in range(3):
        world.want(0, 1, reason=reason)
    world.run_to_commit(4)
    told = [(each.group, each.incarnation, each.hosts) for each in world.told("group_lost")]
    assert told == ([(2, 0, ["a"])] if reason else []), "none of whom an earlier one told"


def test_nothing_is_answered_until_all_have_had_the_time_to_find_a_restarted_coordinator():
    policy = MembershipPolicy.of(changed(), 3)
    grace_s = finding_s(policy.recovery.heartbeat_timeout_s)
    assert grace_s > 2 * LOCATE_S
    world = running(heartbeat_timeout_s=policy.recovery.heartbeat_timeout_s)
    world.start_coordinator()
    world.hung.add(2)
    world.exchange(20)
    for _ in range(10):
        world.wait(0.099 * grace_s)
    assert all(group.ledger.commit <= 3 for group in world.lives())
    world.hung.clear()
    world.run_to_commit(4)
    assert not any(group.is_fenced for group in world.lives())
    (recovered,) = world.told("recovered")
    assert recovered.pause_s == pytest.approx(0.99 * grace_s)


def test_who_comes_back_too_late_is_fenced():
    world = running()
    world.start_coordinator()
    world.hung.add(2)
    world.start_group(3)
    world.exchange(5)
    for _ in range(70):
        world.wait(0.1)
    world.run_to_commit(4)
    assert world.groups[3].request, "who came meanwhile is welcome then"
    world.hung.clear()
    world.exchange(10)
    assert world.groups[2].is_fenced
    world.run_to_end()
    world.check_rows()


def group(number: int, *hosts: str, origin: str = "seed-0", commit: int = 0) -> Group:
    """A current group with one rank on each host."""
    ranks = tuple(
        RankProcess(rank=rank, host=host, pid=1, donor="")
        for rank, host in enumerate(hosts or ("a",))
    )
    hello = Hello(
        group=number,
        incarnation=0,
        ranks=ranks,
        origin=origin,
        standing="initial",
        ledger=Ledger(commit=commit),
    )
    made = Group(hello, now=0.0)
    made.add(hello)
    made.standing = "current"
    return made


def test_copies_on_one_host_are_lost_together():
    groups = [group(0, "a", "b"), group(1, "a", "c"), group(2, "a", "d")]
    assert copies_alive(groups) == (3, 1), "all first ranks are on host a"
    assert copies_alive([group(0, "a"), group(1, "b")]) == (2, 2)
    assert copies_alive([]) == (0, 0)
    listener = group(1, "b")
    listener.standing = "listening"
    assert copies_alive([group(0, "a"), listener]) == (1, 1), "who copies is no copy"


def test_listeners_spread_over_the_donors_and_stay_with_theirs():
    donors, listeners = [group(0), group(1)], [group(2), group(3), group(4)]
    groups = donors + listeners
    for listener in listeners:
        listener.donor = choose_donor(listener, donors, groups)
    assert [listener.donor for listener in listeners] == [donors[1], donors[0], donors[1]]
    assert choose_donor(listeners[1], donors, groups) is donors[0]
    assert choose_donor(listeners[0], donors[:1], groups) is donors[0], "its donor is gone"


def test_a_run_begins_from_the_most_commits_and_then_from_what_most_hold():
    most = [group(0, origin="x"), group(1, origin="y"), group(2, origin="y")]
    assert [each.group for each in choose_start(most)] == [1, 2]
    assert [each.group for each in choose_start([*most, group(3, commit=1)])] == [3]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((None, None), [4.0, 12.0]),
        ((30.0, 2.0), [30.0, 2.0]),
        # Both trained, if on rows that do not count: their copies must become equal again.
        ((0.0, 0.0), [4e-9, 12e-9]),
    ],
)
def test_copies_weigh_their_rows_or_the_weights_of_these(weights, expected):
    groups = [group(0), group(1)]
    for each, num_rows, weight in zip(groups, (4, 12), weights, strict=True):
        each.request = Arrive(commit=1, num_rows=num_rows, weight=weight)
    opened = OpenRound(1, 1, 2, groups, {})
    assert opened.message_for(groups[0]).weights == pytest.approx(expected)


def test_faster_groups_get_longer_leases_and_all_rows_are_trained(monkeypatch):
    monkeypatch.setattr(elastic_world, "ROWS", 4000)
    monkeypatch.setattr(elastic_world, "ROWS_PER_LEASE", 16)
    world = World(3)
    world.speeds = {0: 2.0, 1: 3.0, 2: 1.0}
    world.tend()
    world.run_to_commit(20)
    lengths = {group.id.group: group.hello.leases[-1].num_rows for group in world.lives()}
    assert lengths == {0: 16, 1: 24, 2: 8}
    world.speeds = {}
    world.run_to_commit(40)
    assert {group.hello.leases[-1].num_rows for group in world.lives()} == {16}


TUNED = SyncSpec(every_steps="auto", tuner={"min_steps": 4, "max_steps": 16})


def test_leases_become_as_long_as_syncs_ask_for_also_under_another_coordinator(monkeypatch):
    monkeypatch.setattr(elastic_world, "ROWS", 4000)
    world = World(3, sync=TUNED)
    world.synced = Observation(step_s=1.0, sync_s=1.0, density=0.5)
    world.validation_error = 0.5
    world.tend()
    world.run_until(lambda: world.told("sync_interval_changed"))
    (moved,) = world.told("sync_interval_changed")
    assert (moved.every_steps_before, moved.every_steps) == (4, 8)
    assert moved.step == world.ledger.rows_done
    assert "waits 20.0% of its time" in moved.reason
    commit = world.ledger.commit
    world.run_to_commit(commit + 1)
    world.start_coordinator()
    world.run_to_commit(commit + 3)
    assert {group.hello.leases[-1].num_rows for group in world.lives()} == {8}
    # The copies were better when they were closer.
    world.validation_error = 0.6
    world.run_until(lambda: world.told("sync_interval_changed")[-1].every_steps == 4)
    assert "validation error is 0.6, and was 0.5" in world.told("sync_interval_changed")[-1].reason


def test_the_loss_of_groups_counts_against_long_leases(monkeypatch):
    monkeypatch.setattr(elastic_world, "ROWS", 4000)
    world = World(3, sync=TUNED)
    world.synced = Observation(step_s=1.0, sync_s=1.0, density=0.5)
    world.tend()
    world.run_to_commit(2)
    world.wait(1.0)
    world.kill(2)  # within a second of training
    world.run_to_commit(30)
    assert not world.told("sync_interval_changed")


def test_bad_rows_of_an_epoch_count_once_whoever_trained_them():
    world = World(3)
    world.tend()
    world.run_until(lambda: world.groups[1].num_bad)
    world.kill(1)
    totals = set()
    for _ in range(2000):
        if world.end is None:
            world.tend()
        world.exchange(1)
        world.copy_all()
        totals.add(world.ledger.quarantined)
    for epoch in range(EPOCHS):
        assert max(total for of, total in totals if of == epoch) == len(elastic_world.BAD_ROWS)
    world.run_to_end()


def test_a_group_lost_while_it_measures_leaves_its_rows_to_the_others():
    world = running()
    world.validation_due = True
    world.run_until(lambda: any(group.measured for group in world.lives()))
    rows = world.ledger.rows_trained
    world.kill(1)
    world.run_until(lambda: world.joined)
    assert world.joined == [{(0, 2), (1, 2)}]
    assert world.ledger.rows_trained == rows, "measured on one state"


def test_a_pause_is_what_a_recovery_took_beyond_the_usual():
    chronicle = RunMetrics(rows_per_step=10)
    for now in (1.0, 2.0, 3.0):
        chronicle.start_round()
        assert chronicle.commit({0}, generation=1, commit=int(now), now=now) is None
    chronicle.start_round()
    chronicle.record_incident("connection", 3.5, syncs_lost=1)
    chronicle.record_incident("group 1 was lost", 3.6)
    chronicle.start_round()
    recovered = chronicle.commit({0}, generation=2, commit=4, now=4.5)
    assert recovered
    assert recovered.pause_s == pytest.approx(0.5)
    assert (recovered.cause, recovered.syncs_lost, recovered.num_tries) == ("connection", 1, 2)
    assert chronicle.commit({0}, generation=2, commit=5, now=5.5) is None


def test_validation_is_no_part_of_a_pause_but_a_wait_for_the_lost_group_is():
    chronicle = RunMetrics(rows_per_step=10)
    for now in (1.0, 2.0):
        chronicle.commit({0}, generation=1, commit=int(now), now=now)
    for now, phase, is_waiting in (
        (2.5, "train", False),
        (32.5, "validation", False),
        (36.5, "validation", True),
    ):
        beat = Heartbeat(progress=1, phase=phase, is_waiting=is_waiting)
        chronicle.record_heartbeat(0, beat, now)
    chronicle.record_incident("hang", 36.5)
    recovered = chronicle.commit({0}, generation=2, commit=3, now=37.0)
    assert recovered
    assert recovered.pause_s == pytest.approx(4.0)
    chronicle.record_incident("hang", 37.0)
    recovered = chronicle.commit({0}, generation=3, commit=4, now=40.0)
    assert recovered
    assert recovered.pause_s == pytest.approx(2.0)


def test_steps_are_at_risk_until_a_checkpoint_holds_them_also_after_a_restart():
    chronicle = RunMetrics(rows_per_step=10)
    resumed = TrainState(step=40, reached=DataPosition(1, 0), rows_trained=400, commit=4).ledger
    trained = resumed.model_copy(update={"commit": 5, "rows_trained": 500})
    saved = trained.model_copy(update={"led": LeaderProgress(step=50, saved_step=50)})
    for ledger, num_steps in ((resumed, 0), (trained, 10), (saved, 0)):
        assert chronicle.as_event(ledger, 1, 0.0).values["risk/steps_undurable"] == num_steps


def leader(led: LeaderProgress, step: int, validate_every: int | None = None) -> GroupSession:
    """A session of a leader that stands at `step` of 100, of 40 an epoch; what trains is left out.

    A sync every 4 steps, a checkpoint every 10.
    """
    session: Any = GroupSession.__new__(GroupSession)
    session.spec = SimpleNamespace(
        training=SimpleNamespace(
            validate_every_steps=validate_every, early_stopping=None, epochs=3, max_steps=100
        ),
        checkpoint=SimpleNamespace(every_steps=10),
        parallelism=SimpleNamespace(sync=SyncSpec(every_steps=4, overlap=4)),
        data=None,
    )
    session.shape = SimpleNamespace(num_rows=40 * 8, rows_per_step=8)
    session.ledger = Ledger(led=led, rows_trained=step * 8)
    session.total_steps = 100
    session.validation_source, session._has_finished = object(), False
    session.is_leader, session.is_asked_to_stop, session._report = True, False, Report()
    session.saves, session._urgent_step, session._best_save = SaveStanding(), 0, None
    session.standing, session._result, session._validated = "current", None, None
    session._validation_error = None
    session._is_syncing, session._syncing, session._interval = False, Interval(None), Interval(None)
    epoch, epoch_step = divmod(step, 40)
    session.state = TrainState(step=step, reached=DataPosition(epoch, epoch_step * 8))
    session._before = TrainState(step=step - 1, reached=session.state.position)
    return session


def test_bad_rows_of_all_groups_count_against_the_whole_split() -> None:
    session: Any = leader(LeaderProgress(), 1)
    session.tuner = SyncTuner(SyncSpec())
    data = SimpleNamespace(on_bad_rows="quarantine", max_bad_share=0.1)
    spec: Any = SimpleNamespace(data=data)
    session.quarantine = QuarantineReporter(spec, (320, 100), lambda event: None)
    session._adopt(Ledger(quarantined=(0, 32)))
    with pytest.raises(TooManyBadRowsError, match="33 of 320 rows"):
        session._adopt(Ledger(quarantined=(1, 33)))
    session._check_measured(torch.tensor([10.0]), torch.empty(0))
    with pytest.raises(TooManyBadRowsError, match="11 of 100 rows"):
        session._check_measured(torch.tensor([11.0]), torch.empty(0))


@pytest.mark.parametrize("validate_every", [None, 10])
def test_what_a_lost_leader_did_not_do_is_due_for_the_next(validate_every: int | None) -> None:
    undone = leader(LeaderProgress(step=38, epoch=0, saved_step=38), 41, validate_every)
    assert undone.is_validation_step() and undone.is_checkpoint_step()
    done = leader(LeaderProgress(step=40, epoch=1, saved_step=40), 41, validate_every)
    assert not done.is_validation_step() and not done.is_checkpoint_step()
    # A resumed run owes nothing for what its checkpoint holds.
    assert TrainState(step=40, reached=DataPosition(2, 5)).ledger.led == LeaderProgress(
        step=40, epoch=2, saved_step=40
    )


def test_a_save_counts_once_it_is_durable_and_busy_storage_is_not_waited_for() -> None:
    begun = leader(LeaderProgress(step=40, epoch=1, saved_step=30), 41)
    assert begun.is_checkpoint_step()  # whoever began it may be lost
    begun.saves = SaveStanding(saved_step=30, is_blocked=True)
    assert not begun.is_checkpoint_step() and not begun._is_leading_due(45 * 8)
    begun.saves = SaveStanding(saved_step=30, has_failed=True)
    assert begun.is_checkpoint_step()
    begun.saves = SaveStanding(saved_step=40)
    assert not begun.is_checkpoint_step()
    begun.saves, begun.is_leader = SaveStanding(), False
    assert not begun.is_checkpoint_step()


def test_the_last_copy_and_a_driver_that_asks_cause_a_save_until_one_is_durable() -> None:
    session: Any = leader(LeaderProgress(step=40, epoch=1, saved_step=40), 42)
    copies = [SimpleNamespace(standing="current")] * 2
    session._num_copies = session._num_saves = 0
    session.group_sync = SimpleNamespace(members=copies[:1])
    session._find_urgency(0)
    assert not session.is_checkpoint_step(), "a job of one group loses no copy"
    for members in (copies, copies[:1]):
        session.group_sync.members = members
        session._find_urgency(0)
    assert session.is_checkpoint_step() and session._may_be_due_next
    session.saves = SaveStanding(saved_step=42)
    assert not session.is_checkpoint_step()
    session.state = TrainState(step=43, reached=session.state.position)
    session.ledger = session.ledger.model_copy(update={"rows_trained": 43 * 8})
    session._find_urgency(1)
    assert session.is_checkpoint_step()
    session.saves = SaveStanding(saved_step=43)
    for num_saves in (1, 0, 1):  # as of a coordinator that was restarted
        session._find_urgency(num_saves)
    assert not session.is_checkpoint_step()


def test_a_result_that_leaves_one_copy_of_four_causes_a_save_and_scales_moments() -> None:
    session: Any = leader(LeaderProgress(step=40, epoch=1, saved_step=40), 42)
    session.speed, session._seen_rows, session._seen_at = Mock(read=lambda _: {}), 0, 0.0
    session.spec.parallelism.moment_scale, session.spec.parallelism.num_replicas = "auto", 4
    session.spec.training.accumulate_steps = 1
    for name in ("optimizers", "tuner", "quarantine", "_stream", "_loader"):
        setattr(session, name, Mock())
    session._leases, session._num_copies, session._num_saves = deque(), 0, 0
    session.group = SimpleNamespace(group=0)
    for num_copies, is_due in ((4, False), (1, True)):
        copies = [SimpleNamespace(standing="current")] * num_copies
        listener = SimpleNamespace(standing="listening")
        session.group_sync = SimpleNamespace(members=[*copies, listener])
        session._take(RoundResult(committed=True, ledger=session.ledger, leader=0))
        session.optimizers.set_share.assert_called_with(num_copies / 4)
        assert session.is_checkpoint_step() is is_due
        assert session.read_speed(0.0)["speed/rows_per_s"] == 0, "others have trained what is there"


@pytest.mark.parametrize(("step", "may_lead"), [(41, False), (46, True), (97, True)])
def test_the_leader_trains_ahead_only_where_nothing_may_be_due_after_the_sync(
    step: int, may_lead: bool
) -> None:
    led = LeaderProgress(step=step - 1, epoch=step // 40, saved_step=step - 1)
    session: Any = leader(led, step, None)
    session.standing, session._leases = "current", ["a lease"]
    assert session._may_overlap is not may_lead
    session.is_leader = False
    assert session._may_overlap is (step != 97), "all measure what all hold at the end"


def test_averages_are_applied_when_the_steps_are_over_that_the_sync_overlaps_with() -> None:
    session: Any = leader(LeaderProgress(), 8)
    session.spec.training.accumulate_steps, session._sync_s = 1, 0.0
    session.phases, session.tracer, session.group_sync = MagicMock(), Mock(), Mock()
    session.loss_weighting = SimpleNamespace(is_on=False)
    session.run_step = Mock(return_value=torch.tensor(0.5))
    session._interval = Interval(torch.zeros(2))
    batch: Any = SimpleNamespace(weight=torch.ones(8), quarantined=Mock(total=lambda: 0))
    landed = []
    for session._is_syncing in (True, False):
        session._interval.num_steps = 0
        for _ in range(6):
            session._train_batch(batch, is_last=False)
            landed.append(session.group_sync.land.call_count)
    assert landed == [0, 0, 0, *[1] * 9]


def test_a_validation_is_due_once_for_each_leader_and_before_anything_is_saved() -> None:
    session: Any = leader(LeaderProgress(step=38, epoch=0, saved_step=38), 41)
    session._result = RoundResult(committed=True, ledger=session.ledger)
    session.group_sync = SimpleNamespace(is_exact=True, measured=None)
    session.save_checkpoint = lambda is_best: pytest.fail("saved before it was measured")
    assert session.must_measure
    session.lead()
    session._interval.num_steps = 1
    assert not session.must_measure, "it holds what is not committed"
    session._interval.num_steps = 0
    session._validated = session.rows_agreed, 0
    assert not session.must_measure
    session._result = session._result.model_copy(update={"leader": 1})
    assert session.must_measure, "what a leader was lost over stays due"


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_leader_reports_a_best_value_once_its_model_is_saved(is_saved: bool) -> None:
    session: Any = leader(LeaderProgress(step=38, epoch=1, saved_step=38), 39, 40)
    session.spec.checkpoint.keep_best = True
    session.spec.model = SimpleNamespace(watched_metric="rmse")
    session.final_metrics, session.note = {}, Mock()
    session.group_sync = SimpleNamespace(is_exact=True, measured=None)
    reported = []

    def save(is_best: bool) -> None:
        session._best_save = session.state.step, 0.5
        session.saves = SaveStanding(saved_step=38, is_blocked=True)

    session.save_checkpoint = save
    under_way = SaveStanding(saved_step=38, has_failed=True, is_blocked=True)
    ended = SaveStanding(saved_step=39 if is_saved else 38, has_failed=not is_saved)
    for is_best, saves in ((True, under_way), (True, ended), (False, under_way), (False, ended)):
        session._take_measured, session.saves = Mock(return_value=is_best), saves
        session.lead()
        session.state.best = session._report.best  # by way of the ledger
        reported.append(session._report.best)
    session.note.assert_called_once()  # storage was busy with another save
    assert reported == [None, None, None, 0.5 if is_saved else None]


def test_a_leader_saves_what_all_copies_hold_alike_and_asks_for_it_where_they_may_not() -> None:
    session: Any = leader(LeaderProgress(step=38, epoch=1, saved_step=38), 41, None)
    saves: list[bool] = []

    def save(is_best: bool) -> None:
        saves.append(is_best)
        session.saves = SaveStanding(saved_step=session.state.step)

    session.save_checkpoint, session.final_metrics = save, {}
    session.checkpoints = SimpleNamespace(newest_commit=None)
    session.group_sync = SimpleNamespace(is_exact=False, is_always_exact=True, measured=None)
    untrained = SimpleNamespace(num_rows=0)
    assert not session._needs_exact(untrained)
    session.group_sync.is_always_exact = False
    session.lead()
    assert (saves, session._led.step) == ([], 38)
    assert session._needs_exact(untrained)
    session.group_sync.is_exact = True
    session.lead()
    assert (saves, session._led.step) == ([False], 41)
    assert not session._needs_exact(untrained)
    assert not session._needs_exact(SimpleNamespace(num_rows=8))  # up to step 45 nothing is due
    session.state = TrainState(step=46, reached=DataPosition(1, 6 * 8))
    session.ledger = session.ledger.model_copy(update={"rows_trained": 46 * 8})
    assert not session._needs_exact(untrained)
    assert session._needs_exact(SimpleNamespace(num_rows=8))


def test_a_leader_saves_for_a_pause_no_sooner_than_storage_may_have_recovered() -> None:
    session: Any = leader(LeaderProgress(), 1)
    session.is_asked_to_stop, session.await_save, session.save_checkpoint = True, Mock(), Mock()
    session.checkpoints = SimpleNamespace(newest_commit=None)
    num_saves = []
    for is_blocked in (True, False):
        session.saves = SaveStanding(has_failed=True, is_blocked=is_blocked)
        session._save_for_a_pause()
        num_saves.append(session.save_checkpoint.call_count)
    assert num_saves == [0, 1]
