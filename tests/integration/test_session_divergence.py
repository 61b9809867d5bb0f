"""A session whose copies come apart: the job hears which, and goes on or ends as it asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import make_config
from trainer import failures
from trainer.events import Divergence, read_record
from trainer.parallel.divergence import DivergenceGuard
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir
from trainer.worker import run_worker

SHORT = ("training.max_steps=12", "checkpoint.every_steps=100", "data.split.validation=null")


def train_with_a_flipped_bit(config: WorkerConfig) -> tuple[str, str]:
    """Flip a bit on rank 1 before the first check; (reason, message) of this rank's end."""
    original = DivergenceGuard.check

    def flipping(guard: DivergenceGuard) -> Any:
        if dist.get_rank() == 1 and not hasattr(guard, "flipped"):
            guard.flipped = True  # type: ignore[attr-defined]
            shard = guard._model.table_shards()[0]
            shard.weight.view(torch.int32)[0, 0] ^= 1
        return original(guard)

    DivergenceGuard.check = flipping  # type: ignore[method-assign]
    try:
        run_worker(config)
    except failures.WorkerFailure as failure:
        return failure.reason, failure.message
    return failures.COMPLETED, ""


def divergences(config: WorkerConfig) -> list[Divergence]:
    """What the job was told of copies that differ."""
    stream = RunDir(config.run_dir).attempt(config.attempt_id).stream_path("workers-0")
    records = [read_record(line, now=0.0) for line in stream.read_bytes().splitlines()]
    return [record for record in records if isinstance(record, Divergence)]


@pytest.mark.parametrize(
    ("action", "reason"),
    [("fail", failures.DIVERGED), ("rebroadcast", failures.COMPLETED)],
)
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_flipped_bit_is_named_and_ends_the_run_only_if_asked(
    small_movielens: Path, tmp_path: Path, action: str, reason: str, overlap: str
) -> None:
    config = make_config(
        small_movielens,
        tmp_path,
        *SHORT,
        f"parallelism.divergence_check={{every_syncs: 1, action: {action}}}",
        f"parallelism.sync.overlap={overlap}",
    )
    ends = run_ranks(train_with_a_flipped_bit, 4, config)
    (found,) = divergences(config)
    where = f"{found.table}, shard {found.shard}, on rank(s) 1" if action == "fail" else ""
    assert [end[0] for end in ends] == [reason] * 4
    assert all(where in message for _, message in ends)
    assert (found.step, found.ranks, found.action) == (4, [1], action)
    assert found.table in {table.name for table in config.spec.embedding_tables}
