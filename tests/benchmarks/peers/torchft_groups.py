"""Sharding groups that average at syncs through torchft: one rank of one group.

python -m tests.benchmarks.peers.torchft_groups CONFIG.json GROUP RANK

Each group trains stock TorchRec in a gloo world of its own; every `sync_every_steps` steps all
groups average tables, moments and dense parameters through torchft's Manager, in a buffer that is
applied when all of them committed. CONFIG holds `spec` (as in `raw_ray_train`), `folder`,
`num_ranks`, `store_ports` (by group), `lighthouse`, `sync_every_steps` and `timeout_s`. A rank
writes a line per committed sync to `commits-GROUP-RANK.jsonl`, until it is killed. Time-outs are
tuned: torchft's defaults are 60 s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.benchmarks.peers.raw_ray_train import build_model, dense_optimizer, endless_batches
from tests.harness.processes import rank_environment


def enter_world(config: dict[str, Any], group: int, rank: int) -> None:
    torch.set_num_threads(1)
    port = config["store_ports"][group]
    os.environ.update(rank_environment(rank, config["num_ranks"], port))
    dist.init_process_group("gloo", rank=rank, world_size=config["num_ranks"])


def open_manager(config: dict[str, Any], group: int, rank: int) -> Manager:
    """torchft's side of this rank. Nobody joins later, so there is no state to hand over."""
    timeout = timedelta(seconds=config["timeout_s"])
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=30),
        rank=rank,
        world_size=config["num_ranks"],
        store_addr="127.0.0.1",
        store_port=config["store_ports"][group],
        lighthouse_addr=config["lighthouse"],
        replica_id=f"group-{group}",
        init_sync=False,
    )


def synced_tensors(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of tables and moments, and the dense parameters."""
    tensors: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            tensors += module.split_embedding_weights()
            tensors += [state for states in module.split_optimizer_states() for state in states]
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return [tensor.detach() for tensor in [*tensors, *dense.values()]]


def sync(manager: Manager, tensors: list[torch.Tensor]) -> bool:
    """Average all tensors over the groups; whether it counts."""
    manager.start_quorum()
    buffers = [tensor.clone() for tensor in tensors]
    for work in [manager.allreduce(buffer) for buffer in buffers]:
        work.wait()
    if not manager.should_commit():
        return False
    for tensor, buffer in zip(tensors, buffers, strict=True):
        tensor.copy_(buffer)
    return True


def train(config: dict[str, Any], group: int, rank: int) -> None:
    spec, num_ranks = config["spec"], config["num_ranks"]
    enter_world(config, group, rank)
    model = build_model(spec)
    optimizer = dense_optimizer(model, spec)
    manager, tensors = open_manager(config, group, rank), synced_tensors(model)
    log = Path(config["folder"], f"commits-{group}-{rank}.jsonl")
    num_workers = num_ranks * len(config["store_ports"])
    feed = endless_batches(spec, group * num_ranks + rank, num_workers)
    for commit in count(1):
        for batch in islice(feed, config["sync_every_steps"]):
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        num_tries = 1
        while not sync(manager, tensors):
            num_tries += 1
        line = {
            "commit": commit,
            "time": time.time(),
            "num_tries": num_tries,
            "num_groups": manager.num_participants(),
        }
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    train(config, group=int(sys.argv[2]), rank=int(sys.argv[3]))


if __name__ == "__main__":
    main()
