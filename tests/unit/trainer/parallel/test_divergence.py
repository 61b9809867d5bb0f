"""Which copies differ, and checksums that see every bit and its place."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.divergence import DivergenceError, DivergentShard, checksum, differing_copies

INTEGERS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}


def _sum_of(*tensors: torch.Tensor) -> int:
    return int(checksum(tensors))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_copies_that_differ_from_the_most_common_content_are_named(contents: list[int]) -> None:
    differing = differing_copies(contents)
    kept = [value for copy, value in enumerate(contents) if copy not in differing]
    assert len(set(kept)) == 1
    assert len(kept) == max(Counter(contents).values())


def test_without_a_majority_the_first_copy_counts_as_right() -> None:
    for contents, differing in (([7, 8], [1]), ([7, 7, 8, 8], [2, 3]), ([1, 2, 3], [1, 2])):
        assert differing_copies(contents) == differing


@given(
    dtype=st.sampled_from(list(INTEGERS)),
    num_rows=st.integers(1, 20),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 10**6),
)
def test_one_flipped_bit_changes_the_checksum(
    dtype: torch.dtype, num_rows: int, place: int, bit: int
) -> None:
    weights = torch.randn(num_rows, 8).to(dtype)
    before = _sum_of(weights)
    integers = weights.view(INTEGERS[dtype])
    flip = torch.tensor(1).bitwise_left_shift(torch.tensor(bit % (8 * weights.element_size())))
    index = divmod(place % weights.numel(), 8)
    integers[index] ^= flip.to(integers.dtype)
    assert _sum_of(weights) != before


def test_swapped_rows_and_chunks_change_the_checksum() -> None:
    weights = torch.randn(10_000, 16)  # more than one chunk
    for rows in ((0, 1), (3, 9), (0, 9999)):
        swapped = weights.clone()
        swapped[list(rows)] = weights[list(reversed(rows))]
        assert _sum_of(weights) != _sum_of(swapped)
    weights = torch.arange(1 << 17, dtype=torch.float32)
    assert _sum_of(weights) != _sum_of(weights.roll(1 << 16))


def test_equal_bits_give_equal_checksums_also_where_they_are_not_numbers() -> None:
    weights, moments = torch.tensor([[torch.nan, -torch.inf], [0.0, 1e-45]]), torch.rand(5)
    assert _sum_of(weights, moments) == _sum_of(weights.clone(), moments)
    assert _sum_of(weights, moments) == _sum_of(weights.t().contiguous().t(), moments)
    assert _sum_of(weights, moments) != _sum_of(weights, moments + 1), "state counts as well"
    assert _sum_of(torch.tensor([0.0])) != _sum_of(torch.tensor([-0.0]))


def test_the_error_names_table_shard_ranks_and_what_to_do() -> None:
    message = str(DivergenceError([DivergentShard("users", 1, (2, 3))]))
    assert "users, shard 1, on rank(s) 2, 3" in message
    assert "divergence_check.action=rebroadcast" in message
