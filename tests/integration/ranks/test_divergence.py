"""The divergence guard on real gloo ranks: names what differs, repairs it or ends the attempt."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.integration.ranks.sync_cases import SyncCase, Table, Training
from trainer.coordination.detection import DivergentShard
from trainer.parallel.divergence import DivergenceGuard
from trainer.parallel.model import TwoDParallel
from trainer.spec.parallelism import DivergenceCheckSpec

# What a fault hits: a shard of a table or its moments, a whole table, a dense parameter.
TABLES = (Table(37), Table(11, sharding="data_parallel"))
WHOLE = ("table_1", "network.over_arch.bias")  # on every rank
TARGETS = ("table_0", "table_0.moments", *WHOLE)


def _tensor(model: TwoDParallel, target: str) -> torch.Tensor:
    whole = {**model.data_parallel_tables(), **dict(model.named_parameters())}
    for shard in model.table_shards():
        if target == shard.table:
            return shard.weight
        if target == f"{shard.table}.moments":
            return next(iter(shard.states.values()))
    return whole[target].detach()


def _flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[0] ^= 1 << 12


def _everything(model: TwoDParallel) -> list[torch.Tensor]:
    tensors = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    for shard in model.table_shards():
        tensors += [shard.weight, *shard.states.values()]
    return [tensor.clone() for tensor in tensors]


def _repair(case: SyncCase, bad_rank: int) -> list[dict[str, Any]]:
    """Flip a bit of each target in turn on one rank; findings, and whether all was as before."""
    run, check = Training(case), DivergenceCheckSpec(every_syncs=1, action="rebroadcast")
    guard = DivergenceGuard(run.model, check, run.optimizers.combined, compare_state=True)
    sync = run.build_sync()
    run.train()
    sync()
    results = [{"found": guard.check(), "repaired": True}]
    for target in TARGETS:
        before = _everything(run.model)
        if run.model.groups.rank == bad_rank:
            _flip_a_bit(_tensor(run.model, target))
        found = guard.check()
        after = _everything(run.model)
        equal = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        results.append({"found": found, "repaired": equal})
    sync.renew()
    run.train()
    sync()
    results.append({"found": guard.check(), "repaired": True})
    return results


@pytest.mark.parametrize(
    ("case", "bad_rank", "shard"),
    [
        (SyncCase(4, 2, TABLES), 3, 1),
        pytest.param(
            SyncCase(4, 2, TABLES, "inter_host", sync={"mode": "full", "dtype": "bf16"}),
            *(2, 0),
            marks=pytest.mark.slow,
        ),
        # Of three copies the odd one out is wrong, even where it is the first.
        (SyncCase(3, 1, TABLES), 0, 0),
    ],
)
def test_one_flipped_bit_is_named_on_every_rank_and_repaired_bitwise(
    case: SyncCase, bad_rank: int, shard: int
) -> None:
    healthy: list[DivergentShard] = []
    shard_of = {t: 0 if t in WHOLE else shard for t in TARGETS}
    for results in run_ranks(_repair, case.world_size, case, bad_rank):
        found = [result["found"] for result in results]
        expected = [
            [DivergentShard(target.removesuffix(".moments"), shard_of[target], (bad_rank,))]
            for target in TARGETS
        ]
        assert found == [healthy, *expected, healthy]
        assert all(result["repaired"] for result in results)


def test_copies_are_compared_at_every_third_sync_only() -> None:
    spec = DivergenceCheckSpec(every_syncs=3, action="fail")
    guard = DivergenceGuard(Mock(), spec, Mock(), compare_state=True)
    assert [guard.is_due_after_sync() for _ in range(6)] == [False, False, True] * 2
