"""What the coordinator decides, case by case; `test_membership_properties` mixes the cases."""

from __future__ import annotations

import pytest

from tests.unit.trainer.elastic.elastic_world import (
    COPIED_BYTES,
    EPOCHS,
    NUM_RANKS,
    ROWS,
    Checkpoint,
    World,
)
from trainer.elastic.detect import RankId
from trainer.elastic.protocol import EpochRows, Heartbeat, Ledger


def running(num_groups: int = 3, commit: int = 2, **policy) -> World:
    """A job that has come to `commit`."""
    world = World(num_groups, **policy)
    world.tend()
    world.run_to_commit(commit)
    return world


def standings(world: World) -> dict[int, str]:
    return {group.group: group.standing for group in world.status.groups}


def beat(
    world: World,
    group: int,
    rank: int,
    progress: int,
    step_time_s: float = 0.1,
    local_s: float = 0.0,
    phase: str = "train",
) -> None:
    """A rank says how it gets on."""
    rank_id = RankId(group, world.incarnations[group], rank)
    heartbeat = Heartbeat(
        progress=progress, phase=phase, step=1, step_time_s=step_time_s, local_s=local_s
    )
    world.act(world.membership.on_heartbeat(rank_id, heartbeat, world.now))


def has_ready(world: World, group: int, kind: str) -> bool:
    """Whether all ranks of a group are about to send this message."""
    lines = [rank.outbox[0].body.kind for rank in world.groups[group] if rank.outbox]
    return lines == [kind] * len(world.groups[group])


def tick(world: World, seconds: float) -> None:
    """Time passes without heartbeats."""
    world.now += seconds
    world.act(world.membership.tick(world.now))


# --- the start


def test_the_first_round_waits_for_every_group():
    world = World(num_groups=3)
    world.start_group(0)
    world.start_group(1)
    world.exchange(20)
    world.wait(1)
    assert world.status.phase == "starting"
    world.start_group(2)
    world.run_to_commit(1)
    assert set(standings(world).values()) == {"current"}


def test_the_first_round_does_not_wait_for_ever():
    world = World(num_groups=3, start_grace_s=30.0)
    world.start_group(0)
    world.exchange(20)
    for _ in range(60):
        world.wait(0.5)
    world.run_to_commit(1)
    assert standings(world) == {0: "current"}


def test_fewer_groups_are_enough_once_no_more_are_expected():
    world = World(num_groups=3)
    world.start_group(0)
    world.exchange(20)
    world.act(world.membership.expect([0], world.now))
    world.run_to_commit(1)
    assert standings(world) == {0: "current"}


def test_a_group_that_starts_from_an_older_checkpoint_copies():
    world = World(num_groups=3)
    world.start_group(0)
    rows = (EpochRows(epoch=0, done=((0, 20),)),)
    world.checkpoint = Checkpoint(Ledger(commit=7, round=9, open_epochs=rows, rows_trained=20), {})
    world.start_group(1)
    world.start_group(2)
    world.run_to_commit(8)
    assert standings(world) == {0: "listening", 1: "current", 2: "current"}
    assert world.status.ledger.rows_trained == 20


def test_a_ledger_of_other_data_fails_the_run():
    world = World(num_groups=1)
    rows = (EpochRows(epoch=0, done=((0, ROWS + 1),)),)
    world.checkpoint = Checkpoint(Ledger(commit=7, open_epochs=rows, rows_trained=ROWS + 1), {})
    world.start_group(0)
    world.exchange(20)
    assert world.status.failure is not None
    assert world.status.failure.reason == "data_error"
    assert "the data has changed" in world.status.failure.message


# --- syncs


def test_the_sums_of_all_ranks_become_means_per_row():
    assert running().status.ledger.metrics == {"loss": 2.0}


def test_groups_weigh_as_many_rows_as_they_trained():
    world = running(commit=1)
    world.run_until(lambda: any(rank.num_rows for rank in world.ranks()))
    world.run_to_commit(2)
    (members,) = (record.members for record in world.journal.values() if record.commit == 2)
    assert [member.weight for member in members] == [4, 4, 4]


def test_a_refused_round_is_tried_again_with_the_same_rows():
    world = running()
    trained = world.status.ledger.rows_trained
    world.groups[1][0].will_refuse = True
    world.run_to_commit(3)
    assert world.status.ledger.rows_trained == trained + 12
    (recovered,) = world.told("recovered")
    assert (recovered.num_tries, recovered.syncs_lost) == (2, 0)
    assert recovered.cause.startswith("group 1 rank 0 refused")


