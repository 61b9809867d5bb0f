"""A change too large for fp16 in a replica group without rank 0 reaches the job's timeline."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.integration.gloo import run_ranks
from tests.integration.session_cases import make_config
from trainer.events import Note, read_record
from trainer.parallel.groups import build_groups
from trainer.ray_worker import WorkerConfig
from trainer.run_dir import RunDir
from trainer.session import Session
from trainer.worker import layout_of


def overflow_in_shard_one(config: WorkerConfig) -> None:
    """One step, then a change beyond fp16 in one copy of shard 1, then a sync."""
    groups = build_groups(layout_of(config.spec), torch.device("cpu"), timeout_s=30)
    session = Session(config, groups)
    for batch, position, wait_s in session.batches():
        session.train_step(batch, position, wait_s)
        break
    if groups.rank == max(groups.mesh.sharding_groups[0]):
        for shard in session.model.table_shards():
            shard.weight.mul_(1e12)
    session.synchronise()
    session.close()


def test_an_overflow_away_from_rank_0_is_an_event(small_movielens: Path, tmp_path: Path) -> None:
    config = make_config(small_movielens, tmp_path, "parallelism.sync.dtype=fp16")
    run_ranks(overflow_in_shard_one, 4, config)
    outbox = RunDir(tmp_path).attempt(config.attempt_id).stream_path("workers-0").parent
    lines = [line for path in outbox.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    notes = [r for r in (read_record(line, now=0.0) for line in lines) if isinstance(r, Note)]
    (warning,) = [note for note in notes if "fp16" in note.message]
    assert warning.level == "warning"
