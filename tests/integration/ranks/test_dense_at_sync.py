"""`dense: at_sync` on real gloo ranks: exact, and no group waits for another between syncs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.ranks import run_ranks
from tests.harness.small_model import (
    Case,
    DenseReference,
    average,
    dense_parameters,
    form_groups,
    gather_tables,
    make_batch,
    set_tables,
    spec_of,
)
from trainer.models.networks import build_model
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers, fused_optimizer_params
from trainer.parallel.planner import make_plan
from trainer.parallel.sharding import build_parallel_model, sharders
from trainer.parallel.sync import Sync, build_sync, is_sync_step
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

TOLERANCE = 1e-6
DENSE_LR = 0.05


def _spec(case: Case, optimizer: str, **table_types: str) -> JobSpec:
    document = spec_of(case).model_dump(mode="json")
    document["parallelism"]["dense"] = "at_sync"
    document["optimizer"]["dense"] = {"name": optimizer, "lr": DENSE_LR}
    for table in document["embedding_tables"]:
        if table["name"] in table_types:
            table["constraints"]["sharding_types"] = [table_types[table["name"]]]
    return validate_spec(document)


def _build(spec: JobSpec, case: Case) -> tuple[TwoDParallel, Optimizers, Sync]:
    model, _ = build_parallel_model(spec, form_groups(case))
    optimizers = Optimizers(model, spec.optimizer, spec.moment_scale)
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=True))
    return model, optimizers, sync


def _step(model: TwoDParallel, optimizers: Optimizers, case: Case, step: int) -> None:
    optimizers.begin_step(step, case.num_steps)
    loss, _ = model(make_batch(step, model.groups.rank, case.batch_size))
    loss.backward()
    optimizers.step()


def _train(case: Case, optimizer: str) -> dict[str, Any]:
    """Train `case` on this rank; its copies of tables and dense part."""
    spec = _spec(case, optimizer)
    model, optimizers, sync = _build(spec, case)
    set_tables(model)
    start = dense_parameters(model)
    for step in range(1, case.num_steps + 1):
        _step(model, optimizers, case, step)
        if is_sync_step(step, spec.parallelism.sync):
            sync()
    sync.close()
    return {
        "tables": gather_tables(model),
        "dense": dense_parameters(model),
        "dense_start": start,
        "sharding_ranks": model.groups.sharding_ranks,
    }


class LocalReference(DenseReference):
    """M copies of tables *and* dense part, trained by their own ranks and averaged at syncs."""

    def __init__(self, case: Case, dense_start: dict[str, torch.Tensor], optimizer: str) -> None:
        super().__init__(case, dense_start)
        self.networks = [copy.deepcopy(self.network) for _ in self.groups]
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
        self.optimizers = [kind(self._dense(n).values(), lr=DENSE_LR) for n in self.networks]

    @staticmethod
    def _dense(network: nn.Module) -> dict[str, nn.Parameter]:
        return {n: p for n, p in network.named_parameters() if "embedding_bags" not in n}

    def run(self) -> None:
        """Train all copies, averaging everything as the case says."""
        for step in range(1, self.case.num_steps + 1):
            for index in range(len(self.groups)):
                self._train_copy(index, step)
            if step % self.case.sync_every == 0:
                average(self.tables)
                average(self.moments)
                self._average_dense()

    def _train_copy(self, index: int, step: int) -> None:
        ranks, self.network = self.groups[index], self.networks[index]
        dense = list(self._dense(self.network).values())
        leaves = {n: t.clone().requires_grad_() for n, t in self.tables[index].items()}
        losses = [self._loss(leaves, make_batch(step, r, self.case.batch_size)) for r in ranks]
        grads = torch.autograd.grad(torch.stack(losses).mean(), [*leaves.values(), *dense])
        for name, grad in zip(leaves, grads, strict=False):
            self._update_rows(index, name, grad)
        for parameter, grad in zip(dense, grads[len(leaves) :], strict=True):
            parameter.grad = grad
        self.optimizers[index].step()

    @torch.no_grad()
    def _average_dense(self) -> None:
        for copies in zip(*map(self._dense_tensors, range(len(self.groups))), strict=True):
            mean = torch.stack(copies).mean(dim=0)
            for tensor in copies:
                tensor.copy_(mean)

    def _dense_tensors(self, index: int) -> Iterator[torch.Tensor]:
        for parameter in self._dense(self.networks[index]).values():
            yield parameter.data
            yield from (v for v in self.optimizers[index].state[parameter].values() if v.dim())


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        (Case(4, 2, sync_every=3, num_steps=7), "adam"),
        pytest.param(Case(3, 1, sync_every=2, num_steps=4), "sgd", marks=pytest.mark.slow),
    ],
)
def test_copies_trained_apart_and_averaged_equal_the_reference(case: Case, optimizer: str) -> None:
    ranks = run_ranks(_train, case.world_size, case, optimizer)
    reference = LocalReference(case, ranks[0]["dense_start"], optimizer)
    reference.run()
    for result in ranks:
        index = reference.groups.index(result["sharding_ranks"])
        for name, table in reference.tables[index].items():
            torch.testing.assert_close(result["tables"][name], table, atol=TOLERANCE, rtol=0)
        for name, parameter in reference._dense(reference.networks[index]).items():
            torch.testing.assert_close(
                result["dense"][name], parameter.detach(), atol=TOLERANCE, rtol=0
            )
    if case.num_steps % case.sync_every:
        first, last = ranks[0]["dense"], ranks[-1]["dense"]
        assert any(not torch.equal(value, last[name]) for name, value in first.items())


def _train_one_group_after_the_other(case: Case) -> dict[str, Any]:
    """Group 1 begins only when group 0 has trained: any collective across them would hang."""
    spec = _spec(case, "adam", genres="data_parallel")
    model, optimizers, sync = _build(spec, case)
    assert model.data_parallel_tables()
    store = dist.distributed_c10d._get_default_store()
    is_first = 0 in model.groups.sharding_ranks
    if not is_first:
        store.wait([f"trained-{shard}" for shard in range(model.groups.layout.shard_group_size)])
    for step in range(1, case.num_steps + 1):
        _step(model, optimizers, case, step)
    if is_first:
        store.set(f"trained-{model.groups.shard_index}", "yes")
    apart = dense_parameters(model)
    sync()
    return {
        "apart": apart,
        "dense": dense_parameters(model),
        "genres": model.data_parallel_tables()["genres"].detach().clone(),
    }


def test_between_syncs_no_group_waits_for_another() -> None:
    case = Case(4, 2, sync_every=3, num_steps=3)
    ranks = run_ranks(_train_one_group_after_the_other, 4, case)
    assert any(
        not torch.equal(value, ranks[1]["apart"][name]) for name, value in ranks[0]["apart"].items()
    ), "the groups trained on rows of their own"
    for result in ranks:
        assert torch.equal(result["genres"], ranks[0]["genres"])
        for name, value in result["dense"].items():
            assert torch.equal(value, ranks[0]["dense"][name])


def _start_from_another_seed(case: Case) -> dict[str, torch.Tensor]:
    groups = form_groups(case)
    spec = _spec(case, "sgd")
    torch.manual_seed(groups.rank)
    network = build_model(spec, groups.device)
    network.register_buffer("counts", torch.full((3,), float(groups.rank)))
    table_sharders = sharders(spec, fused_optimizer_params(spec.optimizer.sparse, 1.0))
    plan = make_plan(network, spec, groups, table_sharders)
    model = TwoDParallel(network, groups, plan, table_sharders, dense="at_sync")
    return {**dense_parameters(model), "counts": model.module.counts}


def test_all_dense_copies_start_equal_even_from_different_seeds() -> None:
    ranks = run_ranks(_start_from_another_seed, 4, replace(Case(4, 2), placement="inter_host"))
    for result in ranks:
        for name, value in result.items():
            assert torch.equal(value, ranks[0][name]), name
