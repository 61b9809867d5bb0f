"""Sessions with dynamic tables on gloo ranks: what the tests of managed collision run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchrec import JaggedTensor

from tests.harness.sessions import make_config, open_session, snapshot
from trainer.parallel.sharding import ids_by_table, settle
from trainer.protocol.worker_config import WorkerConfig
from trainer.training.session import Session
from trainer.training.worker import train

NUM_ROWS = 64
# A table of pooled features, and one of a sequence.
DYNAMIC = (
    "parallelism.sync=null",
    # Measured ones make another plan now and then, and with it other initial weights.
    "parallelism.planner.bandwidths=default",
    f"embedding_tables[1]={{name: movies, num_embeddings: {NUM_ROWS}, embedding_dim: 16, "
    "dynamic: {eviction: distance_lfu, eviction_interval: 3, num_buckets: 4}}",
    f"embedding_tables[4]={{name: liked_movies, num_embeddings: {NUM_ROWS}, embedding_dim: 16, "
    "dynamic: {eviction: lru, eviction_interval: 5, num_buckets: 8}}",
    "features[4].type=sequence",
    "training.epochs=1",
    "training.validate_every_steps=1000",
)


def dynamic_config(
    data: Path, run_dir: Path, size: int, *overrides: str, run_index: int = 0
) -> WorkerConfig:
    """The demo job with a dynamic table of movies, one copy over `size` workers."""
    sizes = (f"parallelism.workers={size}", f"parallelism.shard_group_size={size}")
    return make_config(data, run_dir, *sizes, *DYNAMIC, *overrides, run_index=run_index)


def train_dynamic(config: WorkerConfig) -> dict[str, Any]:
    """Train to the end; the model, the ids of each row and the metrics of every report."""
    reports: list[dict[str, float]] = []
    publish = Session.publish

    def noting(self: Session, values: dict[str, float]) -> None:
        reports.append(values)
        publish(self, values)

    Session.publish = noting  # type: ignore[method-assign]
    try:
        session = open_session(config)
        train(session)
    finally:
        Session.publish = publish  # type: ignore[method-assign]
    return {**snapshot(session), "ids": ids_of(session), "reports": reports}


def replace_ids(config: WorkerConfig) -> dict[str, float]:
    """Train, then let ids that are new take the place of those that have rows.

    What is left of these: the largest moment and weight of the rows that have new ids, and of those
    rows before.
    """
    session = open_session(config)
    train(session)
    ids = dict(ids_by_table(session.model))["movies"]
    (shard,) = (each for each in session.model.table_shards() if each.table == "movies")
    (moments,) = shard.states.values()
    before, weights = moments.clone(), shard.weight.clone()
    for _ in range(50):
        seen = JaggedTensor(values=torch.arange(10**6, 10**6 + 5000), lengths=torch.tensor([5000]))
        ids.profile(ids.preprocess({"movies": seen}))
    settle(session.model)
    is_new = (weights != shard.weight).any(dim=1)
    return {
        "new": int(is_new.sum()),
        "moment_before": float(before[is_new].max()),
        "moment": float(moments[is_new].max()),
        "weight": float(shard.weight[is_new].abs().max()),
    }


def load_dynamic(config: WorkerConfig) -> dict[str, Any]:
    """Restore from the newest checkpoint only."""
    session = open_session(config)
    session.restore()
    return {**snapshot(session), "ids": ids_of(session)}


def ids_of(session: Session) -> dict[str, tuple[int, torch.Tensor]]:
    """By name: first place, and what this rank holds of the state of the ids."""
    found = {}
    for table, ids in ids_by_table(session.model):
        assert ids.output_size() * session.world_size == NUM_ROWS
        for name, buffer in ids.named_buffers():
            if not name.startswith("_"):
                found[f"{table}.{name}"] = (int(ids.rows.min()), buffer.clone())
    return found


def whole_ids(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The state of the ids of the whole table, out of all ranks' parts."""
    names = ranks[0]["ids"]
    return {
        name: torch.cat([part for _, part in sorted((r["ids"][name] for r in ranks), key=_first)])
        for name in names
    }


def _first(part: tuple[int, torch.Tensor]) -> int:
    return part[0]
