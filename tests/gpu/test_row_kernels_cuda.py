"""The Triton kernels of a sync against the same arithmetic in PyTorch, bit by bit."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

from tests.gpu import NEEDS_CUDA
from tests.harness.small_model import FusedKernel, shards_of
from trainer.parallel.row_store import FlatRows
from trainer.parallel.sync import apply_difference
from trainer.parallel.touched_rows import (
    RowBase,
    RowNumbers,
    looked_up,
    pack_bits,
    unpack_bits,
    wires,
)

pytestmark = NEEDS_CUDA

NUM_ROWS, NUM_PICKED = 5000, 777


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (100,), (513,)], ids=str)
def test_single_rows_are_read_and_moved_as_by_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    table, snapshot, mean = (
        torch.rand(n, *shape, device="cuda").to(dtype) for n in (NUM_ROWS, NUM_PICKED, NUM_PICKED)
    )
    rows = torch.randperm(NUM_ROWS, device="cuda")[:NUM_PICKED]
    store, before = FlatRows(table), table.clone()
    assert torch.equal(store.read(rows), before[rows])
    assert store.move(rows, snapshot, mean)
    after = before.clone()
    after[rows] = apply_difference(before[rows], snapshot, mean)
    assert torch.equal(table, after)


@torch.no_grad()
def test_rows_are_saved_before_their_first_change_as_by_pytorch() -> None:
    """Of tables of two widths, so that each log gets rows of the other, too, in growing batches."""
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    kernel = FusedKernel(
        [(3000, 8, *place), (5000, 16, *place), (700, 8, *place)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
    )
    numbers = RowNumbers(shards_of(kernel), torch.device("cuda", 0))
    tensors = wires(numbers.shards, torch.bfloat16, include_moments=True)
    bases = RowBase(numbers, tensors)
    is_saved = torch.zeros(numbers.num_rows, dtype=torch.bool, device="cuda")
    runs = [
        (store, rows)
        for stores, rows in numbers.by_run(numbers.of_bits(~is_saved))
        for store in stores
    ]
    assert all(FlatRows(store.tensor).kernels() for store, _ in runs)
    expected = [store.read(rows) for store, rows in runs]
    torch.manual_seed(0)
    for num_lookups in (1, 3000, 10_000, 50_000):
        for store, _ in tensors.values():
            store.tensor.uniform_(-1, 1)
        for held, (store, rows) in zip(expected, runs, strict=True):
            held[~is_saved[rows]] = store.read(rows)[~is_saved[rows]]
        looked_up = torch.randint(0, numbers.num_rows, (num_lookups,), device="cuda")
        bases.save(0, looked_up)
        is_saved[looked_up] = True
    for store, _ in tensors.values():
        store.tensor.zero_()
    for held, (store, rows) in zip(expected, runs, strict=True):
        held[~is_saved[rows]] = 0
        base = bases.block(store, rows).base
        assert base is not None
        assert torch.equal(base, held)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lookups_have_the_numbers_that_they_have_on_cpus(dtype: torch.dtype) -> None:
    """Two features share a table, and bags are empty, among them all of a feature."""
    torch.manual_seed(0)
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tables = [(3000, 8, *place), (5000, 8, *place), (700, 8, *place)]
    kernel = FusedKernel(tables, feature_table_map=[0, 1, 1, 2, 2])
    lengths = torch.randint(0, 3, (5, 64)) * torch.tensor([[1], [1], [0], [1], [1]])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    indices = torch.randint(0, 700, (int(offsets[-1]),)).to(dtype)
    found = looked_up(kernel, indices.cuda(), offsets.to(dtype).cuda())
    of_feature = torch.arange(5).repeat_interleave(lengths.sum(1))
    starts = torch.tensor([0, 3000, 3000, 8000, 8000])
    assert found.dtype == torch.int64
    assert torch.equal(found.cpu(), indices + starts[of_feature])


@pytest.mark.parametrize("num_bits", [0, 1, 8, 1001, 100_000])
def test_bits_are_packed_as_on_cpus(num_bits: int) -> None:
    torch.manual_seed(0)
    bits = torch.rand(num_bits) < 0.3
    packed = pack_bits(bits.cuda(), 4)
    assert torch.equal(packed.cpu(), pack_bits(bits, 4))
    assert torch.equal(unpack_bits(packed, num_bits).cpu(), bits)
