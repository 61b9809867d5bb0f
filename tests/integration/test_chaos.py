"""Jobs that are struck again and again: every row counts once, and all copies stay equal.

`make chaos` runs many more jobs than this: SHARDLOOM_CHAOS_JOBS says how many, of 10 faults each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.benchmarks.emulated_hosts import EmulatedHosts, Link, missing_requirement
from tests.integration.chaos import Campaign, elastic_config
from tests.integration.elastic_house import ElasticHouse

NUM_JOBS = int(os.environ.get("SHARDLOOM_CHAOS_JOBS", "1"))
NUM_FAULTS = 10 if "SHARDLOOM_CHAOS_JOBS" in os.environ else 6


@pytest.fixture
def network() -> Iterator[EmulatedHosts | None]:
    """Hosts whose links can be cut, where the machine allows them: else nothing is cut."""
    if missing_requirement():
        yield None
        return
    with EmulatedHosts(4, Link(10**10)) as hosts:
        yield hosts


@pytest.mark.parametrize("seed", range(NUM_JOBS))
def test_a_job_gets_over_whatever_befalls_it(
    seed: int, small_movielens: Path, tmp_path: Path, network: EmulatedHosts | None
) -> None:
    num_groups, num_ranks = (2, 2) if seed % 2 == 0 else (3, 1)
    config = elastic_config(small_movielens, tmp_path / "run", num_groups, num_ranks)
    with ElasticHouse(config, tmp_path / "house", num_groups, network=network) as house:
        campaign = Campaign(house, Random(seed))
        campaign.begin()
        for _ in range(NUM_FAULTS):
            campaign.strike_at_random()
        campaign.finish(config)


def test_a_group_may_die_at_any_point_of_a_sync(small_movielens: Path, tmp_path: Path) -> None:
    config = elastic_config(small_movielens, tmp_path / "run", 3, 1)
    with ElasticHouse(config, tmp_path / "house", 3) as house:
        campaign = Campaign(house, Random(0))
        campaign.begin()
        for phase in ("backward", "exchange", "before_vote", "apply", "join"):
            campaign.strike("sigkill", phase)
        campaign.strike("sigstop", "exchange")
        ledger = campaign.finish(config)
        assert ledger["rows_skipped"] == 0