def test_a_group_that_refuses_again_and_again_is_lost():
    world = running(max_refusals=3)

    def refuse() -> bool:
        for rank in world.groups[1]:
            rank.will_refuse = True
        return bool(world.told("group_lost"))

    world.run_until(refuse)
    assert world.told("group_lost")[0].reason == "exchange"
    world.run_to_commit(3)


# --- losses


def test_a_lost_group_ends_the_round_and_others_train_its_rows():
    world = running()
    world.run_until(lambda: world.groups[0][0].round is not None)
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


def test_silence_loses_a_group():
    world = running()
    world.hung.add(1)
    world.wait(0.9)
    assert 1 in standings(world)
    world.wait(0.2)
    assert [lost.reason for lost in world.told("group_lost")] == ["silent"]


def test_time_that_the_coordinator_slept_is_nobodys_silence():
    world = running()
    world.wait(0.1)
    tick(world, 3600)
    assert not world.told("group_lost")


def test_a_rank_that_gets_nothing_done_loses_its_group_although_it_beats():
    world = running(min_hang_s=20.0, hang_factor=2.0)
    world.run_until(lambda: has_ready(world, 0, "arrive"))
    world.hung.add(0)
    world.deliver(world.groups[0][0])
    world.exchange(20)
    for _ in range(60):
        for group in standings(world):
            for rank in (0, 1):
                beat(world, group, rank, progress=1)
        tick(world, 0.4)
    (found,) = world.told("hang_found")
    assert (found.group, found.rank) == (0, 1)
    assert found.idle_s == pytest.approx(20, abs=1)
    assert standings(world).keys() == {1, 2}, "who waits for a hung group does not hang"


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
    assert [found.phase for found in world.told("hang_found")] == ["validation"]


def test_a_rank_that_does_not_vote_in_time_loses_its_group():
    world = running(vote_timeout_s=5.0)
    world.run_until(lambda: has_ready(world, 2, "vote"))
    world.hung.add(2)
    world.exchange(20)
    for _ in range(60):
        for rank in (0, 1):
            beat(world, 2, rank, progress=int(world.now))
        world.wait(0.1)
    assert [found.phase for found in world.told("hang_found")] == ["sync"]
    world.run_to_commit(3)


def test_a_newer_life_fences_the_older_one():
    world = running()
    old = world.groups.pop(1)
    world.incarnations[1] = 1
    world.start_group(1)
    world.exchange(20)
    assert [lost.reason for lost in world.told("group_lost")] == ["replaced"]
    world.groups[1] = old
    old[0].connect()
    world.exchange(2)
    assert old[0].is_fenced


# --- joining


def test_a_listener_counts_after_the_commit_that_follows_its_copy():
    world = running(num_groups=2)
    world.kill(1)
    world.run_to_commit(3)
    world.start_group(1)
    world.run_until(lambda: standings(world).get(1) == "listening" and world.groups[1][0].copy)
    world.copy_all()
    world.run_until(lambda: standings(world)[1] == "current")
    joined = world.told("group_joined")
    assert [each.how for each in joined] == ["start", "start", "peer_copy"]
    assert [each.copied_bytes for each in joined] == [0, 0, NUM_RANKS * COPIED_BYTES]


def test_a_listener_that_misses_a_commit_starts_over_and_holds_up_nobody():
    world = running(num_groups=2)
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: world.groups[1][0].copy and has_ready(world, 1, "arrive"))
    world.hung.add(1)
    world.run_to_commit(world.status.commit + 2)
    world.copy_all()
    world.hung.clear()
    world.run_until(lambda: world.groups[1][0].copy is None)
    assert standings(world)[1] == "listening"


def test_a_listener_without_a_donor_ends():
    world = running(num_groups=2)
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: standings(world).get(1) == "listening" and world.groups[1][0].copy)
    world.kill(0)
    world.exchange(20)
    assert [lost.reason for lost in world.told("group_lost")] == [
        "connection",
        "connection",
        "no_donor",
    ]
    world.run_to_end()
    world.check_rows()


# --- leaving


def test_a_group_that_is_asked_to_leaves_at_the_next_commit():
    world = running()
    world.act(world.membership.retire(1, "resize", world.now))
    world.run_until(lambda: all(rank.is_through for rank in world.groups[1]))
    (left,) = world.told("group_left")
    assert (left.group, left.cause) == (1, "resize")
    assert not world.told("group_lost")
    assert standings(world).keys() == {0, 2}


def test_the_last_group_does_not_leave():
    world = running(num_groups=1)
    world.act(world.membership.retire(0, "drain", world.now))
    world.run_to_commit(5)
    assert standings(world) == {0: "current"}


