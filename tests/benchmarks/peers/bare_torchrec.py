"""A bare TorchRec training script: the least that trains the same model on the same batches.

python -m tests.benchmarks.peers.bare_torchrec SPEC.json FIRST_STEP LAST_STEP

Stock DistributedModelParallel over gloo ranks on this machine, row-wise AdaGrad fused into
backward, Adam for the dense part, as in `raw_ray_train`. The batches of one epoch are made before
the clock starts and used over and over. No metrics, no reports, no checkpoints. Prints as JSON the
seconds from the end of step FIRST_STEP to the end of step LAST_STEP on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.benchmarks.peers.raw_ray_train import build_model, dense_optimizer, loss_of
from tests.harness.wait import free_port
from trainer.data.batches import Batch, TrainBatches
from trainer.data.reader import open_source
from trainer.spec import load_spec
from trainer.spec.job import JobSpec


def epoch_of_batches(spec: JobSpec, rank: int, world_size: int) -> list[Batch]:
    """All batches of one epoch of one rank, in memory."""
    source = open_source(spec, Path(spec.data.path) / spec.data.split.train)
    with TrainBatches(source, spec, rank, world_size) as loader:
        return [batch for batch, _ in islice(loader, loader.shape.steps_per_epoch)]


def train(spec: JobSpec, batches: list[Batch], first_step: int, last_step: int) -> float:
    """Train `last_step` steps; seconds from the end of `first_step` to the end of the last."""
    document = spec.model_dump(mode="json")
    model = build_model(document)
    optimizer = dense_optimizer(model, document)
    started = 0.0
    for step, batch in enumerate(islice(cycle(batches), last_step), start=1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if step == first_step:
            started = time.perf_counter()
    return time.perf_counter() - started


def run_rank(rank: int, port: int, spec_path: str, first_step: int, last_step: int) -> None:
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
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"elapsed_s": elapsed_s}), flush=True)


def main() -> None:
    """Start one process per rank and wait for all."""
    spec_path, first_step, last_step = sys.argv[1:]
    num_ranks = load_spec(Path(spec_path).read_text()).parallelism.world_size
    mp.spawn(run_rank, (free_port(), spec_path, int(first_step), int(last_step)), num_ranks)


if __name__ == "__main__":
    main()
