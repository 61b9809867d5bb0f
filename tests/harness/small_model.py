"""What the 2D tests run on every rank, and the dense single-process reference they compare with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as FusedKernel,
)
from torch import nn
from torchrec import KeyedJaggedTensor

from tests.harness.wait import scaled
from trainer.data.batches import Batch
from trainer.layout.layout import Layout, MeshLayout, WorkerSite
from trainer.parallel.mesh import MeshGroups, build_groups
from trainer.parallel.model import TableShard, TwoDParallel
from trainer.parallel.optimizer import dense_optimizer
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import build_sync, is_sync_step
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

TABLE_ROWS = {"users": 37, "movies": 53, "genres": 11}
FEATURES = {"user": "users", "movie": "movies", "history": "movies", "genres": "genres"}
EMBEDDING_DIM = 8
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One training run: T, L, placement, how tables are sharded and how copies are synced."""

    world_size: int
    shard_group_size: int
    placement: str = "intra_host"
    sharding: tuple[str, ...] = ("row_wise",)
    sync_every: int = 1
    optimizer_state: str = "every"
    moment_scale: float | str = "auto"
    num_steps: int = 5
    batch_size: int = 8
    interleaved: bool = False  # two hosts whose workers the cluster numbered in turn

    @property
    def sites(self) -> list[WorkerSite]:
        """Where each rank runs."""
        if self.interleaved:
            return [WorkerSite(r, f"host-{r % 2}", r // 2) for r in range(self.world_size)]
        return [WorkerSite(r, "host", r) for r in range(self.world_size)]

    @property
    def mesh(self) -> MeshLayout:
        """The groups that these workers form."""
        layout = Layout(self.world_size, self.shard_group_size, self.placement)
        return MeshLayout.build(layout, self.sites)


def dlrm_spec(
    tables: list[dict[str, Any]],
    features: list[dict[str, Any]],
    optimizer: dict[str, Any],
    parallelism: dict[str, Any],
    *,
    batch_size: int,
    arch: str = "dlrm",
    over_arch: tuple[int, ...] = (16, 1),
    loss: str = "mse",
    **sections: Any,
) -> JobSpec:
    """A small job with one dense feature; its dense part ends in the width of the tables."""
    return validate_spec(
        {
            "name": "case",
            "data": {"path": "unused", "label": {"column": "y"}, "batch_size": batch_size},
            "features": [{"name": "age", "type": "dense"}, *features],
            "embedding_tables": tables,
            "model": {
                "arch": arch,
                "dense_arch": {"layer_sizes": [tables[0]["embedding_dim"]]},
                "over_arch": {"layer_sizes": list(over_arch)},
                "tasks": [{"loss": loss}],
            },
            "optimizer": optimizer,
            "parallelism": parallelism,
            **sections,
        }
    )


def pooled_features(table_of: dict[str, str]) -> list[dict[str, Any]]:
    """Features of lists of ids, by the table of each."""
    return [{"name": name, "type": "id_list", "table": table} for name, table in table_of.items()]


def spec_of(case: Case) -> JobSpec:
    """A job with three tables, one of them shared by two features."""
    tables = [
        {
            "name": name,
            "num_embeddings": rows,
            "embedding_dim": EMBEDDING_DIM,
            "constraints": {"sharding_types": list(case.sharding)},
        }
        for name, rows in TABLE_ROWS.items()
    ]
    optimizer = {
        "sparse": {"lr": 0.1, "eps": 0.01},
        "dense": {"name": "sgd", "lr": 0.05},
    }
    parallelism = {
        "workers": case.world_size,
        "shard_group_size": case.shard_group_size,
        "placement": case.placement,
        "moment_scale": case.moment_scale,
        "dense": "every_step",  # as in the reference, whatever the placement
        "sync": {"every_steps": case.sync_every, "optimizer_state": case.optimizer_state},
    }
    features = pooled_features(FEATURES)
    return dlrm_spec(tables, features, optimizer, parallelism, batch_size=case.batch_size)


def fused_kernel(table_rows: Sequence[int], dim: int = 4, **options: Any) -> FusedKernel:
    """FBGEMM's kernel of tables on the CPU, with random weights."""
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = FusedKernel([(rows, dim, *place) for rows in table_rows], **options)
    kernel.init_embedding_weights_uniform(-1, 1)
    return kernel


def shards_of(kernel: FusedKernel) -> list[TableShard]:
    """The tables of a kernel, each a shard."""
    weights, states = kernel.split_embedding_weights(), kernel.get_optimizer_state()
    return [
        TableShard(f"table_{i}", kernel, i, weight, dict(state), 0, 0)
        for i, (weight, state) in enumerate(zip(weights, states, strict=True))
    ]


def plain_batch(
    dense: torch.Tensor, sparse: KeyedJaggedTensor, label: torch.Tensor, **fields: Any
) -> Batch:
    """A batch whose labels [B, 1] are as they stand and whose rows weigh 1 each."""
    num_rows = len(label)
    plain = {
        "label_offset": torch.zeros(num_rows, 1),
        "label_scale": torch.ones(num_rows, 1),
        "weight": torch.ones(num_rows),
    }
    return Batch(dense=dense, sparse=sparse, label=label, **plain | fields)


def make_batch(step: int, rank: int, batch_size: int) -> Batch:
    """The rows of one rank at one step: seeded, with duplicates and empty bags."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES), batch_size), generator=generator)
    values = [
        torch.randint(0, TABLE_ROWS[table], (int(lengths[i].sum()),), generator=generator)
        for i, table in enumerate(FEATURES.values())
    ]
    return plain_batch(
        torch.randn(batch_size, 1, generator=generator),
        KeyedJaggedTensor(
            keys=list(FEATURES), values=torch.cat(values), lengths=lengths.flatten().int()
        ),
        torch.randn(batch_size, 1, generator=generator),
    )


def initial_table(name: str) -> torch.Tensor:
    """Starting weights of a table, the same in every layout."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(TABLE_ROWS[name], EMBEDDING_DIM, generator=generator)


def local_shards(value: Any) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """(local tensor, offset in the table) of each shard of a DTensor."""
    wrapper = value.to_local()
    offsets = [tuple(offset) for offset in wrapper.local_offsets()]
    # A rank without a shard of a table still has an offset.
    return list(zip(wrapper.local_shards(), offsets, strict=False))


def set_tables(model: TwoDParallel) -> None:
    """Write `initial_table` into this rank's shards."""
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if ".embedding_bags." not in key:
                continue
            table = initial_table(key.split(".")[-2])
            for shard, (row, column) in local_shards(value):
                rows, columns = shard.shape
                shard.copy_(table[row : row + rows, column : column + columns])


def gather_tables(model: TwoDParallel) -> dict[str, torch.Tensor]:
    """Whole tables of this rank's own copy, put together over its sharding group."""
    mine = [
        (key.split(".")[-2], row, shard.detach().clone())
        for key, value in model.state_dict().items()
        if ".embedding_bags." in key
        for shard, (row, _) in local_shards(value)
    ]
    shards: list[Any] = [None] * model.groups.layout.shard_group_size
    dist.all_gather_object(shards, mine, group=model.groups.sharding_group)
    tables = {n: torch.full((r, EMBEDDING_DIM), torch.nan) for n, r in TABLE_ROWS.items()}
    for name, row, shard in (item for items in shards for item in items):
        tables[name][row : row + shard.shape[0]] = shard
    return tables


def dense_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters outside the tables, by their name inside the network."""
    return {
        name.rpartition("network.")[2]: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "embedding" not in name
    }


def form_groups(case: Any, device: torch.device = _CPU) -> MeshGroups:
    """The groups of `case`, which has `sites` and a `mesh`, around this rank."""
    site = case.sites[dist.get_rank()]
    os.environ["LOCAL_RANK"] = str(site.local_rank)
    return build_groups(case.mesh.layout, device, timeout_s=scaled(30), host=site.host)


def initial_copy(case: Case) -> dict[str, Any]:
    """What a rank holds before the first step, and who holds the same shards."""
    groups = form_groups(case)
    torch.rand(groups.rank + 1)  # ranks must start equal even when their generators differ
    model, _ = build_parallel_model(spec_of(case), groups)
    return {
        "tables": gather_tables(model),
        "dense": dense_parameters(model),
        "timeouts_s": [
            group._get_backend(groups.device).options._timeout.total_seconds()
            for group in (groups.sharding_group, groups.replica_group, groups.global_group)
        ],
    }


def train_2d(case: Case) -> dict[str, Any]:
    """Train `case` on this rank; its copy of the tables, its dense part and its group's ranks."""
    spec = spec_of(case)
    groups = form_groups(case)
    model, plans = build_parallel_model(spec, groups)
    set_tables(model)
    start = dense_parameters(model)
    optimizer = dense_optimizer(model, spec.optimizer.dense)
    sync = build_sync(model, spec)
    for step in range(1, case.num_steps + 1):
        optimizer.zero_grad()
        loss, _ = model(make_batch(step, groups.rank, case.batch_size))
        loss.backward()
        optimizer.step()
        if is_sync_step(step, spec.parallelism.sync):
            sync()
    return {
        "tables": gather_tables(model),
        "dense": dense_parameters(model),
        "dense_start": start,
        "sharding": {plan.name: plan.sharding_type for plan in plans},
        "sharding_ranks": groups.sharding_ranks,
    }


class DenseReference:
    """M copies of the model as plain tensors: no sharding, no TorchRec, no FBGEMM."""

    def __init__(self, case: Case, dense_start: dict[str, torch.Tensor]) -> None:
        from trainer.models.networks import build_model

        self.case = case
        self.groups = case.mesh.sharding_groups
        spec = spec_of(replace(case, moment_scale="auto"))
        self.network = build_model(spec, _CPU).network
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if "embedding_bags" not in name:
                    parameter.copy_(dense_start[name])
        self.tables = [{n: initial_table(n) for n in TABLE_ROWS} for _ in self.groups]
        self.moments = [{n: torch.zeros(r) for n, r in TABLE_ROWS.items()} for _ in self.groups]
        self.scale = float(len(self.groups) if case.moment_scale == "auto" else case.moment_scale)

    def run(self) -> None:
        """Train all copies, averaging them as the case says."""
        for step in range(1, self.case.num_steps + 1):
            self._step(step)
            if step % self.case.sync_every == 0:
                average(self.tables)
                if self.case.optimizer_state == "every":
                    average(self.moments)

    def _step(self, step: int) -> None:
        dense = [p for n, p in self.network.named_parameters() if "embedding_bags" not in n]
        dense_grads = [torch.zeros_like(p) for p in dense]
        for copy, ranks in enumerate(self.groups):
            leaves = {n: t.clone().requires_grad_() for n, t in self.tables[copy].items()}
            losses = [self._loss(leaves, make_batch(step, r, self.case.batch_size)) for r in ranks]
            grads = torch.autograd.grad(
                torch.stack(losses).sum(), [*leaves.values(), *dense], allow_unused=True
            )
            for name, grad in zip(leaves, grads, strict=False):
                self._update_rows(copy, name, grad / len(ranks))
            for total, grad in zip(dense_grads, grads[len(leaves) :], strict=True):
                total += grad
        with torch.no_grad():
            for parameter, grad in zip(dense, dense_grads, strict=True):
                parameter -= 0.05 * grad / self.case.world_size

    def _loss(self, tables: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        pooled = []
        for feature, table in FEATURES.items():
            jagged = batch.sparse[feature]
            offsets = jagged.offsets().long()
            bag = nn.functional.embedding_bag(
                jagged.values(), tables[table], offsets[:-1], mode="sum"
            )
            pooled.append(bag)
        order = self.network.sparse_arch.sparse_feature_names
        by_name = dict(zip(FEATURES, pooled, strict=True))
        sparse = torch.stack([by_name[name] for name in order], dim=1)
        hidden = self.network.dense_arch(batch.dense)
        crossed = self.network.inter_arch(dense_features=hidden, sparse_features=sparse)
        outputs = self.network.over_arch(crossed)
        return nn.functional.mse_loss(outputs, batch.label)

    @torch.no_grad()
    def _update_rows(self, copy: int, name: str, grad: torch.Tensor) -> None:
        """Algorithm 1 of the paper: v += mean(g^2); w -= lr / (sqrt(v / c) + eps) * g."""
        moment = self.moments[copy][name]
        moment += grad.square().mean(dim=1)
        step = 0.1 / ((moment / self.scale).sqrt() + 0.01)
        self.tables[copy][name] -= step[:, None] * grad


def average(copies: list[dict[str, torch.Tensor]]) -> None:
    """Let each copy of a table hold the mean of all of them."""
    for name in copies[0]:
        mean = torch.stack([copy[name] for copy in copies]).mean(dim=0)
        for copy in copies:
            copy[name] = mean.clone()
