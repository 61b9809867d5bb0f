"""A bare TorchRec training script: the least that trains the same model on the same batches.

python -m tests.benchmarks.peers.bare_torchrec SPEC.json FIRST_STEP LAST_STEP RESULT.json

Stock DistributedModelParallel over gloo ranks on this machine, row-wise AdaGrad fused into
backward, Adam for the dense part. The batches of one epoch are made before the clock starts and
used over and over. No metrics, no reports, no checkpoints. Rank 0 writes the seconds from the end
of step FIRST_STEP to the end of step LAST_STEP.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainer.data.batches import Batch, TrainBatches
from trainer.data.reader import open_source
from trainer.spec import load_spec
from trainer.spec.job import JobSpec

POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


class RowWiseSharder(EmbeddingBagCollectionSharder):
    """The stock sharder, which on CPU hides row-wise sharding from the planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that the planner may choose from."""
        return ["row_wise", "table_wise"]


class TrainedDlrm(nn.Module):
    """DLRM with its loss."""

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.dlrm = dlrm

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean squared error of a batch."""
        outputs = self.dlrm(batch.dense, batch.sparse)
        return nn.functional.mse_loss(outputs, batch.label)


def build_model(spec: JobSpec, world_size: int) -> DistributedModelParallel:
    """The model of `spec`, sharded over all ranks."""
    tables = [
        EmbeddingBagConfig(
            name=table.name,
            embedding_dim=table.embedding_dim,
            num_embeddings=int(table.num_embeddings),
            feature_names=[f.name for f in spec.sparse_features if f.table == table.name],
            pooling=POOLING[table.pooling],
        )
        for table in spec.embedding_tables
    ]
    model = TrainedDlrm(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=len(spec.dense_features),
            dense_arch_layer_sizes=list(spec.model.dense_arch.layer_sizes),
            over_arch_layer_sizes=list(spec.model.over_arch.layer_sizes),
        )
    )
    sparse = spec.optimizer.sparse
    sharder = RowWiseSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": sparse.lr,
            "eps": sparse.eps,
        }
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu"),
        constraints={
            table.name: ParameterConstraints(sharding_types=list(table.constraints.sharding_types))
            for table in spec.embedding_tables
        },
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def epoch_of_batches(spec: JobSpec, rank: int, world_size: int) -> list[Batch]:
    """All batches of one epoch of one rank, in memory."""
    source = open_source(spec, Path(spec.data.path) / spec.data.split.train)
    with TrainBatches(source, spec, rank, world_size) as loader:
        return [batch for batch, _ in islice(loader, loader.shape.steps_per_epoch)]


def train(spec: JobSpec, batches: list[Batch], first_step: int, last_step: int) -> float:
    """Train `last_step` steps; seconds from the end of `first_step` to the end of the last."""
    model = build_model(spec, dist.get_world_size())
    dense = spec.optimizer.dense
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=dense.lr, weight_decay=dense.weight_decay),
    )
    started = 0.0
    for step, batch in enumerate(islice(cycle(batches), last_step), start=1):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        if step == first_step:
            started = time.perf_counter()
    return time.perf_counter() - started


def run_rank(
    rank: int, port: int, spec_path: str, first_step: int, last_step: int, result: str
) -> None:
    """One rank of the script."""
    torch.set_num_threads(1)
    spec = load_spec(Path(spec_path).read_text())
    world_size = spec.parallelism.world_size
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    batches = epoch_of_batches(spec, rank, world_size)
    dist.barrier()
    elapsed_s = train(spec, batches, first_step, last_step)
    if rank == 0:
        Path(result).write_text(json.dumps({"elapsed_s": elapsed_s}))
    dist.destroy_process_group()


def main() -> None:
    """Start one process per rank and wait for all."""
    spec_path, first_step, last_step, result = sys.argv[1:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_ranks = load_spec(Path(spec_path).read_text()).parallelism.world_size
    mp.spawn(run_rank, (port, spec_path, int(first_step), int(last_step), result), num_ranks)


if __name__ == "__main__":
    main()
