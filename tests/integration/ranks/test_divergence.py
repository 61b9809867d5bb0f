"""The divergence guard on real gloo ranks: names what differs, repairs it or ends the attempt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.small_model import Case, form_groups, make_batch, spec_of, take_step
from trainer.coordination.detection import DivergentShard
from trainer.parallel.divergence import DivergenceGuard
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import build_sync
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import DivergenceCheckSpec

# What a fault hits: a shard of a table or its moments, a whole table, a dense parameter.
WHOLE = ("genres", "network.over_arch.model.1.bias")  # on every rank
TARGETS = ("users", "users.moments", *WHOLE)


def _spec(case: Case, mode: str, dtype: str = "fp32") -> JobSpec:
    document = spec_of(case).model_dump(mode="json")
    document["parallelism"]["sync"] |= {"mode": mode, "dtype": dtype}
    for table in document["embedding_tables"]:
        if table["name"] == "genres":
            table["constraints"]["sharding_types"] = ["data_parallel"]
    return validate_spec(document)


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


class _Run:
    """A model that is trained with a sync and a guard after each step."""

    def __init__(self, case: Case, check: DivergenceCheckSpec, **sync: str) -> None:
        self.spec = _spec(case, **sync)
        self.model, _ = build_parallel_model(self.spec, form_groups(case))
        self.optimizers = Optimizers(self.model, self.spec.optimizer, self.spec.moment_scale)
        self.sync = build_sync(
            self.model, self.spec, extra=lambda: self.optimizers.synced_whole(dense=False)
        )
        self.guard = DivergenceGuard(
            self.model, check, self.optimizers.combined, compare_state=True
        )

    def step(self, step: int) -> None:
        rank, batch_size = self.model.groups.rank, self.spec.data.batch_size
        take_step(self.model, self.optimizers, make_batch(step, rank, batch_size), step, 10)
        self.sync()


def _repair(case: Case, bad_rank: int, mode: str, dtype: str) -> list[dict[str, Any]]:
    """Flip a bit of each target in turn on one rank; findings, and whether all was as before."""
    run = _Run(
        case, DivergenceCheckSpec(every_syncs=1, action="rebroadcast"), mode=mode, dtype=dtype
    )
    run.step(1)
    results = [{"found": run.guard.check(), "repaired": True}]
    for target in TARGETS:
        before = _everything(run.model)
        if run.model.groups.rank == bad_rank:
            _flip_a_bit(_tensor(run.model, target))
        found = run.guard.check()
        after = _everything(run.model)
        equal = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        results.append({"found": found, "repaired": equal})
    run.sync.renew()
    run.step(2)
    results.append({"found": run.guard.check(), "repaired": True})
    return results


@pytest.mark.parametrize(
    ("case", "bad_rank", "shard", "mode", "dtype"),
    [
        (Case(4, 2), 3, 1, "touched_rows", "fp32"),
        pytest.param(
            Case(4, 2, placement="inter_host"), 2, 0, "full", "bf16", marks=pytest.mark.slow
        ),
        # Of three copies the odd one out is wrong, even where it is the first.
        (Case(3, 1), 0, 0, "touched_rows", "fp32"),
    ],
)
def test_one_flipped_bit_is_named_on_every_rank_and_repaired_bitwise(
    case: Case, bad_rank: int, shard: int, mode: str, dtype: str
) -> None:
    healthy: list[DivergentShard] = []
    shard_of = {t: 0 if t in WHOLE else shard for t in TARGETS}
    for results in run_ranks(_repair, case.world_size, case, bad_rank, mode, dtype):
        found = [result["found"] for result in results]
        expected = [
            [DivergentShard(target.removesuffix(".moments"), shard_of[target], (bad_rank,))]
            for target in TARGETS
        ]
        assert found == [healthy, *expected, healthy]
        assert all(result["repaired"] for result in results)


def _checks_at(case: Case) -> list[bool]:
    """At which of six syncs a difference that was there all along is found."""
    run = _Run(case, DivergenceCheckSpec(every_syncs=3, action="fail"), mode="full")
    if run.model.groups.rank == 1:
        _flip_a_bit(_tensor(run.model, "users"))
    found = []
    for _ in range(6):
        found.append(run.guard.is_due_after_sync() and bool(run.guard.check()))
    return found


def test_copies_are_compared_at_every_third_sync_only() -> None:
    for found in run_ranks(_checks_at, 2, Case(2, 1)):
        assert found == [False, False, True] * 2
