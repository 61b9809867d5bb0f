"""Groups that are failure domains, without Ray: they join, leave, wait for nobody, lose no row."""

from __future__ import annotations

import signal
from pathlib import Path
from random import Random

import pytest

from tests.benchmarks.emulated_hosts import EmulatedHosts, Link, missing_requirement
from tests.integration.chaos import Campaign, elastic_config
from tests.integration.elastic_checks import commit_times
from tests.integration.elastic_house import ElasticHouse
from trainer import failures
from trainer.elastic.faults import Fault

TIMEOUT_S = 60.0
ONE_EPOCH = "training.epochs=1"


def test_groups_join_and_leave_while_the_others_train_on(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, ONE_EPOCH)
    with ElasticHouse(config, tmp_path / "house", 2) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        house.coordinator.call("expect", range(3))
        house.start_group(2)
        campaign.wait_until_over()
        house.coordinator.call("retire", 0, "drain")
        house.wait_for(lambda: house.life(0).is_over, TIMEOUT_S, "group 0 has left")
        campaign.wait_until_over()
        assert house.groups == [1, 2]
        campaign.finish(config)
        # Nobody was restarted.
        assert {record["incarnation"] for record in house.of("started")} == {0}


def test_a_coordinator_lost_between_vote_and_verdict_costs_no_row(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, ONE_EPOCH)
    with ElasticHouse(config, tmp_path / "house", 2) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        # Group 0 has voted by the time that group 1 would.
        house.inject(_slow(group=1, phase="before_vote", seconds=0.5))
        house.wait_for(lambda: house.of("struck"), TIMEOUT_S, "group 1 is about to vote")
        campaign.kill_coordinator(down_s=0.2)
        campaign.finish(config)
        assert {record["incarnation"] for record in house.of("started")} == {0}


def test_a_group_that_comes_back_from_the_dead_has_no_say(
    small_movielens: Path, tmp_path: Path
) -> None:
    quick = "recovery.heartbeat_timeout_s=2"
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, ONE_EPOCH, quick)
    with ElasticHouse(config, tmp_path / "house", 2, restarts=False) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        house.signal(1, signal.SIGSTOP)
        commit = house.commit
        house.wait_for_commit(commit + 5)
        house.signal(1, signal.SIGCONT)
        house.wait_for(lambda: house.ended, TIMEOUT_S, "the old life of group 1 has ended")
        (failed,) = house.of("failed")
        assert (failed["group"], failed["reason"]) == (1, failures.WORKERS_LOST)
        campaign.finish(config)


def test_a_group_whose_link_is_cut_stops_nobody_and_has_no_say_when_it_is_mended(
    small_movielens: Path, tmp_path: Path
) -> None:
    if reason := missing_requirement():
        pytest.skip(reason)
    quick = ("recovery.heartbeat_timeout_s=2", "recovery.exchange_timeout_s=2")
    config = elastic_config(small_movielens, tmp_path / "run", 3, 1, ONE_EPOCH, *quick)
    with (
        EmulatedHosts(4, Link(10**10)) as network,
        ElasticHouse(config, tmp_path / "house", 3, restarts=False, network=network) as house,
    ):
        campaign = Campaign(house, Random(0))
        campaign.begin()
        network.cut(2)
        commit = house.commit
        house.wait_for_commit(commit + 5)
        network.mend(2)
        house.wait_for(lambda: house.ended, TIMEOUT_S, "the old life of group 1 has ended")
        assert house.groups == [0, 2]
        campaign.finish(config)


def test_a_slow_copy_holds_up_nobody(small_movielens: Path, tmp_path: Path) -> None:
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, ONE_EPOCH)
    with ElasticHouse(config, tmp_path / "house", 2) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        copying = _slow(group=1, phase="join", seconds=1.0).model_copy(update={"incarnation": 1})
        death = copying.model_copy(update={"kind": "sigkill", "phase": "lookup", "incarnation": 0})
        house.inject(death, copying)
        house.wait_for(lambda: len(house.of("struck")) == 2, TIMEOUT_S, "group 1 copies")
        began, commit = house.of("struck")[1]["time"], house.commit
        campaign.wait_until_over()
        during = [
            number
            for number, at in commit_times(house.records()).items()
            if number > commit and at < began + copying.arg
        ]
        assert len(during) > 1, "the others committed nothing while a group copied"
        campaign.finish(config)


def test_a_donor_may_die_while_it_is_copied_from(small_movielens: Path, tmp_path: Path) -> None:
    config = elastic_config(small_movielens, tmp_path / "run", 3, 1, ONE_EPOCH)
    with ElasticHouse(config, tmp_path / "house", 3) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        copying = _slow(group=2, phase="join", seconds=0.7).model_copy(update={"incarnation": 1})
        death = copying.model_copy(update={"kind": "sigkill", "phase": "lookup", "incarnation": 0})
        house.inject(death, copying)
        house.wait_for(lambda: len(house.of("struck")) == 2, TIMEOUT_S, "group 2 copies")
        house.signal(1)  # the coordinator spares the leader, group 0
        house.wait_for(lambda: house.life(1).incarnation == 1, TIMEOUT_S, "the donor is back")
        campaign.wait_until_over()
        campaign.finish(config)


def _slow(group: int, phase: str, seconds: float) -> Fault:
    document = {"kind": "slow", "group": group, "rank": 0, "step": 0, "phase": phase}
    return Fault.model_validate(document | {"arg": seconds})
