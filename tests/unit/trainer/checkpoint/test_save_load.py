"""Who writes what of a checkpoint: each rank finds its share by itself, and copies that."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from trainer.checkpoint.save_load import SharePlanner, Staging, assign_writes, lock_exactly
from trainer.layout.layout import Layout, MeshLayout, WorkerSite
from trainer.parallel.mesh import MeshGroups

NONE = cast(Any, None)  # no process groups: nothing is communicated


def _groups(layout: Layout) -> list[MeshGroups]:
    """Those of each rank, on hosts of two."""
    sites = tuple(WorkerSite(r, f"host-{r // 2}", r % 2, 0) for r in range(layout.world_size))
    mesh, cpu, timeout = MeshLayout.build(layout, sites), torch.device("cpu"), timedelta(0)
    return [
        MeshGroups(rank, mesh, sites, cpu, timeout, NONE, NONE, NONE, NONE, NONE)
        for rank in range(layout.world_size)
    ]


def _state(groups: MeshGroups, tables: list[int], dense: list[int]) -> dict[str, Any]:
    """Tables of so many rows, split by rows, and dense parameters of so many elements."""
    size, place = groups.layout.shard_group_size, groups.shard_index
    state: dict[str, Any] = {f"dense.{i}": torch.empty(numel) for i, numel in enumerate(dense)}
    for index, num_rows in enumerate(tables):
        starts = [min(num_rows, -(-num_rows // size) * at) for at in (place, place + 1)]
        shard = torch.empty(starts[1] - starts[0], 4)
        state[f"table.{index}"] = LocalShardsWrapper([shard], [(starts[0], 0)])
    return state | {"meters": b"x"}


def _plan(planner: DefaultSavePlanner, state: dict[str, Any]) -> SavePlan:
    planner.set_up_planner(state)
    return planner.create_local_plan()


@given(
    num_shards=st.integers(1, 5),
    num_copies=st.integers(1, 4),
    placement=st.sampled_from(["intra_host", "inter_host"]),
    tables=st.lists(st.integers(1, 40), max_size=6),
    dense=st.lists(st.integers(0, 40), max_size=6),
)
def test_each_piece_is_written_by_one_rank_that_holds_it(
    num_shards: int, num_copies: int, placement: str, tables: list[int], dense: list[int]
) -> None:
    ranks = _groups(Layout(num_shards * num_copies, num_shards, placement))
    states = [_state(groups, tables, dense) for groups in ranks]
    held = [_plan(DefaultSavePlanner(), state) for state in states]
    planners = [SharePlanner(groups) for groups in ranks]
    shares = [_plan(*each) for each in zip(planners, states, strict=True)]
    there = {item.index: item for plan in held for item in plan.items}
    wanted = {index for index, item in there.items() if index.fqn[0] != "t" or _numel(item)}
    written = Counter(item.index for share in shares for item in share.items)
    assert written == Counter(dict.fromkeys(wanted, 1))
    for share, plan in zip(shares, held, strict=True):
        assert {item.index for item in share.items} <= {item.index for item in plan.items}
        assert share.planner_data.keys() == {item.index.fqn for item in share.items}


def _numel(item: Any) -> int:
    return int(item.tensor_data.chunk.sizes.numel())


@pytest.mark.parametrize("placement", ["intra_host", "inter_host"])
def test_copies_of_a_shard_write_equally_many_bytes(placement: str) -> None:
    ranks = _groups(Layout(8, 2, placement))
    plans = [_plan(SharePlanner(groups), _state(groups, [800] * 12, [])) for groups in ranks]
    bytes_of = [sum(_numel(item) for item in plan.items if item.tensor_data) for plan in plans]
    assert bytes_of == [3 * 400 * 4] * 8


def test_equal_pieces_of_a_table_are_shared_out_alike_in_whatever_order_they_come() -> None:
    pieces = LocalShardsWrapper([torch.empty(2, 4)] * 2, [(0, 0), (0, 4)])
    items = _plan(DefaultSavePlanner(), {"table": pieces}).items
    assert assign_writes(items, 0, 2) != assign_writes(reversed(items), 1, 2)


@patch.object(torch, "cuda")
def test_copies_of_a_rank_on_cpus_ask_nothing_of_gpus_that_are_there(cuda: Mock) -> None:
    (groups,) = _groups(Layout(1, 1, "intra_host"))
    planner = Staging(groups).stage({"dense": torch.ones(2)})
    (item,) = planner.create_local_plan().items
    assert torch.equal(cast(torch.Tensor, planner.resolve_data(item)), torch.ones(2))
    assert not cuda.mock_calls


@pytest.mark.parametrize(
    ("of_user", "more"),
    [
        ("", "pinned_max_cached_size_mb:256"),
        ("max_split_size_mb:64", ",pinned_max_cached_size_mb:256"),
        ("pinned_max_cached_size_mb:8", ""),
    ],
)
def test_large_page_locked_copies_are_not_rounded_up_unless_the_user_says_otherwise(
    of_user: str, more: str
) -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(of_user)
        for _ in range(2):
            lock_exactly()
            assert torch._C._accelerator_getAllocatorSettings() == of_user + more
    finally:
        torch._C._accelerator_setAllocatorSettings("")
