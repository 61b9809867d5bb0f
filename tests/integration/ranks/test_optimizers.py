"""All optimizers of a model together on gloo ranks, against plain torch."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_in_turn, run_ranks
from tests.harness.small_model import (
    TABLE_ROWS,
    Case,
    build_trained,
    dense_parameters,
    form_groups,
    make_batch,
    spec_of,
    take_step,
)
from trainer.models.networks import build_model
from trainer.parallel.mesh import MeshGroups
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers, factor
from trainer.parallel.sharding import build_parallel_model
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.training import DenseOptimizerName, SparseOptimizerName, SparseOptimizerSpec

NUM_STEPS, BATCH_SIZE = 6, 8
NAMES = get_args(SparseOptimizerName)
# L = 1: each rank trains its own copy of the tables, so a plain model beside it is the reference.
ALONE = Case(2, 1, batch_size=BATCH_SIZE)


def scheduled_spec(
    case: Case,
    name: str,
    data_parallel: tuple[str, ...] = (),
    data_type: str = "fp32",
    dense: dict[str, Any] | None = None,
) -> JobSpec:
    """`case` with the sparse optimizer `name`, a schedule, and some tables whole on every rank."""
    document = spec_of(case).model_dump(mode="json", exclude_unset=True)
    decay = 0.05 if data_type == "fp32" else 0.0  # half precision would round it away: refused
    document["optimizer"]["sparse"] = {"name": name, "lr": 0.2, "eps": 0.01, "weight_decay": decay}
    document["optimizer"]["dense"] |= dense or {}
    document["optimizer"]["schedule"] = {"warmup_steps": 3, "decay": "linear", "min_ratio": 0.1}
    for table in document["embedding_tables"]:
        table["data_type"] = data_type
        if table["name"] in data_parallel:
            table["constraints"] = {"sharding_types": ["data_parallel"]}
    return validate_spec(document)


def train(model: TwoDParallel, optimizers: Optimizers, steps: range) -> None:
    """Take `steps` (counted from 1) of a run of NUM_STEPS."""
    for step in steps:
        batch = make_batch(step, dist.get_rank(), BATCH_SIZE)
        take_step(model, optimizers, batch, step, NUM_STEPS)


def plain_values(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of a model's tensors by name; of sharded ones, this rank's shard."""
    values = ((name, held_tensors(value)) for name, value in state_dict.items())
    return {name: held.detach().clone() for name, (held,) in values}


def held_tensors(value: Any) -> list[torch.Tensor]:
    """What this rank holds of a table or a moment, sharded or whole."""
    return value.to_local().local_shards() if hasattr(value, "to_local") else [value]


