"""Tracking of touched rows on real FBGEMM kernels, without process groups."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_model import FusedKernel, fused_kernel, shards_of
from trainer.parallel.model import TableShard
from trainer.parallel.touched_rows import (
    RowBase,
    RowNumbers,
    TouchedRows,
    pack_bits,
    unpack_bits,
    wires,
)

CPU = torch.device("cpu")
TABLE_ROWS = (5, 12, 1)
FEATURE_TABLES = (0, 1, 1, 2)  # features 1 and 2 share a table


def _kernel(pooling: PoolingMode = PoolingMode.SUM) -> FusedKernel:
    return fused_kernel(
        TABLE_ROWS,
        feature_table_map=list(FEATURE_TABLES),
        pooling_mode=pooling,
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.1,
    )


Bags = list[list[list[int]]]  # ids of each bag of each feature


@st.composite
def bags(draw: st.DrawFn) -> Bags:
    """Bags of ids within each feature's table, some empty, with duplicates."""
    count = draw(st.integers(1, 4))
    return [
        [draw(st.lists(st.integers(0, TABLE_ROWS[table] - 1), max_size=4)) for _ in range(count)]
        for table in FEATURE_TABLES
    ]


def _lookup(kernel: FusedKernel, found: Bags) -> torch.Tensor:
    flat = [bag for feature in found for bag in feature]
    lengths = torch.tensor([0, *(len(bag) for bag in flat)])
    indices = torch.tensor([index for bag in flat for index in bag], dtype=torch.int64)
    return kernel(indices=indices, offsets=lengths.cumsum(0))


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE], ids=["bags", "rows"])
def test_marks_add_up_until_cleared_and_end_when_closed(pooling: PoolingMode) -> None:
    kernel = _kernel(pooling)
    numbers = RowNumbers(shards_of(kernel), CPU)
    touched = TouchedRows(numbers)
    with torch.no_grad():  # Lookups without training mark nothing.
        _lookup(kernel, [[[1]], [[2]], [[]], [[]]])
    assert not touched.bits.any()
    _lookup(kernel, [[[1]], [[2]], [[]], [[]]])
    kernel.eval()  # as a user's network may leave its tables, whose rows change all the same
    _lookup(kernel, [[[4, 1, 4]], [[]], [[2]], [[0]]])
    assert touched.bits.nonzero().view(-1).tolist() == [1, 4, 7, 17]
    sizes = [len(shard.weight) for shard in numbers.shards]
    assert numbers.counts(numbers.of_bits(touched.bits)).tolist() == [
        of_shard.sum() for of_shard in touched.bits.split(sizes)
    ]
    assert numbers.counts(None).tolist() == sizes
    touched.close()
    touched.clear()
    _lookup(kernel, [[[1]], [[2]], [[]], [[]]])
    assert not touched.bits.any()


@given(st.lists(st.booleans()))
def test_packed_bits_unpack_to_the_same(values: list[bool]) -> None:
    bits = torch.tensor(values, dtype=torch.bool)
    packed = pack_bits(bits)
    assert packed.numel() == -(-len(values) // 8)
    assert torch.equal(unpack_bits(packed, len(values)), bits)


def _with_bases(
    kernel: FusedKernel,
) -> tuple[RowNumbers, RowBase, TouchedRows]:
    numbers = RowNumbers(shards_of(kernel), CPU)
    bases = RowBase(numbers, wires(numbers.shards, torch.bfloat16, include_moments=True))
    return numbers, bases, TouchedRows(numbers, bases.save)


def _train(kernel: FusedKernel, found: Bags) -> None:
    _lookup(kernel, found).sum().backward()


@pytest.mark.parametrize("waits", [True, False], ids=["new rows", "all lookups"])
@given(windows=st.lists(st.lists(bags(), min_size=1, max_size=3), min_size=2, max_size=3))
def test_the_base_of_a_row_is_what_it_held_before_its_first_change(
    waits: bool, windows: list[list[Bags]]
) -> None:
    """In a window whose sync succeeded, and in those that one which failed has joined."""
    kernel = _kernel()
    numbers, agreed, touched = _with_bases(kernel)
    (run,) = numbers.runs
    every = torch.arange(numbers.num_rows)
    given = patch.object(TouchedRows, "_worth_saving", lambda _, rows: rows)
    with nullcontext() if waits else given:
        for steps, *later in (windows[:1], windows[1:]):
            agreed.begin_window()
            touched.clear()
            before = [store.read(every) for store in run]
            for found in steps:
                _train(kernel, found)
            for steps_since in later:
                ended = agreed.begin_window(is_kept=True)
                touched.clear()
                for found in steps_since:
                    _train(kernel, found)
                agreed.resume_window(ended)
            for store, expected in zip(run, before, strict=True):
                base = agreed.block(store, every).base
                assert base is not None
                assert torch.equal(base, expected)


def test_a_row_touched_before_its_mean_landed_has_the_mean_as_its_base() -> None:
    kernel = _kernel()
    numbers, agreed, touched = _with_bases(kernel)
    ((rows, _),) = numbers.runs
    weight, first = numbers.shards[1].weight, numbers.first[1]
    # A round takes off with these rows.
    sent = agreed.block(rows, first + torch.tensor([2, 7]))
    agreed.begin_window()
    touched.clear()
    _lookup(kernel, [[[]], [[7, 9]], [[]], [[]]]).sum().backward()
    untouched = weight[9].clone() + 0.1  # AdaGrad's first step is the learning rate
    sent.agree(torch.arange(8.0))
    agreed.landed([sent])
    base = agreed.block(rows, first + torch.tensor([7, 9])).base
    assert base is not None
    assert base[0].tolist() == [4, 5, 6, 7]
    torch.testing.assert_close(base[1], untouched)


def test_what_is_half_precision_or_row_wise_never_travels_as_a_change() -> None:
    half, row_wise, matrix = torch.zeros(3, 4).half(), torch.zeros(3), torch.zeros(3, 4)
    kernel = _kernel()
    shards = [
        TableShard("half", kernel, 0, half, {"sum": row_wise}, 0, 0),
        TableShard("whole", kernel, 1, matrix, {"sum": torch.zeros(3, 4)}, 0, 0),
    ]
    found = wires(shards, torch.float16, include_moments=True)
    assert {store.tensor.data_ptr(): wire for store, wire in found.values()} == {
        matrix.data_ptr(): torch.float16,
        shards[1].states["sum"].data_ptr(): torch.bfloat16,
    }
