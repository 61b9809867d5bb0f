"""Training, saving and loading of small models in any sharding, for the checkpoint tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.small_model import (
    FEATURES,
    TABLE_ROWS,
    dense_parameters,
    dlrm_spec,
    make_batch,
    pooled_features,
    rank_device,
    take_step,
)
from tests.harness.wait import scaled
from trainer.checkpoint import save_load
from trainer.checkpoint.state_dict import load_state, state_to_save
from trainer.layout.layout import Layout
from trainer.parallel.mesh import build_groups
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import build_sync
from trainer.spec.job import JobSpec

EMBEDDING_DIM = 16
NUM_STEPS = 3


@dataclass(frozen=True)
class Sharding:
    """How a model is laid out: T, L, the sharding types of its tables and their least columns.

    Ranks sit on hosts of two. `types` has one type for all tables or one for each, in the order of
    `TABLE_ROWS`.
    """

    world_size: int
    shard_group_size: int
    types: tuple[str, ...]
    min_partition: int | None = None
    placement: str = "intra_host"
    optimizer: str = "row_wise_adagrad"

    @property
    def type_of_table(self) -> dict[str, str]:
        types = self.types if len(self.types) > 1 else self.types * len(TABLE_ROWS)
        return dict(zip(TABLE_ROWS, types, strict=True))


def spec_of(sharding: Sharding) -> JobSpec:
    """A small DLRM job."""
    tables = [
        {
            "name": name,
            "num_embeddings": TABLE_ROWS[name],
            "embedding_dim": EMBEDDING_DIM,
            "constraints": {"sharding_types": [kind], "min_partition": sharding.min_partition},
        }
        for name, kind in sharding.type_of_table.items()
    ]
    parallelism = {
        "workers": sharding.world_size,
        "shard_group_size": sharding.shard_group_size,
        "placement": sharding.placement,
        "planner": {"bandwidths": "default"},
    }
    optimizer = {"sparse": {"name": sharding.optimizer, "lr": 0.1}}
    features = pooled_features(FEATURES)
    return dlrm_spec(tables, features, optimizer, parallelism, batch_size=16)


def build(sharding: Sharding, spec: JobSpec) -> tuple[TwoDParallel, Optimizers]:
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    groups = build_groups(
        Layout(sharding.world_size, sharding.shard_group_size, sharding.placement),
        rank_device(),
        timeout_s=scaled(30),
        host=f"host-{rank // 2}",
    )
    model, plans = build_parallel_model(spec, groups)
    wanted = [table.constraints.sharding_types for table in spec.embedding_tables]
    assert {p.name: (p.sharding_type,) for p in plans} == dict(
        zip((table.name for table in spec.embedding_tables), wanted, strict=True)
    )
    return model, Optimizers(model, spec)


def train(model: TwoDParallel, optimizers: Optimizers, spec: JobSpec, steps: Iterable[int]) -> None:
    """Take `steps`, with a sync after each."""
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=False))
    for step in steps:
        batch = make_batch(step, dist.get_rank(), spec.data.batch_size)
        take_step(model, optimizers, batch, step, NUM_STEPS)
        sync()
    sync.flush()
    sync.close()


def train_and_save(sharding: Sharding, folder: Path) -> dict[str, Any]:
    """Train a few steps and write a checkpoint; what this rank holds."""
    spec = spec_of(sharding)
    model, optimizers = build(sharding, spec)
    train(model, optimizers, spec, steps=range(1, NUM_STEPS + 1))
    state = state_to_save(model, optimizers.combined)
    save_load.save(folder, state, save_load.SharePlanner(model.groups))
    return held(model, optimizers)


def load(sharding: Sharding, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into a fresh model; what this rank then holds."""
    model, optimizers = build(sharding, spec_of(sharding))
    scramble(model, optimizers)
    load_state(folder, model, optimizers.combined)
    return held(model, optimizers)


def refusal_of(attempt: Callable[[], object]) -> str:
    """How an attempt is refused: the error's class and its message."""
    with pytest.raises(save_load.CheckpointError) as refused:
        attempt()
    return f"{refused.typename}: {refused.value}"


@torch.no_grad()
def scramble(model: TwoDParallel, optimizers: Optimizers) -> None:
    """Fill everything with nonsense, so that only what is loaded can be right."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    for shard in model.table_shards():
        tensors += [shard.weight, *shard.states.values()]
    for state in optimizers.combined.state.values():
        tensors += [v for v in state.values() if type(v) is torch.Tensor]
    for tensor in tensors:
        tensor.fill_(-77.0)


def held(model: TwoDParallel, optimizers: Optimizers) -> dict[str, Any]:
    """Shards of tables as (table, row, column, weight, states), and the dense part with state."""
    shards = [
        (
            s.table,
            s.row_offset,
            s.column_offset,
            s.weight.clone(),
            [v.clone() for v in s.states.values()],
        )
        for s in model.table_shards()
    ]
    states = optimizers.combined.state
    for table, weight in model.data_parallel_tables().items():
        values = [value.clone() for value in states.get(weight, {}).values()]
        shards.append((table, 0, 0, weight.detach().clone(), values))
    dense = dense_parameters(model)
    for name, parameter in model.named_parameters():
        if "embedding_bags" not in name:
            dense |= {f"{name}.{k}": v.clone() for k, v in states.get(parameter, {}).items()}
    return {"shards": shards, "dense": dense}


def whole_tables(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Weights and moments [rows, dim] of each table; row-wise moments repeat over their columns.

    Copies of a shard must be bitwise equal and all places filled.
    """
    whole = {
        f"{name}{part}": torch.full((num_rows, EMBEDDING_DIM), torch.nan)
        for name, num_rows in TABLE_ROWS.items()
        for part in ("", ".moments")
    }
    for table, row, column, weight, states in (s for rank in ranks for s in rank["shards"]):
        place = (slice(row, row + len(weight)), slice(column, column + weight.shape[1]))
        parts = [("", weight), *((".moments", _wide(state, weight)) for state in states)]
        for part, values in parts:
            known = whole[f"{table}{part}"][place]
            assert bool(known.isnan().all()) or torch.equal(known, values), f"{table}{part}"
            known.copy_(values)
    assert not any(values.isnan().any() for name, values in whole.items() if "." not in name)
    return whole


def _wide(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return state.unsqueeze(1).expand_as(weight) if state.dim() == 1 else state
