"""`dense: at_sync` on real gloo ranks: no group waits for another between syncs.

That it is exact is in test_sharding_types.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from tests.harness.small_model import (
    Case,
    build_trained,
    dense_parameters,
    form_groups,
    make_batch,
    spec_of,
    take_step,
    with_sync,
)
from trainer.models.networks import PairwiseInteraction, build_model
from trainer.parallel import model as models
from trainer.parallel.divergence import DivergenceGuard
from trainer.parallel.model import TwoDParallel, share_buffers
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.planner import make_plan
from trainer.parallel.sharding import sharders
from trainer.parallel.sync import build_sync
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import DivergenceCheckSpec


def _spec(
    case: Case, optimizer: str, dense: str = "at_sync", precision: str = "fp32", **types: str
) -> JobSpec:
    document = spec_of(case).model_dump(mode="json")
    document["training"]["dense_precision"] = precision
    document["parallelism"]["dense"] = dense
    document["optimizer"]["dense"] = {"name": optimizer, "lr": 0.05}
    for table in document["embedding_tables"]:
        if table["name"] in types:
            table["constraints"]["sharding_types"] = [types[table["name"]]]
    return validate_spec(document)


def _train_one_group_after_the_other(case: Case, precision: str) -> dict[str, Any]:
    """Group 1 begins only when group 0 has trained: any collective across them would hang."""
    spec = _spec(case, "adam", precision=precision, genres="data_parallel")
    model, optimizers = build_trained(spec, form_groups(case))
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=True))
    assert model.data_parallel_tables()
    store = dist.distributed_c10d._get_default_store()
    is_first = 0 in model.groups.sharding_ranks
    if not is_first:
        store.wait([f"trained-{shard}" for shard in range(model.groups.layout.shard_group_size)])
    for step in range(1, case.num_steps + 1):
        batch = make_batch(step, model.groups.rank, case.batch_size)
        take_step(model, optimizers, batch, step, case.num_steps)
    if is_first:
        store.set(f"trained-{model.groups.shard_index}", "yes")
    apart = dense_parameters(model)
    sync()
    return {
        "apart": apart,
        "dense": dense_parameters(model),
        "genres": model.data_parallel_tables()["genres"].detach().clone(),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_between_syncs_no_group_waits_for_another(precision: str) -> None:
    case = Case(4, 2, sync_every=3, num_steps=3)
    ranks = run_ranks(_train_one_group_after_the_other, 4, case, precision)
    assert any(
        not torch.equal(value, ranks[1]["apart"][name]) for name, value in ranks[0]["apart"].items()
    ), "the groups trained on rows of their own"
    for result in ranks:
        assert torch.equal(result["genres"], ranks[0]["genres"])
        torch.testing.assert_close(result["dense"], ranks[0]["dense"], atol=0, rtol=0)


def _from_another_seed(
    case: Case,
    dense: Literal["every_step", "at_sync"] = "at_sync",
    *,
    is_frozen: bool = False,
    optimizer: str = "adam",
    **own: torch.Tensor,
) -> tuple[TwoDParallel, JobSpec]:
    """A model with parameters of its `own`, which starts from this rank's seed."""
    groups = form_groups(case)
    spec = _spec(case, optimizer, dense)
    torch.manual_seed(groups.rank)
    network = build_model(spec, groups.device)
    counts = torch.full((3, 1), float(groups.rank)).expand(3, 2)
    network.register_buffer("counts", counts, persistent=False)
    for name, value in own.items():
        network.register_parameter(name, torch.nn.Parameter(value))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not is_frozen or "embedding" in name)
    table_sharders = sharders(spec)
    plan = make_plan(network, spec, groups, table_sharders)
    return TwoDParallel(network, groups, plan, table_sharders, spec), spec


def _start_from_another_seed(case: Case) -> dict[str, torch.Tensor]:
    strided = torch.full((4, 6), float(dist.get_rank()))[:, ::2]
    model, _ = _from_another_seed(case, strided=strided)
    frozen, _ = _from_another_seed(case, "every_step", is_frozen=True)
    parts = {"trained": model, "frozen": frozen}
    return {
        f"{part}.{name}": value
        for part, model in parts.items()
        for name, value in [*dense_parameters(model).items(), ("counts", model.module.counts)]
    }


def test_all_dense_copies_start_equal_even_from_different_seeds() -> None:
    ranks = run_ranks(_start_from_another_seed, 4, replace(Case(4, 2), placement="inter_host"))
    for result in ranks:
        torch.testing.assert_close(result, ranks[0], atol=0, rtol=0)


