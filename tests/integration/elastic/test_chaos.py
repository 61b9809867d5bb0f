"""Jobs that are struck again and again: every row counts once, and all copies stay equal.

`make chaos` runs many more jobs than this: SHARDLOOM_CHAOS_JOBS says how many, of 10 faults each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.harness.chaos import Campaign, elastic_config
from tests.harness.elastic import ElasticHarness
from tests.harness.emulated import EmulatedHosts, Link, missing_requirement
from trainer.fault_injection import Kind, Phase

NUM_JOBS = int(os.environ.get("SHARDLOOM_CHAOS_JOBS", "1"))
CHECKED = "parallelism.divergence_check={every_syncs: 1}"
PLAIN = ["parallelism.sync={every_steps: 2}"]
OVERLAP = ["parallelism.sync={every_steps: 2, overlap: 2}"]
HALF = ["parallelism.sync={every_steps: 2, dtype: bf16}"]
HALF_OVERLAP = ["parallelism.sync={every_steps: 2, dtype: bf16, overlap: 2}", CHECKED]
NEVER = ["parallelism.sync={every_steps: 2, optimizer_state: never}", CHECKED]
DELAYED = ["parallelism.sync={every_steps: 2, optimizer_state: delayed}"]
SYNCS = (OVERLAP, PLAIN, HALF_OVERLAP, HALF, NEVER, DELAYED)
NUM_FAULTS = 10 if "SHARDLOOM_CHAOS_JOBS" in os.environ else 6


@pytest.fixture
def network() -> Iterator[EmulatedHosts | None]:
    """Hosts whose links can be cut, where the machine allows them: else nothing is cut."""
    if missing_requirement():
        yield None
        return
    with EmulatedHosts(4, Link(10**10)) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_JOBS))
def test_a_job_gets_over_whatever_befalls_it(
    seed: int, small_movielens: Path, tmp_path: Path, network: EmulatedHosts | None
) -> None:
    num_groups, num_ranks = (2, 2) if seed % 2 == 0 else (3, 1)
    sync = SYNCS[seed // 2 % len(SYNCS)]
    config = elastic_config(small_movielens, tmp_path / "run", num_groups, num_ranks, *sync)
    with ElasticHarness(config, tmp_path / "harness", num_groups, network=network) as harness:
        campaign = Campaign(harness, Random(seed))
        campaign.begin()
        for _ in range(NUM_FAULTS):
            campaign.strike_at_random()
        campaign.finish(config)


def strike_phases(data: Path, folder: Path, sync: list[str], *strikes: tuple[Kind, Phase]) -> None:
    """A job of three groups that gets over each strike, and leaves out no row."""
    config = elastic_config(data, folder / "run", 3, 1, *sync)
    with ElasticHarness(config, folder / "harness", 3) as harness:
        campaign = Campaign(harness, Random(0))
        campaign.begin()
        for kind, phase in strikes:
            campaign.strike(kind, phase)
        ledger = campaign.finish(config)
        assert ledger["rows_skipped"] == 0


def test_a_group_may_die_in_an_exchange_before_its_vote_and_as_it_applies(
    small_movielens: Path, tmp_path: Path
) -> None:
    phases: tuple[Phase, ...] = ("exchange", "before_vote", "apply")
    strikes = [("sigkill", phase) for phase in phases]
    strike_phases(small_movielens, tmp_path, HALF_OVERLAP, *strikes)


@pytest.mark.slow
@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_a_group_may_die_as_it_trains_or_joins_and_stop_in_an_exchange(
    sync: list[str], small_movielens: Path, tmp_path: Path
) -> None:
    strikes = (("sigkill", "backward"), ("sigkill", "join"), ("sigstop", "exchange"))
    strike_phases(small_movielens, tmp_path, sync, *strikes)
