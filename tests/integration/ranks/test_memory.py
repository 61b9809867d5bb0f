"""What the planner gives a worker for its tables is no less than what they take."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.harness.ranks import run_ranks
from tests.harness.small_model import (
    build_trained,
    dlrm_spec,
    plain_batch,
    rank_device,
    take_step,
)
from tests.harness.wait import scaled
from trainer.data.batches import Batch
from trainer.parallel.mesh import MeshGroups, build_groups
from trainer.parallel.sync import build_sync
from trainer.spec.job import JobSpec
from trainer.training.worker import layout_of

# Large enough that the buffers of the chunks under way, up to 60 MB, are within what is RESERVED.
NUM_TABLES, NUM_ROWS, DIM = 2, 600_000, 64
BATCH_SIZE, NUM_STEPS = 4096, 17
# Of a worker's memory, as by default; and what ids and activations are of tables, in TorchRec's
# estimate.
RESERVED, IN_FLIGHT = 0.15, 0.025
_M_MMAP_THRESHOLD = -3  # of malloc.h


def spec_with(
    sync: dict[str, Any], memory_bytes: int | None = None, num_rows: int = NUM_ROWS
) -> JobSpec:
    """Two copies of two tables, 312 MB with their moments, on workers of so much memory."""
    names = [f"table_{number}" for number in range(NUM_TABLES)]
    table = {"num_embeddings": num_rows, "embedding_dim": DIM}
    return dlrm_spec(
        [
            {"name": name, "constraints": {"sharding_types": ["table_wise"]}} | table
            for name in names
        ],
        [{"name": f"id_of_{name}", "type": "id", "table": name} for name in names],
        {},
        {
            "workers": 2,
            "shard_group_size": 1,
            "planner": {"bandwidths": "default", "storage_reservation": RESERVED},
            "sync": {"every_steps": 8} | sync,
        },
        batch_size=BATCH_SIZE,
        resources={"memory_bytes_per_worker": memory_bytes},
    )


def status_bytes(name: str) -> int:
    """A line of this process's memory."""
    (kilobytes,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def batch_of(step: int, rank: int, num_rows: int) -> Batch:
    """Rows with evenly distributed ids, most of them different ones."""
    draw = torch.Generator().manual_seed(2 * step + rank)
    return plain_batch(
        torch.randn(BATCH_SIZE, 1, generator=draw),
        KeyedJaggedTensor(
            keys=[f"id_of_table_{number}" for number in range(NUM_TABLES)],
            values=torch.randint(0, num_rows, (NUM_TABLES * BATCH_SIZE,), generator=draw),
            lengths=torch.ones(NUM_TABLES * BATCH_SIZE, dtype=torch.int32),
        ),
        torch.rand(BATCH_SIZE, 1, generator=draw),
    )


def peak_growth_bytes(spec: JobSpec, small: JobSpec) -> int:
    """How much more memory than before a rank takes at most, from the tables to the last step.

    Before, it has trained `small`: what any job takes is there.
    """
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    groups = build_groups(layout_of(spec), rank_device(), timeout_s=scaled(60), host="host")
    train(small, groups)
    gc.collect()
    # What is freed goes back to the system, so that the peak is of what was held at once.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before_bytes = status_bytes("VmRSS")
    train(spec, groups)
    return status_bytes("VmHWM") - before_bytes


def train(spec: JobSpec, groups: MeshGroups) -> None:
    """Two intervals of syncs, the second while the first overlaps with it."""
    model, optimizers = build_trained(spec, groups)
    sync = build_sync(model, spec)
    num_rows = spec.embedding_tables[0].num_embeddings
    for step in range(1, NUM_STEPS + 1):
        batch = batch_of(step, groups.rank, num_rows)
        take_step(model, optimizers, batch, step, NUM_STEPS)
        sync.tick()
        if step % spec.parallelism.sync.every_steps == 0:
            sync()
    sync.close()


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param({"mode": "full"}, marks=pytest.mark.slow),
        {"mode": "full", "dtype": "bf16"},
        pytest.param({"mode": "touched_rows", "overlap": 8}, marks=pytest.mark.slow),
        {"mode": "touched_rows", "dtype": "bf16", "overlap": 8},
    ],
    ids=lambda sync: " ".join(map(str, sync.values())),
)
def test_the_least_memory_that_has_a_plan_is_as_much_as_tables_and_sync_take(sync):
    spec = spec_with(sync)
    tables = spec.embedding_tables
    planned_bytes = sum(spec.size_bytes(table) + spec.sync_bytes(table) for table in tables)
    least_bytes = math.ceil(planned_bytes * (1 + IN_FLIGHT) / (1 - RESERVED))
    small = spec_with(sync, num_rows=BATCH_SIZE)
    peaks = run_ranks(peak_growth_bytes, 2, spec_with(sync, least_bytes), small, fresh=True)
    assert max(peaks) <= least_bytes, f"peaks of {peaks} bytes, {least_bytes} were planned"
