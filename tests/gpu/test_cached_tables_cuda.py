"""Tables in host memory behind FBGEMM's cache against tables in HBM, bit by bit.

The tables are small: managed or pinned memory must never be short.
"""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from tests.gpu import NEEDS_CUDA
from tests.gpu.cuda_cases import compare_cached, world_sizes
from tests.harness.ranks import run_ranks
from tests.harness.small_model import Case
from trainer.parallel.row_store import CachedRows, RowStore, weight_rows
from trainer.spec.parallelism import SyncSpec

pytestmark = NEEDS_CUDA

ROWS, DIMS = (3000, 5000), (8, 16)
FEATURE_TABLES = [1, 0, 1]
BATCH_SIZE = 64


def _kernel(place: EmbeddingLocation) -> SplitTableBatchedEmbeddingBagsCodegen:
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(n, dim, place, ComputeDevice.CUDA) for n, dim in zip(ROWS, DIMS, strict=True)],
        feature_table_map=FEATURE_TABLES,
        cache_load_factor=0.02,  # less than a few batches look up
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        uvm_host_mapped=True,
    )


def _stores(kernel: SplitTableBatchedEmbeddingBagsCodegen) -> list[RowStore]:
    weights = kernel.split_embedding_weights()
    return [weight_rows(kernel, index, weight) for index, weight in enumerate(weights)]


@torch.no_grad()
def test_cached_rows_of_a_real_kernel_are_those_in_hbm_while_it_trains() -> None:
    torch.manual_seed(0)
    flat, cached = (
        _kernel(place) for place in (EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED_CACHING)
    )
    for ours, theirs in zip(
        cached.split_embedding_weights(), flat.split_embedding_weights(), strict=True
    ):
        theirs.uniform_(-1, 1)
        ours.copy_(theirs)
    stores = list(zip(_stores(cached), _stores(flat), strict=True))
    assert all(isinstance(ours, CachedRows) for ours, _ in stores)
    num_elsewhere = 0
    for step in range(30):
        num_ids = BATCH_SIZE * len(FEATURE_TABLES)
        indices = torch.cat(
            [torch.randint(0, ROWS[t], (BATCH_SIZE,), device="cuda") for t in FEATURE_TABLES]
        )
        offsets = torch.arange(num_ids + 1, device="cuda")
        with torch.enable_grad():
            for kernel in (cached, flat):
                kernel(indices=indices, offsets=offsets).square().sum().backward()
        for ours, theirs in stores:
            assert torch.equal(ours.read(), theirs.tensor), f"step {step}"
            num_elsewhere += int((ours.tensor != theirs.tensor).any())
            rows = torch.randperm(len(theirs.tensor), device="cuda")[:500]
            values = torch.rand(500, theirs.tensor.shape[1], device="cuda")
            for store in (ours, theirs):
                store.write(values, rows)
            assert torch.equal(ours.read(rows), values)
    assert num_elsewhere, "some rows were in the cache only"
    cached.flush()
    for ours, theirs in stores:
        assert torch.equal(ours.tensor, theirs.tensor), "flushed tables are whole"
        ours.tensor.zero_()
    cached.reset_cache_states()
    assert not any(ours.read().any() for ours, _ in stores)


@pytest.mark.parametrize(
    "sync",
    [
        SyncSpec(mode="full"),
        SyncSpec(every_steps=2, full_above=1),
        SyncSpec(every_steps=2, overlap=2),
        SyncSpec(every_steps=2, dtype="bf16"),
    ],
    ids=["full", "touched rows", "overlapped", "changes"],
)
def test_cached_tables_train_sync_and_save_as_those_in_hbm(sync: SyncSpec) -> None:
    world_size, shard_group_size = world_sizes()
    case = Case(world_size, shard_group_size, num_steps=20)
    ranks = run_ranks(compare_cached, world_size, case, sync, backend="nccl")
    for rank, gaps in enumerate(ranks):
        assert len(gaps) == case.num_steps + 1
        for step, gap in enumerate(gaps, start=1):
            assert max(gap.values()) == 0, f"rank {rank}, step {step}: {gap}"
