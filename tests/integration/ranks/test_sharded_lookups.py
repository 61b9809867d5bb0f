"""Sharded lookups against one unsharded model: weights, means and sequences, sharding by sharding.

TorchRec's own weighted mean depends on the sharding, and its gradient is wrong on CPU; ours is a
sum divided in the model, which this test holds to plain autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from tests.harness.ranks import run_ranks
from tests.harness.small_model import dlrm_spec, plain_batch, rank_device
from tests.harness.wait import scaled
from trainer.data.batches import Batch
from trainer.models.networks import Recommender, build_model
from trainer.parallel.mesh import build_groups
from trainer.parallel.model import TwoDParallel
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


@torch.no_grad()
def unsharded_like(model: TwoDParallel, spec: JobSpec) -> Recommender:
    """The same model whole on this rank, with random tables and the dense part of `model`.

    Queries prefer some vectors in both, unlike the 0 that they start with.
    """
    whole = build_model(spec, torch.device("cpu"))
    arch = whole.network.sparse_arch
    arch.embedding_bag_collection.to_empty(device="cpu")
    arch.embedding_collection.to_empty(device="cpu")
    dense = {n.rpartition("network.")[2]: p for n, p in model.named_parameters()}
    torch.manual_seed(8)
    for name, parameter in whole.network.named_parameters():
        if "embedding" in name:
            parameter.copy_(0.3 * torch.randn(NUM_ROWS, DIM))
        elif name.endswith("query"):
            parameter.copy_(dense[name].copy_(torch.randn(DIM)))
        else:
            parameter.copy_(dense[name])
    return whole


def train_beside_unsharded(spec: JobSpec) -> dict[str, Any]:
    """Train the tables of both models; losses of both, and (shard, the whole table's part)s."""
    groups = build_groups(layout_of(spec), rank_device(), timeout_s=scaled(30))
    model, plans = build_parallel_model(spec, groups)
    whole = unsharded_like(model, spec)
    tables = {n.split(".")[-2]: p for n, p in whole.named_parameters() if "embedding" in n}
    shards = model.table_shards()
    parts = [
        tables[s.table][s.row_offset :, s.column_offset :][: s.weight.shape[0], : s.weight.shape[1]]
        for s in shards
    ]
    for shard, part in zip(shards, parts, strict=True):
        shard.weight.detach().copy_(part.detach())
    start = [part.detach().clone() for part in parts]
    losses = []
    for step in range(NUM_STEPS):
        batch = make_batch(spec, step, groups.rank)
        (loss, _), (expected, _) = model(batch), whole(batch)
        loss.backward()
        for table, grad in zip(
            tables.values(), torch.autograd.grad(expected, [*tables.values()]), strict=True
        ):
            dist.all_reduce(grad, dist.ReduceOp.AVG)
            table.detach().sub_(LEARNING_RATE * grad)
        losses.append((loss.item(), expected.item()))
    return {
        "sharding": {plan.name: plan.sharding_type for plan in plans},
        "losses": losses,
        "moved": [not torch.equal(part, before) for part, before in zip(parts, start, strict=True)],
        "shards": [(s.weight.detach(), p.detach()) for s, p in zip(shards, parts, strict=True)],
    }


def test_sharded_lookups_equal_one_unsharded_model() -> None:
    ranks = run_ranks(train_beside_unsharded, 2, make_spec("dcn_v2"))
    for name, sharding in ranks[0]["sharding"].items():
        assert name.endswith(sharding)
    for rank in ranks:
        for loss, expected in rank["losses"]:
            assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
        for shard, part in rank["shards"]:
            torch.testing.assert_close(shard, part, atol=1e-6, rtol=0)
        assert all(rank["moved"])
    num_numbers = sum(shard.numel() for rank in ranks for shard, _ in rank["shards"])
    assert num_numbers == len(ranks[0]["sharding"]) * NUM_ROWS * DIM, "the whole of every table"
