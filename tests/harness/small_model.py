"""Small models, and batches for them, that tests train on every rank; and who reads on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec import KeyedJaggedTensor

from tests.harness.wait import scaled
from trainer.data.batches import Batch
from trainer.layout.layout import Layout, MeshLayout, WorkerSite
from trainer.parallel.collectives import pairwise_sum
from trainer.parallel.mesh import MeshGroups, build_groups
from trainer.parallel.model import TableShard, TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

TABLE_ROWS = {"users": 37, "movies": 53, "genres": 11}
FEATURES = {"user": "users", "movie": "movies", "history": "movies", "genres": "genres"}
EMBEDDING_DIM = 8
_HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim")
# Whose calls these are, by files: TorchRec's, those of kernels in backward passes, of tests' fakes.
_OTHERS = ("/torchrec/distributed/", "/fbgemm_gpu/", "/torch/autograd/graph.py", "/tests/")
_OURS = "/trainer/"


@dataclass(frozen=True)
class Case:
    """One training run: T, L, placement, how tables are sharded and how copies are synced."""

    world_size: int
    shard_group_size: int
    placement: str = "intra_host"
    sharding: tuple[str, ...] = ("row_wise",)
    sync_every: int = 1
    num_steps: int = 5
    batch_size: int = 8

    @property
    def sites(self) -> list[WorkerSite]:
        return [WorkerSite(r, "host", r) for r in range(self.world_size)]

    @property
    def mesh(self) -> MeshLayout:
        layout = Layout(self.world_size, self.shard_group_size, self.placement)
        return MeshLayout.build(layout, self.sites)


def dlrm_spec(
    tables: list[dict[str, Any]],
    features: list[dict[str, Any]],
    optimizer: dict[str, Any],
    parallelism: dict[str, Any],
    *,
    batch_size: int,
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
                "arch": "dlrm",
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
        "planner": {"bandwidths": "default"},
        "dense": "every_step",
        "sync": {"every_steps": case.sync_every},
    }
    features = pooled_features(FEATURES)
    return dlrm_spec(tables, features, optimizer, parallelism, batch_size=case.batch_size)


def with_sync(spec: JobSpec, **changes: Any) -> JobSpec:
    """The spec with `changes` to its sync."""
    sync = spec.parallelism.sync.model_copy(update=changes)
    parallelism = spec.parallelism.model_copy(update={"sync": sync})
    return spec.model_copy(update={"parallelism": parallelism})


def fused_kernel(
    table_rows: Sequence[int], dims: Sequence[int] | None = None, **options: Any
) -> FusedKernel:
    """FBGEMM's kernel of tables of `dims` (4) columns on the CPU, with random weights."""
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    sizes = zip(table_rows, dims or [4] * len(table_rows), strict=True)
    kernel = FusedKernel([(rows, dim, *place) for rows, dim in sizes], **options)
    kernel.init_embedding_weights_uniform(-1, 1)
    return kernel


def shards_of(kernel: FusedKernel) -> list[TableShard]:
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
    num_rows = {feature: TABLE_ROWS[table] for feature, table in FEATURES.items()}
    ids = random_ids(num_rows, batch_size, generator)
    dense, label = (torch.randn(batch_size, 1, generator=generator) for _ in range(2))
    return plain_batch(dense, ids, label)


def pinned(batch: Batch) -> Batch:
    """The same in page-locked memory, as a worker's batches come to a GPU."""
    return replace(batch, **{name: part.pin_memory() for name, part in batch._parts().items()})


def random_ids(
    num_rows: dict[str, int],
    batch_size: int,
    generator: torch.Generator,
    *,
    max_bag: int = 3,
    is_weighted: bool = False,
) -> KeyedJaggedTensor:
    """Bags of ids of each feature, with duplicates and empty bags."""
    lengths = torch.randint(0, max_bag + 1, (len(num_rows), batch_size), generator=generator)
    values = [
        torch.randint(0, rows, (int(count),), generator=generator)
        for rows, count in zip(num_rows.values(), lengths.sum(dim=1), strict=True)
    ]
    weights = torch.rand(int(lengths.sum()), generator=generator) + 0.5 if is_weighted else None
    lengths = lengths.flatten().int()
    return KeyedJaggedTensor(list(num_rows), torch.cat(values), weights, lengths)


def local_shards(value: Any) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """(local tensor, offset in the table) of each shard of a DTensor or a ShardedTensor."""
    if isinstance(value, ShardedTensor):
        return [(each.tensor, tuple(each.metadata.shard_offsets)) for each in value.local_shards()]
    wrapper = value.to_local()
    offsets = [tuple(offset) for offset in wrapper.local_offsets()]
    # A rank without a shard of a table still has an offset.
    return list(zip(wrapper.local_shards(), offsets, strict=False))


def dense_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters outside the tables, by their name inside the network."""
    return {
        name.rpartition("network.")[2]: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if "embedding" not in name
    }


def build_trained(spec: JobSpec, groups: MeshGroups) -> tuple[TwoDParallel, Optimizers]:
    """The sharded model of a job and its optimizers, before the first step. Collective."""
    model, _ = build_parallel_model(spec, groups)
    return model, Optimizers(model, spec)


def take_step(
    model: nn.Module, optimizers: Optimizers, batch: Batch, step: int, num_steps: int
) -> None:
    """Step number `step` (from 1) of a run of `num_steps`."""
    optimizers.begin_step(step, num_steps)
    loss, _ = model(batch)
    loss.backward()
    optimizers.step()


def rank_device() -> torch.device:
    """Where this rank trains: its GPU, or the CPU, by the backend of its world."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def form_groups(case: Any) -> MeshGroups:
    """The groups of `case`, which has `sites` and a `mesh`, around this rank and its device."""
    site = case.sites[dist.get_rank()]
    os.environ["LOCAL_RANK"] = str(site.local_rank)
    return build_groups(case.mesh.layout, rank_device(), timeout_s=scaled(30), host=site.host)


def pairwise_mean(parts: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """The mean that a sync forms of [M, n]: float [n]."""
    num_parts = sum(weights) / max(weights) if weights else len(parts)
    return pairwise_sum(parts, weights) / num_parts


class NoHostReads(TorchDispatchMode):
    """Fails where our code would let the host wait for a device to read a value or a size.

    TorchRec's exchanges and FBGEMM's kernels may: they have to know sizes, and keep numbers on the
    host.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_off = False
        self._lists = _NoLists(self)

    def __enter__(self) -> Any:
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._lists.__exit__(*exc_info)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, reading is allowed: what is read came to the host before."""
        self._is_off = True
        yield
        self._is_off = False

    def check(self, name: str) -> None:
        """Fail if `name`, which is being called, was called by us."""
        frame = sys._getframe(2)
        while not (self._is_off or any(part in frame.f_code.co_filename for part in _OTHERS)):
            if _OURS in frame.f_code.co_filename:
                raise AssertionError(f"{name} is read on the host")
            assert frame.f_back, "somebody has called"
            frame = frame.f_back

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for each in (args[1] if isinstance(args[1], list) else ())
        )
        if is_mask or name in _HOST_READS:
            self.check(name)
        return func(*args, **(kwargs or {}))


class _NoLists(TorchFunctionMode):
    """What a tensor that is on the host gives without an operator."""

    def __init__(self, reads: NoHostReads) -> None:
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of what is on a device `numpy` reads nothing: it raises an error.
        if func in (torch.Tensor.tolist, torch.Tensor.cpu):
            self._reads.check(func.__name__)
        return func(*args, **(kwargs or {}))
