"""Row-wise moments between column layouts: exact where they can be; names in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.state_dict import (
    _problems,
    moment_key,
    moments_of,
    stored_columns,
    table_of,
)

widths = st.lists(st.integers(1, 32).map(lambda n: 4 * n), min_size=1, max_size=8)


def _ranges(widths: list[int]) -> list[range]:
    stops = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [range(stop - width, stop) for stop, width in zip(stops, widths, strict=True)]


@given(widths, st.integers(0, 2**32 - 1))
def test_ranges_join_to_the_mean_over_all_their_columns(widths: list[int], seed: int) -> None:
    squares = torch.rand(5, sum(widths), generator=torch.Generator().manual_seed(seed)).double()
    stored = {c: squares[:, c.start : c.stop].mean(1) for c in _ranges(widths)}
    joined = moments_of(range(sum(widths)), stored)
    torch.testing.assert_close(joined, squares.mean(1), rtol=1e-12, atol=0)


@given(widths, st.integers(0, 2**32 - 1))
def test_equal_moments_join_bitwise(widths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(50, generator=generator) * 10.0 ** torch.arange(-30, 20)
    stored = dict.fromkeys(_ranges(widths), values)
    assert torch.equal(moments_of(range(sum(widths)), stored).float(), values)


def test_a_part_takes_the_moments_of_its_range_and_counts_each_column_once() -> None:
    values = torch.rand(9)
    assert torch.equal(moments_of(range(4, 12), {range(0, 16): values}).float(), values)
    stored = {range(0, 8): torch.tensor([1.0]), range(8, 12): torch.tensor([4.0])}
    assert moments_of(range(4, 12), stored).item() == pytest.approx((4 * 1 + 4 * 4) / 8)


@given(widths)
def test_the_names_in_a_checkpoint_tell_the_ranges_and_whole_rows_keep_the_plain_one(
    widths: list[int],
) -> None:
    ranges, whole = _ranges(widths), range(sum(widths))
    assert moment_key("users.momentum1", whole, whole) == "users.momentum1"
    keys = {moment_key("users.momentum1", columns, whole) for columns in ranges}
    others = {"users.momentum10", "users.momentum1.columns_x", "more.users.momentum1.columns_0_4"}
    assert stored_columns("users.momentum1", whole, keys | others) == ranges


def test_a_table_of_another_size_is_named() -> None:
    key = "model.network.embedding_bags.movies.weight"
    stored = {key: torch.Size([53, 16])}
    (problem,) = _problems({key: torch.empty(54, 16)}, [], stored, {"movies"})
    assert problem == "table movies is [53, 16] in the checkpoint and [54, 16] in this job"


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("model.network.arch.embedding_bag_collection.embedding_bags.users.weight", "users"),
        ("network.tables.embeddings.users.weight", "users"),
        ("model.network.dynamic._managed_collision_modules.users.ids", "users"),
        ("optim.state.sparse_.network.embeddings.users.weight.users.momentum1", "users"),
        (
            "optim.state.sparse_.network.embeddings.users.weight.users.momentum1.columns_0_4",
            "users",
        ),
        ("model.network.embeddings.weight", None),
        ("model.network.embeddings.tower.0.weight", None),
        ("model.network.embeddings.0.weight", None),
        ("model.network.embeddings.word.weight", None),
        ("model.network.embeddings.proj.bias", None),
        ("optim.state.dense_.network.embeddings.weight.exp_avg", None),
    ],
)
def test_a_table_is_told_by_its_place_whatever_a_user_calls_modules(
    key: str, table: str | None
) -> None:
    assert table_of(key, {"users", "movies"}) == table
