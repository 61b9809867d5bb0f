"""Sharded lookups against one unsharded model: weights, means and sequences, sharding by sharding.

TorchRec's own weighted mean depends on the sharding, and its gradient is wrong on CPU; ours is a
sum divided in the model, which this test holds to plain autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec import KeyedJaggedTensor

from tests.harness.ranks import run_ranks
from tests.harness.small_model import dlrm_spec, plain_batch
from tests.harness.wait import scaled
from trainer.data.batches import Batch
from trainer.models.networks import Recommender, build_model
from trainer.parallel.mesh import build_groups
from trainer.parallel.sharding import build_parallel_model
from trainer.spec.job import JobSpec
from trainer.training.worker import layout_of

SHARDINGS = ("table_wise", "row_wise", "column_wise")
NUM_ROWS, DIM, BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 13, 8, 6, 3, 0.5
LIMIT = 4


def make_spec(arch: str) -> JobSpec:
    """A weighted mean, a mean, a sum, a weighted sequence for each way of sharding; fused SGD."""
    features, tables = [], []
    for sharding in SHARDINGS:
        for kind in ("weighted", "mean", "sum", "sequence"):
            name = f"{kind}_{sharding}"
            feature = {"name": name, "type": "id_list", "table": name}
            feature |= {"weights_column": "w"} if kind in ("weighted", "sequence") else {}
            feature |= {"type": "sequence", "max_length": LIMIT} if kind == "sequence" else {}
            features.append(feature)
            tables.append(
                {
                    "name": name,
                    "num_embeddings": NUM_ROWS,
                    "embedding_dim": DIM,
                    "pooling": "mean" if kind in ("weighted", "mean") else "sum",
                    "constraints": {"sharding_types": [sharding], "min_partition": 4},
                }
            )
    optimizer = {"sparse": {"name": "sgd", "lr": LEARNING_RATE}}
    parallelism = {"workers": 2, "shard_group_size": 2, "planner": {"bandwidths": "default"}}
    return dlrm_spec(
        tables, features, optimizer, parallelism, batch_size=BATCH_SIZE, arch=arch, over_arch=(8, 1)
    )


def make_batch(spec: JobSpec, step: int, rank: int) -> Batch:
    """Seeded rows with empty lists, repeated ids and negative weights."""
    generator = torch.Generator().manual_seed(100 * step + rank)

    def jagged(names: list[str], is_weighted: bool) -> KeyedJaggedTensor:
        lengths = torch.randint(0, LIMIT + 1, (len(names) * BATCH_SIZE,), generator=generator)
        num_ids = int(lengths.sum())
        return KeyedJaggedTensor(
            keys=names,
            values=torch.randint(0, NUM_ROWS, (num_ids,), generator=generator),
            lengths=lengths.int(),
            weights=torch.randn(num_ids, generator=generator) if is_weighted else None,
        )

    return plain_batch(
        dense=torch.randn(BATCH_SIZE, 1, generator=generator),
        sparse=jagged([f.name for f in spec.pooled_features], is_weighted=True),
        label=torch.randn(BATCH_SIZE, 1, generator=generator),
        sequences=jagged([f.name for f in spec.sequence_features], is_weighted=True),
    )


def initial_table(spec: JobSpec, name: str) -> torch.Tensor:
    index = [table.name for table in spec.embedding_tables].index(name)
    generator = torch.Generator().manual_seed(index)
    return 0.3 * torch.randn(NUM_ROWS, DIM, generator=generator)


@torch.no_grad()
def spread_queries(model: torch.nn.Module) -> None:
    """Queries that prefer some vectors, unlike the 0 that they start with."""
    generator = torch.Generator().manual_seed(8)
    for name, parameter in model.named_parameters():
        if name.endswith("query"):
            parameter.copy_(torch.randn(DIM, generator=generator))


def train_sharded(spec: JobSpec) -> dict[str, Any]:
    """Train the tables only, on this rank; its shards, its losses and the dense part."""
    groups = build_groups(layout_of(spec), torch.device("cpu"), timeout_s=scaled(30))
    model, plans = build_parallel_model(spec, groups)
    spread_queries(model)
    shards = model.table_shards()
    places = [(s.table, s.row_offset, s.column_offset, s.weight) for s in shards]
    for table, row, column, weight in places:
        rows, columns = weight.shape
        whole = initial_table(spec, table)
        weight.detach().copy_(whole[row : row + rows, column : column + columns])
    losses = []
    for step in range(NUM_STEPS):
        loss, _ = model(make_batch(spec, step, groups.rank))
        loss.backward()
        losses.append(loss.item())
    dense = {n: p.detach() for n, p in model.named_parameters() if "embedding" not in n}
    return {
        "sharding": {plan.name: plan.sharding_type for plan in plans},
        "shards": [(*place, weight.detach().clone()) for *place, weight in places],
        "losses": losses,
        "dense": {name.rpartition("network.")[2]: value for name, value in dense.items()},
    }


def whole_tables(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tables: dict[str, torch.Tensor] = {}
    for name, row, column, shard in (item for rank in ranks for item in rank["shards"]):
        table = tables.setdefault(name, torch.full((NUM_ROWS, DIM), torch.nan))
        table[row : row + shard.shape[0], column : column + shard.shape[1]] = shard
    return tables


def unsharded(spec: JobSpec, dense: dict[str, torch.Tensor]) -> Recommender:
    """The same model in one process, with the given dense part."""
    model = build_model(spec, torch.device("cpu"))
    arch = model.network.sparse_arch
    arch.embedding_bag_collection.to_empty(device="cpu")
    arch.embedding_collection.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.network.named_parameters():
            given = dense.get(name)
            parameter.copy_(initial_table(spec, name.split(".")[-2]) if given is None else given)
    return model


def train_unsharded(model: Recommender, spec: JobSpec) -> list[list[float]]:
    """Train the tables by autograd and plain SGD; losses by step and rank."""
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    all_losses = []
    for step in range(NUM_STEPS):
        losses = [model(make_batch(spec, step, rank))[0] for rank in range(2)]
        grads = torch.autograd.grad((losses[0] + losses[1]) / 2, tables)
        with torch.no_grad():
            for table, grad in zip(tables, grads, strict=True):
                table -= LEARNING_RATE * grad
        all_losses.append([loss.item() for loss in losses])
    return all_losses


def test_sharded_lookups_equal_one_unsharded_model() -> None:
    spec = make_spec("dcn_v2")
    ranks = run_ranks(train_sharded, 2, spec)
    for name, sharding in ranks[0]["sharding"].items():
        assert name.endswith(sharding)
    model = unsharded(spec, ranks[0]["dense"])
    losses = train_unsharded(model, spec)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor([r["losses"] for r in ranks]).T, atol=1e-6, rtol=1e-6
    )
    found = whole_tables(ranks)
    tables = {n.split(".")[-2]: p for n, p in model.named_parameters() if "embedding" in n}
    assert set(found) == set(tables)
    for name, table in tables.items():
        assert not torch.equal(table, initial_table(spec, name))
        torch.testing.assert_close(found[name], table.detach(), atol=1e-6, rtol=0, msg=name)