def tables_of(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tables in a model's state dict by name."""
    values = plain_values(state_dict)
    return {path.split(".")[-2]: v for path, v in values.items() if ".embedding_bags." in path}


class PlainTraining:
    """The same model unsharded, its tables updated by the formulas written out."""

    def __init__(self, spec: JobSpec, start: TwoDParallel, share: float = 1.0) -> None:
        self.spec = spec
        self.share = share
        self.model = build_model(spec, torch.device("cpu"))
        self.model.network.sparse_arch.to_empty(device="cpu")
        self.model.load_state_dict(plain_values(start.state_dict()))
        self.tables = {
            name.split(".")[-2]: parameter
            for name, parameter in self.model.named_parameters()
            if ".embedding_bags." in name
        }
        self.moments = {name: torch.zeros_like(table) for name, table in self.tables.items()}
        held = {id(table) for table in self.tables.values()}
        self.dense = [p for p in self.model.parameters() if id(p) not in held]
        self.squares = {p: torch.zeros_like(p) for p in self.dense}

    def train(self) -> None:
        for step in range(1, NUM_STEPS + 1):
            self.model.zero_grad()
            loss, _ = self.model(make_batch(step, dist.get_rank(), BATCH_SIZE))
            loss.backward()
            self._update(factor(step, NUM_STEPS, self.spec.optimizer.schedule))

    @torch.no_grad()
    def _update(self, ratio: float) -> None:
        dense = self.spec.optimizer.dense
        for parameter in self.dense:
            dist.all_reduce(parameter.grad)
            change = parameter.grad / 2 + dense.weight_decay * parameter
            if dense.name == "adagrad":
                self.squares[parameter] += self.share * change**2
                change /= self.squares[parameter].sqrt() + 1e-10
            parameter -= dense.lr * ratio * self.share * change
        self._update_tables(ratio)

    @torch.no_grad()
    def _update_tables(self, ratio: float) -> None:
        sparse = self.spec.optimizer.sparse
        lr, c = sparse.lr * ratio * self.share, self.spec.moment_scale
        for name, table in self.tables.items():
            grad = table.grad
            if sparse.name == "sgd":
                table -= lr * grad
            else:
                squares = self.share * grad**2
                by_row = squares.mean(1, keepdim=True).expand_as(squares)
                self.moments[name] += squares if sparse.name == "adagrad" else by_row
                table -= lr / ((self.moments[name] / c).sqrt() + sparse.eps) * grad
            table *= 1 - lr * sparse.weight_decay


def train_beside_plain(
    name: str, groups: MeshGroups, share: float = 1.0, dense: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Tables of one rank after the run, and of the plain model; two tables are data-parallel."""
    spec = scheduled_spec(ALONE, name, ("users", "genres"), dense=dense)
    model, optimizers = build_trained(spec, groups)
    optimizers.set_share(share)
    plain = PlainTraining(spec, model, share)
    train(model, optimizers, range(1, NUM_STEPS + 1))
    plain.train()
    params = optimizers.dense.params
    return {
        "tables": tables_of(model.state_dict()),
        "plain": {name: table.detach() for name, table in plain.tables.items()},
        "dense": [parameter.detach() for parameter in params.values()],
        "plain_dense": [parameter.detach() for parameter in plain.dense],
        "dense_names": list(params),
        "rates": optimizers.rates(),
        "whole": [[t.shape for t in group] for group in optimizers.synced_whole(dense=False)],
        "whole_and_dense": [len(group) for group in optimizers.synced_whole(dense=True)],
    }


def train_half(name: str, data_parallel: tuple[str, ...], groups: MeshGroups) -> dict[str, Any]:
    """fp16 tables after the run, and the dtypes of the moments of data-parallel ones."""
    model, optimizers = build_trained(scheduled_spec(ALONE, name, data_parallel, "fp16"), groups)
    with torch.no_grad():
        for path, table in model.state_dict().items():
            if ".embedding_bags." in path:
                (shard,) = held_tensors(table)
                shard.copy_(torch.arange(shard.numel()).view_as(shard) / 500)
    train(model, optimizers, range(1, NUM_STEPS + 1))
    moments = optimizers.synced_whole(dense=False)[1]
    return {"tables": tables_of(model.state_dict()), "dtypes": {m.dtype for m in moments}}


def train_all_alone() -> dict[str, dict[str, Any]]:
    """Runs of every sparse optimizer, on one start of the ranks."""
    groups = form_groups(ALONE)
    return {
        name: train_beside_plain(name, groups)
        | {"half": [train_half(name, whole, groups) for whole in ((), ("users", "movies"))]}
        | {"lone": train_beside_plain(name, groups, 0.25, {"name": "adagrad", "weight_decay": 0.3})}
        for name in NAMES
    }


@pytest.fixture(scope="module")
def trained_alone() -> list[dict[str, dict[str, Any]]]:
    """Results of `train_all_alone` by rank."""
    return run_ranks(train_all_alone, 2)


@pytest.mark.parametrize("name", NAMES)
def test_each_update_uses_the_rate_of_its_step_however_a_table_is_sharded(
    trained_alone: list[dict[str, dict[str, Any]]], name: str
) -> None:
    for rank in trained_alone:
        assert rank[name]["plain"].keys() == TABLE_ROWS.keys()
        torch.testing.assert_close(rank[name]["tables"], rank[name]["plain"], atol=2e-6, rtol=0)
        assert rank[name]["rates"] == {
            "optimizer/lr_sparse": pytest.approx(0.2 * 0.1),
            "optimizer/lr_dense": pytest.approx(0.05 * 0.1),
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_group_alone_moves_weights_less_and_its_moments_grow_as_those_of_all(
    trained_alone: list[dict[str, dict[str, Any]]], name: str
) -> None:
    for rank in trained_alone:
        lone = rank[name]["lone"]
        torch.testing.assert_close(lone["tables"], lone["plain"], atol=2e-6, rtol=0)
        torch.testing.assert_close(lone["dense"], lone["plain_dense"], atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_data_parallel_tables_are_synced_whole_and_left_out_of_the_dense_optimizer(
    trained_alone: list[dict[str, dict[str, Any]]], name: str
) -> None:
    result = trained_alone[0][name]
    assert [n for n in result["dense_names"] if "embedding_bags" in n] == []
    weights, states = result["whole"]
    assert sorted(weights) == [(11, 8), (37, 8)]
    row_bytes = SparseOptimizerSpec(name=name).state_bytes_per_row(8)
    assert sum(4 * state.numel() for state in states) == (11 + 37) * row_bytes
    # The dense optimizer here is SGD, which has no state.
    assert result["whole_and_dense"] == [len(weights) + len(result["dense_names"]), len(states)]


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_tables_train_alike_when_whole_on_every_rank(
    trained_alone: list[dict[str, dict[str, Any]]], name: str
) -> None:
    for rank in trained_alone:
        sharded, whole = rank[name]["half"]
        assert whole["dtypes"] <= {torch.float32}
        assert {table.dtype for table in sharded["tables"].values()} == {torch.float16}
        # A few roundings of fp16 values below 1.
        torch.testing.assert_close(whole["tables"], sharded["tables"], atol=2e-3, rtol=0)


def begin(name: str) -> dict[str, Any]:
    """What the dense optimizer `name` begins with, and the dense part before and after it came."""
    case = Case(1, 1)
    document = spec_of(case).model_dump(mode="json", exclude_unset=True)
    document["optimizer"]["dense"] = {"name": name, "lr": 0.1, "weight_decay": 0.1}
    del document["parallelism"]["sync"]
    spec = validate_spec(document)
    model, _ = build_parallel_model(spec, form_groups(case))
    before = dense_parameters(model)
    dense = Optimizers(model, spec).dense
    return {
        "before": before,
        "after": dense_parameters(model),
        "gradients": [parameter.grad for parameter in dense.params.values()],
        "state": [dict(dense.state.get(parameter, {})) for parameter in dense.params.values()],
        "rates": [(group["lr"], group["weight_decay"]) for group in dense.param_groups],
    }


def test_every_dense_parameter_has_its_state_before_the_first_step_and_its_weights_stay() -> None:
    names = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "adagrad": {"step", "sum"}, "sgd": set()}
    runs = run_in_turn(1, *((begin, name) for name in get_args(DenseOptimizerName)))
    for name, (found,) in zip(get_args(DenseOptimizerName), runs, strict=True):
        torch.testing.assert_close(found["after"], found["before"], atol=0, rtol=0)
        assert {gradient is None for gradient in found["gradients"]} == {True}
        assert found["rates"] == [(0.1, 0.1)]
        for each in found["state"]:
            kept = {key: value for key, value in each.items() if isinstance(value, torch.Tensor)}
            assert kept.keys() == names[name]
            assert not any(value.any() for value in kept.values())
