"""Pausing groups that are failure domains, without Ray: one checkpoint for all, and no row lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from tests.integration.chaos import Campaign, elastic_config
from tests.integration.elastic_house import ElasticHouse
from tests.integration.object_store import run_object_store
from trainer.elastic import stop_request
from trainer.elastic.checkpoint import list_committed
from trainer.elastic.checkpoint_folder import checkpoints_of
from trainer.elastic.stop_request import StopRequest
from trainer.failures import PAUSED
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir
from trainer.secret_env import SecretEnv


def test_the_leader_saves_what_is_committed_and_groups_go_on_from_there(
    small_movielens: Path, tmp_path: Path
) -> None:
    settings = ("training.epochs=1", "checkpoint.every_steps=1000000")
    config = elastic_config(small_movielens, tmp_path / "run", 2, 1, *settings)
    _save_and_go_on(config, tmp_path)


def test_groups_save_to_s3_and_go_on_from_there(small_movielens: Path, tmp_path: Path) -> None:
    with run_object_store() as store:
        settings = (
            "training.epochs=1",
            "checkpoint.every_steps=20",
            f"checkpoint.path={store.url('runs')}",
        )
        config = elastic_config(small_movielens, tmp_path / "run", 2, 1, *settings)
        with store.failing(rates={"503": 0.05, "cut": 0.02}, seed=1):
            _save_and_go_on(replace(config, secrets=SecretEnv(store.environment)), tmp_path)
    assert not RunDir(config.run_dir).checkpoints_dir.exists()


def _save_and_go_on(config: WorkerConfig, tmp_path: Path) -> None:
    checkpoints = checkpoints_of(config.run_dir, config.spec.checkpoint.path)
    with ElasticHouse(config, tmp_path / "house", 2) as house:
        Campaign(house, Random(0)).begin()
        commit = house.commit
        _pause(house, config)
        saved = list_committed(checkpoints)[-1]
        assert saved.commit.commit >= commit > 0
    again = replace(config, attempt_id="job-x-a1")
    with ElasticHouse(again, tmp_path / "again", 2) as house:
        house.wait_for(lambda: house.of("committed"), 60, "the groups train again")
        assert min(record["commit"] for record in house.of("committed")) > saved.commit.commit


def _pause(house: ElasticHouse, config: WorkerConfig) -> None:
    """Ask as a driver does, and wait for the mark."""
    files = RunDir(config.run_dir).attempt(config.attempt_id)
    files.root.mkdir(parents=True, exist_ok=True)
    stop_request.ask(files, StopRequest(run_index=0, cause=PAUSED))
    house.wait_for(lambda: stop_request.has_stopped(files, 0), 60, "a checkpoint for the pause")
