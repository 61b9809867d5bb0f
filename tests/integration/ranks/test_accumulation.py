"""Gradient accumulation and clipping on real ranks, against the same written out in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_in_turn, run_ranks
from tests.harness.small_model import (
    build_trained,
    dense_parameters,
    form_groups,
    make_batch,
    rank_device,
    spec_of,
)
from tests.integration.ranks.test_optimizers import (
    ALONE,
    BATCH_SIZE,
    NUM_STEPS,
    PlainTraining,
    scheduled_spec,
    tables_of,
)
from trainer.parallel.collectives import reduce_parts
from trainer.parallel.optimizer import factor
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.training import DensePrecision

EVERY = 3
CLIP_NORM = 0.05


def is_dense_step(step: int) -> bool:
    """At the end of a window, and of the run, whose last window is shorter."""
    return step % EVERY == 0 or step == NUM_STEPS


class PlainAccumulation(PlainTraining):
    """Tables learn from each batch, the dense part from the clipped mean of a window."""

    def train(self) -> None:
        self.norms: list[float] = []
        sums = [torch.zeros_like(parameter) for parameter in self.dense]
        num_batches = 0
        for step in range(1, NUM_STEPS + 1):
            self.model.zero_grad()
            loss, _ = self.model(make_batch(step, dist.get_rank(), BATCH_SIZE))
            loss.backward()
            for total, parameter in zip(sums, self.dense, strict=True):
                total += parameter.grad
            num_batches += 1
            ratio = factor(step, NUM_STEPS, self.spec.optimizer.schedule)
            self._update_tables(ratio)
            if is_dense_step(step):
                self._update_dense([total / num_batches for total in sums], ratio)
                sums, num_batches = [torch.zeros_like(total) for total in sums], 0

    @torch.no_grad()
    def _update_dense(self, gradients: list[torch.Tensor], ratio: float) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        self.norms.append(norm.item())
        scale = min(1.0, CLIP_NORM / norm.item())
        for parameter, gradient in zip(self.dense, gradients, strict=True):
            parameter -= self.spec.optimizer.dense.lr * ratio * scale * gradient


def accumulating(spec: JobSpec, num_steps: int, **training: Any) -> JobSpec:
    """The job with windows of so many steps."""
    document = spec.model_dump(mode="json", exclude_unset=True)
    every = {"accumulate_steps": num_steps, "report_every_steps": num_steps}
    document["training"] = every | training
    document["checkpoint"] = {"every_steps": num_steps}
    return validate_spec(document)


def train_accumulated() -> dict[str, Any]:
    """This rank's tables and dense part, and those of the plain model."""
    scheduled = scheduled_spec(ALONE, "sgd", data_parallel=("users",))
    spec = accumulating(scheduled, EVERY, clip_norm=CLIP_NORM)
    model, optimizers = build_trained(spec, form_groups(ALONE))
    plain = PlainAccumulation(spec, model)
    for step in range(1, NUM_STEPS + 1):
        optimizers.begin_step(step, NUM_STEPS)
        with model.averaging(is_dense_step(step)):
            loss, _ = model(make_batch(step, dist.get_rank(), BATCH_SIZE))
            optimizers.weigh(torch.tensor(2.0 * BATCH_SIZE))
            loss.backward()
        optimizers.step(is_dense_step(step))
    plain.train()
    dense = {name: p for name, p in plain.model.named_parameters() if "embedding_bags" not in name}
    return {
        "tables": tables_of(model.state_dict()),
        "plain_tables": {name: table.detach() for name, table in plain.tables.items()},
        "dense": dense_parameters(model),
        "plain_dense": {name: parameter.detach() for name, parameter in dense.items()},
        "norms": plain.norms,
        "metrics": reduce_parts(list(optimizers.parts()), rank_device()),
    }


