"""What a Ray user would write to train DLRM with TorchRec: one TorchTrainer script.

python raw_ray_train.py CONFIG.json

CONFIG holds `spec` (model, tables, data path: as in a Shardloom spec, read as plain JSON),
`storage_path`, `num_steps` and `first_step_path`: rank 0 writes the Unix time at which it finished
its first optimizer step there. Uses torch, TorchRec, Ray and pyarrow only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.train
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

CPU = torch.device("cpu")


class RowWiseSharder(EmbeddingBagCollectionSharder):
    """The stock sharder, which on CPU hides row-wise sharding from the planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise", "table_wise"]


@dataclass
class Batch:
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor


def read_batches(spec: dict[str, Any], rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's batches of one epoch, in file order."""
    size = spec["data"]["batch_size"]
    rows = pq.read_table(Path(spec["data"]["path"]) / spec["data"]["split"]["train"])
    for start in range(rank * size, len(rows) - size + 1, world_size * size):
        yield make_batch(rows.slice(start, size).combine_chunks(), spec)


def endless_batches(spec: dict[str, Any], rank: int, world_size: int) -> Iterator[Batch]:
    while True:
        yield from read_batches(spec, rank, world_size)


def make_batch(rows: pa.Table, spec: dict[str, Any]) -> Batch:
    sparse = [f for f in spec["features"] if f["type"] != "dense"]
    dense = [rows[f["name"]].to_numpy() for f in spec["features"] if f["type"] == "dense"]
    values, lengths = [], []
    for feature in sparse:
        column = rows[feature["name"]].combine_chunks()
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        values.append((column.flatten() if is_list else column).to_numpy().astype(np.int64))
        counts = column.value_lengths().to_numpy() if is_list else np.ones(len(rows))
        lengths.append(counts.astype(np.int32))
    names = spec["data"]["label"]
    rating, mean, scale = (
        rows[names[key]].to_numpy() for key in ("column", "offset_column", "scale_column")
    )
    return Batch(
        dense=torch.from_numpy(np.stack(dense, axis=1).astype(np.float32)),
        sparse=KeyedJaggedTensor(
            keys=[feature["name"] for feature in sparse],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        ),
        label=torch.from_numpy(((rating - mean) / scale).astype(np.float32)),
    )


class RatingModel(nn.Module):
    def __init__(self, network: DLRM) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean squared error, outputs [B, 1]) of a batch; its label may be [B] or [B, 1]."""
        outputs = self.network(batch.dense, batch.sparse)
        return nn.functional.mse_loss(outputs, batch.label.view_as(outputs)), outputs.detach()


def build_model(spec: dict[str, Any], device: torch.device = CPU) -> DistributedModelParallel:
    poolings = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
    tables = [
        EmbeddingBagConfig(
            name=table["name"],
            embedding_dim=table["embedding_dim"],
            num_embeddings=table["num_embeddings"],
            feature_names=[f["name"] for f in spec["features"] if f["table"] == table["name"]],
            pooling=poolings[table["pooling"]],
        )
        for table in spec["embedding_tables"]
    ]
    network = DLRM(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=sum(feature["type"] == "dense" for feature in spec["features"]),
        dense_arch_layer_sizes=spec["model"]["dense_arch"]["layer_sizes"],
        over_arch_layer_sizes=spec["model"]["over_arch"]["layer_sizes"],
    )
    model = RatingModel(network)
    sparse = spec["optimizer"]["sparse"]
    sharder = RowWiseSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": sparse["lr"],
            "eps": sparse["eps"],
        }
    )
    world_size = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size, compute_device=device.type, local_world_size=world_size),
        constraints={
            table["name"]: ParameterConstraints(
                sharding_types=table["constraints"]["sharding_types"]
            )
            for table in spec["embedding_tables"]
        },
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])


def dense_optimizer(model: nn.Module, spec: dict[str, Any]) -> KeyedOptimizerWrapper:
    dense = spec["optimizer"]["dense"]
    return KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=dense["lr"], weight_decay=dense["weight_decay"]),
    )


def train_loop(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    spec = config["spec"]
    rank = ray.train.get_context().get_world_rank()
    model = build_model(spec)
    optimizer = dense_optimizer(model, spec)
    for step, batch in enumerate(read_batches(spec, rank, dist.get_world_size()), start=1):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
        if step == 1 and rank == 0:
            Path(config["first_step_path"]).write_text(str(time.time()))
        if step == config["num_steps"]:
            break


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=config["spec"]["parallelism"]["workers"]),
        run_config=RunConfig(storage_path=config["storage_path"]),
    ).fit()


if __name__ == "__main__":
    main()