def _sync_transposed(case: Case) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A transposed parameter, its first moment and its steps, which each rank had changed by its
    number.
    """
    turned = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    model, spec = _from_another_seed(case, turned=turned)
    optimizers = Optimizers(model, spec)
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=True))
    parameter = model.module.turned
    state = optimizers.dense.state[parameter]
    with torch.no_grad():
        state["exp_avg"] += model.groups.rank * parameter
        # A group may have left the parameter out of some steps.
        state["step"] += model.groups.rank
        parameter += model.groups.rank
    sync()
    return parameter.detach().clone(), state["exp_avg"].clone(), state["step"].item()


def test_a_transposed_parameter_is_synced_with_its_moments_and_steps() -> None:
    turned = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    ranks = run_ranks(_sync_transposed, 4, replace(Case(4, 2), placement="inter_host"))
    for rank, (parameter, moment, num_steps) in enumerate(ranks):
        mean = rank % 2 + 1.0  # of ranks 0 and 2, or of 1 and 3
        torch.testing.assert_close(parameter, turned + mean, atol=0, rtol=0)
        torch.testing.assert_close(moment, mean * turned, atol=0, rtol=0)
        assert num_steps == mean


def _sync_complex(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """A complex parameter, its moment and a buffer after each rank changed them by i times its
    number; what is found and repaired where rank 0's moment differs; the buffer as all share it.
    """
    model, spec = _from_another_seed(case, optimizer="adagrad", phase=torch.ones(3, dtype=dtype))
    model.module.register_buffer("turn", torch.ones(2, dtype=dtype))
    optimizers = Optimizers(model, spec)
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=True))
    check = DivergenceCheckSpec(every_syncs=1, action="rebroadcast")
    guard = DivergenceGuard(model, check, optimizers.combined, compare_state=True)
    rank, phase, turn = model.groups.rank, model.module.phase, model.module.turn
    moment = optimizers.dense.state[phase]["sum"]
    changed = phase.detach(), moment, turn
    for each in changed:
        each += rank * 1j
    sync()
    synced = [each.clone() for each in changed]
    moment.imag[1] += rank == 1
    found = guard.check()
    turn += rank * 1j
    share_buffers(model.module, model.groups.global_group)
    return {"synced": synced, "found": found, "repaired": moment.clone(), "shared": turn.clone()}


def test_complex_parameters_and_buffers_are_averaged_and_compared_by_their_parts() -> None:
    dtype = torch.complex64
    for result in run_ranks(_sync_complex, 2, Case(2, 1), dtype):
        for found, start, size in zip(result["synced"], (1, 0, 1), (3, 3, 2), strict=True):
            assert torch.equal(found, torch.full((size,), start + 0.5j, dtype=dtype))
        ((name, ranks_that_differ),) = [(each.table, each.ranks) for each in result["found"]]
        assert (name.rpartition(".")[2], ranks_that_differ) == ("phase", (1,))
        assert torch.equal(result["repaired"], result["synced"][1])
        assert torch.equal(result["shared"], torch.full((2,), 1 + 1j, dtype=dtype))


def _share_transposed(case: Case) -> dict[str, torch.Tensor]:
    model, _ = _from_another_seed(case)
    rank, buffers = model.groups.rank, {}
    for dtype in (torch.float32, torch.int64):
        values = torch.arange(6, dtype=dtype).view(2, 3) + 2 * rank
        buffers[str(dtype)] = values.t().contiguous().t() if rank else values
        model.module.register_buffer(f"turned_{values.element_size()}", buffers[str(dtype)])
    share_buffers(model.module, model.groups.global_group)
    return {name: buffer.clone() for name, buffer in buffers.items()}


def test_buffers_are_shared_however_they_lie_in_memory() -> None:
    values = torch.arange(6).view(2, 3)
    for result in run_ranks(_share_transposed, 2, Case(2, 1)):
        assert torch.equal(result["torch.float32"], values + 1.0)
        assert torch.equal(result["torch.int64"], values)


def _sync_under_two_names(case: Case) -> float:
    """A buffer that the network has thrice, by two modules, goes on by 10 as a sync overlaps."""
    model, spec = _from_another_seed(case)
    norm = torch.nn.BatchNorm1d(1)
    model.module.norm, model.module.layers = norm, torch.nn.Sequential(norm)
    model.module.register_buffer("mean", norm.running_mean)
    optimizers = Optimizers(model, spec)
    overlapped = with_sync(spec, overlap=True)
    sync = build_sync(model, overlapped, extra=lambda: optimizers.synced_whole(dense=True))
    norm.running_mean.fill_(model.groups.rank)
    sync()
    norm.running_mean += 10
    sync.finish()
    sync.close()
    return norm.running_mean.item()


def test_a_buffer_with_several_names_is_averaged_once() -> None:
    found = run_ranks(_sync_under_two_names, 4, replace(Case(4, 2), placement="inter_host"))
    assert found == [11.0, 12.0, 11.0, 12.0]


@patch.object(models, "dist")
def test_all_of_the_dense_part_is_on_its_device_as_it_is_broadcast(collectives: Mock) -> None:
    """As NCCL needs it, though TorchRec makes parts of its modules on the host."""
    network = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), PairwiseInteraction(3))
    models._start_equal(network, Mock(), torch.device("meta"))
    sent = [call.args[0].device.type for call in collectives.broadcast.call_args_list]
    assert sent == ["meta"] * 4
