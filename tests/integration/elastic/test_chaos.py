"""Jobs that are struck again and again: every row counts once, and all copies stay equal.

`make chaos` runs many more jobs than this: SHARDLOOM_CHAOS_JOBS says how many, of 10 faults each.
With SHARDLOOM_CHAOS_SEED one of them runs alone: the number in the test's name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.harness.chaos import STORE_HOST, Campaign, elastic_config
from tests.harness.elastic import ElasticHarness
from tests.harness.emulated import EmulatedHosts, Link, missing_requirement
from tests.harness.object_store import run_object_store
from trainer.fault_injection import Kind, Phase
from trainer.protocol.worker_config import SecretEnv

NUM_JOBS = int(os.environ.get("SHARDLOOM_CHAOS_JOBS", "1"))
SEED = os.environ.get("SHARDLOOM_CHAOS_SEED")
SEEDS = [int(SEED)] if SEED else range(NUM_JOBS)
CHECKED = "parallelism.divergence_check={every_syncs: 1}"
PLAIN = ["parallelism.sync={every_steps: 2}"]
OVERLAP = ["parallelism.sync={every_steps: 2, overlap: 2}"]
HALF = ["parallelism.sync={every_steps: 2, dtype: bf16}"]
HALF_OVERLAP = ["parallelism.sync={every_steps: 2, dtype: bf16, overlap: true}", CHECKED]
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
    with EmulatedHosts(STORE_HOST + 1, Link(10**10)) as hosts:
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_gets_over_whatever_befalls_it(
    seed: int, small_movielens: Path, tmp_path: Path, network: EmulatedHosts | None
) -> None:
    num_groups, num_ranks = (2, 2) if seed % 2 == 0 else (3, 1)
    sync = SYNCS[seed // 2 % len(SYNCS)]
    with job(small_movielens, tmp_path, num_groups, num_ranks, sync, network) as harness:
        campaign = Campaign(harness, Random(seed))
        campaign.begin()
        for _ in range(NUM_FAULTS):
            campaign.strike_at_random()
        campaign.finish(harness.config)


@contextmanager
def job(
    data: Path,
    folder: Path,
    num_groups: int,
    num_ranks: int,
    sync: list[str],
    network: EmulatedHosts | None,
) -> Iterator[ElasticHarness]:
    """A job with some rows to spare; with a network its checkpoints go to a host of their own."""
    settings = ["training.epochs=4", "checkpoint.every_steps=10", *sync]
    with ExitStack() as stack:
        secrets = SecretEnv()
        if network:
            where = network.addresses[STORE_HOST], network.network(STORE_HOST)
            store = stack.enter_context(run_object_store(*where))
            settings.append(f"checkpoint.path={store.url(folder.name)}")
            secrets = SecretEnv(store.environment)
        config = elastic_config(data, folder / "run", num_groups, num_ranks, *settings)
        config = replace(config, secrets=secrets)
        yield stack.enter_context(
            ElasticHarness(config, folder / "harness", num_groups, network=network)
        )


def test_a_network_that_fails_in_parts_costs_at_most_the_group_behind_it(
    small_movielens: Path, tmp_path: Path, network: EmulatedHosts | None
) -> None:
    if network is None:
        pytest.skip(missing_requirement())
    with job(small_movielens, tmp_path, 3, 1, [*PLAIN, "training.epochs=2"], network) as harness:
        campaign = Campaign(harness, Random(0))
        campaign.begin()
        campaign.cut_off(1, "control link")
        campaign.cut_off(2, "data link")
        campaign.cut_off_coordinator(1.5 * harness.config.spec.recovery.heartbeat_timeout_s)
        campaign.stop_store()
        campaign.finish(harness.config)


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
