"""A bare TorchRec training script: the least that trains the same model on the same batches.

python -m tests.benchmarks.peers.bare_torchrec SPEC.json FIRST_STEP LAST_STEP STEPS

STEPS is `plain` or `pipelined`, by TorchRec's TrainPipelineSparseDist. Stock
DistributedModelParallel over gloo ranks on this machine, row-wise AdaGrad fused into backward, Adam
for the dense part, as in `raw_ray_train`. The batches of one epoch are made before the clock starts
and used over and over. No metrics, no reports, no checkpoints. Prints as JSON the seconds from the
end of step FIRST_STEP to the end of step LAST_STEP on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.benchmarks.peers.raw_ray_train import CPU, build_model, dense_optimizer
from tests.benchmarks.peers.stock_1d import PipelinedBatch
from tests.harness.processes import rank_environment
from tests.harness.wait import free_port
from trainer.data.batches import TrainBatches
from trainer.data.reader import open_source
from trainer.spec import load_spec
from trainer.spec.job import JobSpec


def epoch_of_batches(spec: JobSpec, rank: int, world_size: int) -> list[PipelinedBatch]:
    """All batches of one epoch of one rank, in memory."""
    source = open_source(spec, Path(spec.data.path) / spec.data.split.train)
    with TrainBatches(source, spec, rank, world_size) as loader:
        made = islice(loader, loader.shape.steps_per_epoch)
        return [PipelinedBatch(**vars(batch)) for batch, _ in made]


def steps_of(
    spec: JobSpec,
    batches: Iterator[PipelinedBatch],
    is_pipelined: bool,
    device: torch.device = CPU,
) -> Iterator[None]:
    """Train a step for each item that is taken."""
    document = spec.model_dump(mode="json")
    model = build_model(document, device)
    optimizer = dense_optimizer(model, document)
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    while is_pipelined:
        pipeline.progress(batches)
        yield
    for batch in batches:
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
        yield


def train(
    spec: JobSpec, batches: list[PipelinedBatch], first_step: int, last_step: int, steps: str
) -> float:
    """Train `last_step` steps; seconds from the end of `first_step` to the end of the last."""
    started = 0.0
    taken = steps_of(spec, cycle(batches), steps == "pipelined")
    for step, _ in enumerate(islice(taken, last_step), start=1):
        if step == first_step:
            started = time.perf_counter()
    return time.perf_counter() - started


def run_rank(
    rank: int, port: int, spec_path: str, first_step: int, last_step: int, steps: str
) -> None:
    torch.set_num_threads(1)
    spec = load_spec(Path(spec_path).read_text())
    world_size = spec.parallelism.world_size
    os.environ.update(rank_environment(rank, world_size, port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    batches = epoch_of_batches(spec, rank, world_size)
    dist.barrier()
    elapsed_s = train(spec, batches, first_step, last_step, steps)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"elapsed_s": elapsed_s}), flush=True)


def main() -> None:
    spec_path, first_step, last_step, steps = sys.argv[1:]
    num_ranks = load_spec(Path(spec_path).read_text()).parallelism.world_size
    arguments = (free_port(), spec_path, int(first_step), int(last_step), steps)
    mp.spawn(run_rank, arguments, num_ranks)


if __name__ == "__main__":
    main()
