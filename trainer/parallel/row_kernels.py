"""Triton kernels that read single rows of a table in HBM, and change them, in one pass over them.

PyTorch's gather is made for long rows: of 256 bytes each it moves a fifth of what HBM gives (H200).
And what lands would be four operators: gather, subtract, add, scatter; to save what is looked up
for the first time, which the host does not know, would be twenty. Triton compiles at the first use
of each width and dtype, within a second.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

# A program has about so many elements: 16 for each thread of four warps.
_PROGRAM_NUMEL = 2048
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def can_take(table: torch.Tensor, *values: torch.Tensor) -> bool:
    """Whether the kernels work on single rows of `table` and these `values` of them."""
    has_rows = table.dim() == 1 or (table.dim() == 2 and table.stride(1) == 1)
    is_fit = table.is_cuda and table.dtype in _DTYPES and has_rows
    return is_fit and all(v.dtype == table.dtype and v.is_contiguous() for v in values)


def gather(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows [k, w] of `table`, [n, w] or [n], with these numbers, int64 [k], into `out`."""
    _launch(_gather, table, rows, out)


def land(
    table: torch.Tensor, rows: torch.Tensor, snapshot: torch.Tensor, mean: torch.Tensor
) -> None:
    """Set each of the rows, named once, to mean + (row - snapshot), all [k, w].

    Computed in fp32, and rounded once.
    """
    _launch(_land, table, rows, snapshot, mean)


def claim(place_of: torch.Tensor, numbers: torch.Tensor, num_claimed: torch.Tensor) -> torch.Tensor:
    """Give each of `numbers`, int64 [n], that has no place the next one: int32 [n], -1 for others.

    `place_of`, int32 [rows], has the place of each number, -1 where it has none, and `num_claimed`,
    int64 [], how many have one. Negative numbers get none.
    """
    claimed = torch.empty_like(numbers, dtype=torch.int32)
    grid = (triton.cdiv(numbers.numel(), _PROGRAM_NUMEL),)
    with torch.cuda.device(numbers.device):
        _claim[grid](place_of, numbers, num_claimed, claimed, numbers.numel(), _PROGRAM_NUMEL)
    return claimed


def save(table: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """Copy row `rows[i]` of `table` to `out[places[i]]`, of [m, w], where that is not negative."""
    _launch(_save, table, rows, places, out)


def _launch(kernel: Any, table: torch.Tensor, rows: torch.Tensor, *values: torch.Tensor) -> None:
    width, num_rows = math.prod(table.shape[1:]), rows.numel()
    if not width or not num_rows:
        return
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _PROGRAM_NUMEL // block_width)
    with torch.cuda.device(table.device):
        kernel[(triton.cdiv(num_rows, block_rows),)](
            table, rows, *values, num_rows, table.stride(0), width, block_rows, block_width
        )


@triton.jit
def _places(rows, num_rows, stride, width, block_rows: tl.constexpr, block_width: tl.constexpr):
    """Where this program's rows are in the table and one after the other, and which there are."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    number = tl.load(rows + row, mask=row < num_rows, other=0)
    in_table = number[:, None] * stride + column[None, :]
    in_order = row[:, None] * width + column[None, :]
    return in_table, in_order, (row < num_rows)[:, None] & (column < width)[None, :]


@triton.jit
def _gather(
    table,
    rows,
    out,
    num_rows,
    stride,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    place, flat, is_there = _places(rows, num_rows, stride, width, block_rows, block_width)
    tl.store(out + flat, tl.load(table + place, mask=is_there), mask=is_there)


@triton.jit
def _land(
    table,
    rows,
    snapshot,
    mean,
    num_rows,
    stride,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    place, flat, is_there = _places(rows, num_rows, stride, width, block_rows, block_width)
    current = tl.load(table + place, mask=is_there).to(tl.float32)
    then = tl.load(snapshot + flat, mask=is_there).to(tl.float32)
    agreed = tl.load(mean + flat, mask=is_there).to(tl.float32)
    value = (current - then) + agreed
    tl.store(table + place, value.to(table.dtype.element_ty), mask=is_there)


@triton.jit
def _claim(place_of, numbers, num_claimed, claimed, num_numbers, block: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_there = index < num_numbers
    number = tl.load(numbers + index, mask=is_there, other=-1)
    is_new = number >= 0
    is_new &= tl.load(place_of + number, mask=is_new, other=0) < 0
    # Who finds it without a place is the one who gives it one; others see 0 for now.
    zero = tl.zeros([block], tl.int32)
    is_new &= tl.atomic_max(place_of + number, zero, mask=is_new) < 0
    turn = tl.cumsum(is_new.to(tl.int32), 0)
    first = tl.atomic_add(num_claimed, tl.sum(is_new.to(tl.int64), 0))
    place = (first + turn - 1).to(tl.int32)
    tl.store(place_of + number, place, mask=is_new)
    tl.store(claimed + index, tl.where(is_new, place, -1), mask=is_there)


@triton.jit
def _save(
    table,
    rows,
    places,
    out,
    num_rows,
    stride,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_width)
    place = tl.load(places + row, mask=row < num_rows, other=-1).to(tl.int64)
    number = tl.load(rows + row, mask=place >= 0, other=0)
    is_there = (place >= 0)[:, None] & (column < width)[None, :]
    values = tl.load(table + number[:, None] * stride + column[None, :], mask=is_there)
    tl.store(out + place[:, None] * width + column[None, :], values, mask=is_there)