def test_dense_steps_use_the_clipped_mean_of_their_window_and_tables_every_batch() -> None:
    for rank in run_ranks(train_accumulated, 2):
        torch.testing.assert_close(rank["tables"], rank["plain_tables"], atol=2e-6, rtol=0)
        assert len(rank["dense"]) == len(rank["plain_dense"])
        for name, value in rank["dense"].items():
            (expected,) = (v for n, v in rank["plain_dense"].items() if n.endswith(name))
            torch.testing.assert_close(value, expected, atol=2e-6, rtol=0, msg=name)
        norms = rank["norms"]
        assert len(norms) == -(-NUM_STEPS // EVERY)
        assert max(norms) > CLIP_NORM, "clipping must have something to do"
        assert rank["metrics"]["optimizer/gradient_norm"] == pytest.approx(norms[-1], rel=1e-4)


def mean_of_equal(precision: DensePrecision, num_batches: int) -> dict[str, Any]:
    """Gradients of a batch by itself, and of a window of so many such, of which this rank's alone
    before the last.
    """
    spec = accumulating(spec_of(ALONE), num_batches, dense_precision=precision)
    model, optimizers = build_trained(spec, form_groups(ALONE))
    for kernel in model.embedding_kernels():
        kernel.set_learning_rate(0.0)  # else each batch has another gradient
    batch = make_batch(1, dist.get_rank(), BATCH_SIZE)

    def gradient(is_last: bool) -> torch.Tensor:
        with model.averaging(is_last):
            loss, _ = model(batch)
            optimizers.weigh(torch.tensor(2.0 * BATCH_SIZE))
            loss.backward()
        return torch.cat([each.flatten() for each in optimizers._dense_gradients()])

    found = {"one": gradient(is_last=True)}
    optimizers._window.close([])
    optimizers.dense.zero_grad()
    found["own"] = gradient(is_last=False)
    for number in range(2, num_batches + 1):
        gradient(is_last=number == num_batches)
    optimizers._window.close(optimizers._dense_gradients())
    found["mean"] = torch.cat([each.flatten() for each in optimizers._dense_gradients()])
    return found


def test_however_many_batches_a_window_has_its_gradient_is_rounded_once() -> None:
    half, full = run_in_turn(2, (mean_of_equal, "bf16", 256), (mean_of_equal, "fp32", 256))
    for ranks, rounding in ((half, 2**-8), (full, 2**-16)):
        first, second = ranks
        torch.testing.assert_close(first["mean"], second["mean"], atol=0, rtol=0)
        assert not first["own"].equal(second["own"]), "they stay on their ranks before the last"
        gap = (first["mean"] - first["one"]).norm() / first["one"].norm()
        assert gap < rounding


def train_clipped(max_gradient: float | None) -> dict[str, float]:
    """Largest change of a number in each table after one SGD step at rate 1."""
    document = scheduled_spec(ALONE, "sgd").model_dump(mode="json", exclude_unset=True)
    document["optimizer"] = {"sparse": {"name": "sgd", "lr": 1.0, "max_gradient": max_gradient}}
    spec: JobSpec = validate_spec(document)
    model, optimizers = build_trained(spec, form_groups(ALONE))
    before = tables_of(model.state_dict())
    optimizers.begin_step(1, 1)
    loss, _ = model(make_batch(1, dist.get_rank(), BATCH_SIZE))
    loss.backward()
    after = tables_of(model.state_dict())
    return {name: (after[name] - before[name]).abs().max().item() for name in before}


def test_max_gradient_bounds_what_a_batch_does_to_a_table() -> None:
    bounds = run_in_turn(2, *((train_clipped, bound) for bound in (1e-6, 1e6, None)))
    for little, much, free in zip(*bounds, strict=True):
        assert much == free
        for name, change in little.items():
            # A row is looked up by a few bags of a batch, a few times each.
            assert 0 < change < 1e-6 * 10 * BATCH_SIZE, name
            assert change < free[name] / 10
