"""The Triton kernels of a sync against the same arithmetic in PyTorch, bit by bit."""

from __future__ import annotations

import pytest
import torch

from trainer.parallel.row_store import FlatRows
from trainer.parallel.sync import apply_difference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA GPU: torch.cuda.is_available() is False",
    ),
]

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
