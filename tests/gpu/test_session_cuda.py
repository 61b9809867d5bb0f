"""A whole job on NCCL ranks: it trains, syncs, validates, saves, and resumes where it was."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu import NEEDS_CUDA
from tests.gpu.cuda_cases import world_sizes
from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble, make_config, next_run, told, train_session
from trainer.protocol.events import Metrics, WorkersStarted

pytestmark = NEEDS_CUDA

JOB = (
    "training.max_steps=24",
    "training.validate_every_steps=6",
    "training.dense_precision=tf32",
    "parallelism.dense=at_sync",
    "checkpoint.every_steps=8",
    "resources.device=cuda",
)


def _values(run_dir: Path, name: str) -> dict[int, float]:
    return {
        report.step: report.values[name]
        for report in told(run_dir, Metrics)
        if name in report.values
    }


def test_a_job_that_was_stopped_goes_on_to_the_state_of_one_that_was_not(
    small_movielens: Path, tmp_path: Path
) -> None:
    world_size, shard_group_size = world_sizes()
    size = (
        f"parallelism.workers={world_size}",
        f"parallelism.shard_group_size={shard_group_size}",
    )
    whole = make_config(small_movielens, tmp_path / "whole", *JOB, *size)
    straight = run_ranks(train_session, world_size, whole, backend="nccl")
    cut, longer = (
        make_config(small_movielens, tmp_path / "cut", *JOB, *size, f"training.max_steps={steps}")
        for steps in (16, 24)
    )
    run_ranks(train_session, world_size, cut, backend="nccl")
    resumed = run_ranks(train_session, world_size, next_run(longer), backend="nccl")

    assert told(tmp_path / "cut", WorkersStarted)[-1].resumed_step == 16
    expected = assemble(straight)
    for name, table in assemble(resumed).items():
        torch.testing.assert_close(table, expected[name], atol=1e-5, rtol=0, msg=name)
    for found, wanted in zip(resumed, straight, strict=True):
        assert found["moved"] and found["state"].position == wanted["state"].position
        torch.testing.assert_close(found["dense"], wanted["dense"], atol=1e-5, rtol=0)
    losses = _values(tmp_path / "whole", "train/loss")
    assert losses[max(losses)] < losses[min(losses)]
    assert min(_values(tmp_path / "whole", "memory/peak_allocated_bytes").values()) > 0