def test_a_straggler_is_replaced():
    world = running(replace_stragglers=True, straggler_window_s=1.0)
    for window in range(30):
        for group in (0, 1, 2):
            for rank in (0, 1):
                beat(world, group, rank, window, step_time_s=0.5 if group == 1 else 0.1)
        tick(world, 0.4)
    found = world.told("straggler_found")
    assert {(each.group, each.action) for each in found} == {(1, "replace")}
    world.run_until(lambda: world.told("group_left"))
    assert world.told("group_left")[0].cause == "straggler"


def test_a_rank_that_holds_up_its_own_group_is_told_by_name():
    world = running(straggler_window_s=1.0)
    for window in range(30):
        for group in (0, 1, 2):
            for rank in (0, 1):
                is_slow = (group, rank) == (1, 1)
                times = (0.1, 0.09) if is_slow else (0.1 if group == 1 else 0.05, 0.04)
                beat(world, group, rank, window, step_time_s=times[0], local_s=times[1])
        tick(world, 0.4)
    assert [(each.group, each.rank) for each in world.told("straggler_found")] == [(1, 1)]


# --- poison


def test_rows_that_poison_the_loss_are_left_out_and_their_group_copies():
    world = World()
    world.poison.add((0, 5))
    world.tend()
    world.run_until(lambda: world.told("rows_skipped"))
    (skipped,) = world.told("rows_skipped")
    assert skipped.start <= 5 < skipped.stop
    assert list(standings(world).values()).count("listening") == 1
    world.run_to_end()
    world.check_rows()
    assert world.end
    assert world.end.ledger.rows_skipped == 4


def test_the_only_group_starts_over_without_the_rows_that_poisoned_it():
    world = World(num_groups=1)
    world.poison.add((0, 5))
    world.tend()
    world.run_until(lambda: world.told("group_left"))
    assert world.told("group_left")[0].cause == "poisoned"
    world.run_to_end()
    world.check_rows()


def test_poison_fails_the_run_where_that_is_asked_for():
    world = World(on_non_finite="fail")
    world.poison.add((0, 5))
    world.tend()
    world.run_until(lambda: world.status.failure)
    assert world.status.failure
    assert world.status.failure.reason == "non_finite"
    world.exchange(10)
    assert all(rank.is_fenced for rank in world.ranks())


# --- the leader and the end


def test_the_lowest_group_leads_until_it_is_lost():
    world = running()
    assert world.status.leader == 0
    world.kill(0)
    assert world.status.leader == 1
    world.start_group(0)
    world.run_until(lambda: standings(world).get(0) == "listening" and world.groups[0][0].copy)
    world.copy_all()
    world.run_until(lambda: standings(world)[0] == "current")
    assert world.status.leader == 1


def test_a_listener_hears_of_the_end_too():
    world = running(num_groups=2)
    world.kill(1)
    world.start_group(1)
    world.run_until(lambda: world.groups[1][0].copy and has_ready(world, 1, "arrive"))
    world.hung.add(1)
    world.run_until(lambda: world.status.has_finished)
    world.hung.clear()
    world.run_until(lambda: all(rank.is_through for rank in world.ranks()))
    assert world.status.ledger.epoch == EPOCHS
    assert world.told("metrics"), "the last metrics go out"


# --- a coordinator that was restarted


def test_a_sync_that_one_rank_heard_of_counts_for_all():
    world = running()
    world.run_until(lambda: all(has_ready(world, group, "vote") for group in range(3)))
    for rank in world.ranks():
        world.deliver(rank)
    heard = world.groups[0][0]
    heard.hear()
    assert [rank.ledger.commit for rank in world.ranks()] == [3, 2, 2, 2, 2, 2]
    world.start_coordinator()
    world.run_until(lambda: all(rank.ledger.commit >= 3 for rank in world.ranks()))
    assert {rank.applied[3] for rank in world.ranks()} == {heard.applied[3]}
    assert not world.told("group_lost")


def test_nothing_is_answered_until_all_are_back():
    world = running()
    world.start_coordinator()
    world.hung.add(2)
    world.exchange(20)
    world.wait(0.5)
    assert world.status.phase == "recovering"
    assert all(rank.ledger.commit <= 3 for rank in world.ranks())
    world.hung.clear()
    world.run_to_commit(4)


def test_who_comes_back_too_late_is_fenced():
    world = running()
    world.start_coordinator()
    world.hung.add(2)
    world.exchange(5)
    for _ in range(40):
        world.wait(0.1)
    world.run_to_commit(4)
    world.hung.clear()
    world.exchange(10)
    assert all(rank.is_fenced for rank in world.groups[2])
    world.run_to_end()
    world.check_rows()
