"""The wrapper on NCCL against TorchRec's own DMPCollection and pipelined against plain, by step."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import NEEDS_CUDA
from tests.gpu.cuda_cases import (
    SyncMode,
    compare,
    compare_pipelined,
    exchange_between_groups,
    host_waits,
    world_sizes,
)
from tests.harness.ranks import run_ranks
from tests.harness.small_model import Case
from tests.integration.ranks.sharding_cases import ShardingCase
from trainer.spec.training import DensePrecision

pytestmark = NEEDS_CUDA

TOLERANCE = 1e-6


@pytest.mark.parametrize("mode", ["full", "touched_rows"])
@pytest.mark.parametrize("placement", ["intra_host", "inter_host"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_weights_and_moments_equal_those_of_dmp_collection_after_each_step_and_sync(
    sharding: str, placement: str, mode: SyncMode
) -> None:
    world_size, shard_group_size = world_sizes()
    case = ShardingCase(
        world_size,
        shard_group_size,
        sharding,
        sharding,
        placement=placement,
        hosts="a" * world_size,
        weighted=True,
    )
    # New ranks for each: what DMPCollection leaves behind crashed those that had served once.
    ranks = run_ranks(compare, world_size, case, mode, fresh=True, backend="nccl")
    for rank, gaps in enumerate(ranks):
        for index, gap in enumerate(gaps):
            where = (
                f"rank {rank}, step {index // 2 + 1}, {'after sync' if index % 2 else 'trained'}"
            )
            assert gap["weight"] <= TOLERANCE, where
            assert gap["state"] <= TOLERANCE, where
    assert min(_largest(ranks).values()) >= 0, "something was compared"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_pipelined_steps_equal_plain_ones(sharding: str, precision: DensePrecision) -> None:
    world_size, _ = world_sizes()
    case = Case(world_size, world_size, sharding=(sharding,), num_steps=20)
    # What differs in an order of additions may round to another number of TF32 or bf16.
    tolerance = TOLERANCE if precision == "fp32" else 2e-3
    ranks = run_ranks(compare_pipelined, world_size, case, precision, backend="nccl")
    assert all(len(gaps) == case.num_steps for gaps in ranks)
    assert all(0 <= gap <= tolerance for gap in _largest(ranks).values())


def _largest(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Of what was compared, the largest gap of any rank and step; minus infinity for nothing."""
    return {name: max(gap[name] for gaps in ranks for gap in gaps) for name in ("weight", "state")}


def test_groups_exchange_by_calls_of_nccl_none_of_which_blocks() -> None:
    ours, theirs = run_ranks(exchange_between_groups, 2, 3, backend="nccl")
    for round_, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        sent = [torch.arange(8.0) + 100 * index + 1000 * round_ for index in (0, 1)]
        for index, (swapped, gathered) in enumerate((mine, others)):
            assert torch.equal(swapped, torch.cat([each.view(2, 4)[index] for each in sent]))
            assert torch.equal(
                gathered, torch.cat([each.view(2, 4)[at] for at, each in enumerate(sent)])
            )


def test_the_host_waits_no_oftener_in_our_steps_than_in_those_of_torchrec() -> None:
    (found,) = run_ranks(host_waits, 1, backend="nccl")
    assert found["ours"] <= found["stock"]
