"""Groups that are failure domains over NCCL, struck again and again: as `test_chaos` on gloo."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.gpu import NEEDS_CUDA
from tests.harness.chaos import Campaign, elastic_config
from tests.harness.elastic import ElasticHarness

pytestmark = [*NEEDS_CUDA, pytest.mark.timeout(600)]

EXACT = "{every_steps: 2}"
HALF_OVERLAP = "{every_steps: 2, dtype: bf16, overlap: true}"


@pytest.mark.parametrize(("num_groups", "sync"), [(3, EXACT), (2, HALF_OVERLAP)])
def test_a_job_gets_over_whatever_befalls_it(
    num_groups: int, sync: str, small_movielens: Path, tmp_path: Path
) -> None:
    settings = [f"parallelism.sync={sync}", "training.epochs=4", "checkpoint.every_steps=10"]
    config = elastic_config(
        small_movielens, tmp_path / "run", num_groups, 1, "resources.device=cuda", *settings
    )
    with ElasticHarness(config, tmp_path / "harness", num_groups) as harness:
        campaign = Campaign(harness, Random(0))
        campaign.begin()
        for phase in ("lookup", "exchange", "before_vote"):
            campaign.strike("sigkill", phase)
        campaign.strike("sigstop", "exchange")
        for _ in range(2):
            campaign.strike_at_random()
        campaign.finish(config)
