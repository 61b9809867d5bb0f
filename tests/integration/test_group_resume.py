"""Groups that are failure domains, resumed: one group goes on bitwise, dropout included."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.integration.elastic_house import ElasticHouse
from tests.integration.test_movielens_arch import example_config
from trainer.elastic.checkpoint import list_committed
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir

JOB = (
    "data.batch_size=16",
    "parallelism.workers={min: 1, max: 2}",
    "parallelism.shard_group_size=1",
    "parallelism.placement=inter_host",
    "parallelism.sync.every_steps=2",
    "recovery.heartbeat_timeout_s=4",
    "recovery.exchange_timeout_s=4",
    "training.max_steps=24",
    "training.accumulate_steps=1",
    "training.early_stopping=null",
    "checkpoint.every_steps=8",
    "checkpoint.keep_last=9",
    "checkpoint.keep_best=false",
)


def states_of(config: WorkerConfig, folder: Path) -> list[str]:
    """Hashes of tables, moments and dense part by commit, of a run of one group."""
    with ElasticHouse(config, folder, 1) as house:
        house.wait_to_end()
        committed = house.of("committed")
    by_commit = {record["commit"]: record["hash"] for record in committed}
    # Commits that train nothing leave all as it was; a run that goes on begins with one.
    return list(dict.fromkeys(by_commit[commit] for commit in sorted(by_commit)))


def test_a_run_of_one_group_goes_on_bitwise_from_its_checkpoint(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = example_config(small_movielens, tmp_path / "whole", *JOB)
    assert config.spec.model.transformer and config.spec.model.transformer.dropout > 0
    whole = states_of(config, tmp_path / "house")
    halfway, *_ = sorted(
        list_committed(RunDir(tmp_path / "whole").checkpoints_dir), key=lambda f: f.commit.step
    )
    assert 0 < halfway.commit.step < 24
    again = replace(config, run_dir=tmp_path / "again")
    folder = RunDir(again.run_dir).checkpoints_dir
    shutil.copytree(halfway.path, folder / halfway.path.name)
    resumed = states_of(again, tmp_path / "house_again")
    assert len(resumed) > 4
    assert resumed == whole[-len(resumed) :]
