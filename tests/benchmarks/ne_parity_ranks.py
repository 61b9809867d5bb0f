"""The ranks of the NE parity benchmark: train every variant of one seed, measure held-out NE.

The engine's side is `parallel_model.build_parallel_model` and its sync, the other the stock peer.
Both get the same rows, the same starting weights, the same dense optimizer and the same meter.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.benchmarks.ne_parity_case import (
    RankRows,
    Settings,
    batches,
    model_sections,
    rows_of_rank,
    set_start,
    stock_network,
)
from tests.benchmarks.peers.stock_1d import dense_adam, fused_adagrad, sharded
from trainer.datasets.criteo.synthetic import ClickRows
from trainer.layout.layout import Layout
from trainer.parallel.mesh import build_groups
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import build_sync
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.training import DensePrecision
from trainer.training.metrics import TaskMeter

_GROUP_TIMEOUT_S = 600.0
_EVALUATION_BATCH = 8192


@dataclass(frozen=True)
class Variant:
    """One way to train the same thing; `moment_scale` None is the stock peer in 1D.

    Syncs of an `is_overlapped` one overlap with as many steps as the settings say; `precision` is
    that of the dense part.
    """

    name: str
    shard_group_size: int
    moment_scale: float | None
    is_overlapped: bool = False
    precision: DensePrecision = "fp32"


@dataclass
class Curve:
    """Held-out NE of one run along its training rows."""

    rows: list[int] = field(default_factory=list)
    ne: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SeedResult:
    """Curves of one seed by variant, and the teacher's own NE on the held-out rows."""

    curves: dict[str, Curve]
    teacher_ne: float


@dataclass(frozen=True)
class _Trainee:
    """A model under training, with what its variant does before and after each backward pass."""

    model: nn.Module
    begin_step: Callable[[int], None]
    end_step: Callable[[int], None]


def measure_seed(settings: Settings, variants: list[Variant], seed: int) -> SeedResult:
    """Train all variants of `seed` in turn. Runs on every rank of a gloo world."""
    silence_libraries()
    rows = rows_of_rank(settings, seed, dist.get_rank())
    meter = meter_of(settings)
    curves = {variant.name: _train(settings, variant, seed, rows, meter) for variant in variants}
    return SeedResult(curves, teacher_ne_of(meter, rows.held_out))


def silence_libraries() -> None:
    """Drop what TorchRec and torch say about each other: it would bury the results."""
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _train(
    settings: Settings, variant: Variant, seed: int, rows: RankRows, meter: TaskMeter
) -> Curve:
    trainee, curve = _build(settings, variant, seed), Curve()
    for step, batch in enumerate(batches(rows.train, settings.batch_size), start=1):
        trainee.begin_step(step)
        loss, _ = trainee.model(batch)
        loss.backward()
        trainee.end_step(step)
        if step in settings.evaluation_steps:
            curve.rows.append(step * settings.global_batch_size)
            curve.ne.append(held_out_ne(trainee.model, meter, rows.held_out))
    return curve


def _build(settings: Settings, variant: Variant, seed: int) -> _Trainee:
    """The model of a variant with the starting weights of `seed`. Collective."""
    if variant.moment_scale is None:
        return _build_stock(settings, seed)
    spec = spec_of(settings, variant)
    layout = Layout(settings.world_size, variant.shard_group_size, spec.parallelism.placement)
    groups = build_groups(layout, torch.device("cpu"), timeout_s=_GROUP_TIMEOUT_S)
    model, _ = build_parallel_model(spec, groups)
    set_start(model, settings, seed)
    optimizers = Optimizers(model, spec)
    sync = build_sync(model, spec)

    def begin_step(step: int) -> None:
        optimizers.begin_step(step, settings.num_steps)

    def end_step(step: int) -> None:
        optimizers.step()
        sync.tick()
        # The held-out rows are measured on synced copies, as a validation of a job is.
        if step in settings.evaluation_steps:
            sync.flush()
        elif step % spec.parallelism.sync.every_steps == 0:
            sync()

    return _Trainee(model, begin_step, end_step)


def _build_stock(settings: Settings, seed: int) -> _Trainee:
    """1D with stock TorchRec, every table table-wise, and nothing of ours."""
    fused = fused_adagrad(settings.sparse_lr, settings.sparse_eps)
    kinds = (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    sharders = [kind(fused_params=fused) for kind in kinds]
    model = sharded(stock_network(settings), sharders, list(settings.tables), "table_wise")
    set_start(model, settings, seed)
    optimizers = StockOptimizers(model, settings)
    return _Trainee(model, optimizers.begin_step, lambda step: optimizers.step())


class StockOptimizers:
    """Row-wise AdaGrad in the tables and Adam elsewhere, both rates falling linearly to 0."""

    def __init__(self, model: DistributedModelParallel, settings: Settings) -> None:
        self._dense = dense_adam(model)
        self._fused = model.fused_optimizer
        self._settings = settings

    def begin_step(self, step: int) -> None:
        """Set the rates of `step`, counted from 1, and drop gradients."""
        settings = self._settings
        left = 1 - (step - 1) / max(settings.num_steps - 1, 1)
        for optimizer, lr in ((self._fused, settings.sparse_lr), (self._dense, settings.dense_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * left
            # In the fused optimizer this hands the rate to the kernels.
            optimizer.zero_grad()

    def step(self) -> None:
        """Update the dense part; the tables were updated inside backward."""
        self._dense.step()


def spec_of(settings: Settings, variant: Variant) -> JobSpec:
    """The job that the engine trains for a variant; in 1D, large tables are row-wise."""
    is_2d = variant.shard_group_size < settings.world_size
    overlap = settings.sync_overlap if variant.is_overlapped else False
    policy = {"every_steps": settings.sync_every, "overlap": overlap}
    sync = {"sync": policy, "dense": "every_step"} if is_2d else {}
    return validate_spec(
        {
            "name": "ne-parity",
            "data": {"path": "none", "label": {"column": "click"}},
            **model_sections(settings, partial(_sharding_of, variant=variant)),
            "training": {"dense_precision": variant.precision},
            "optimizer": {
                "sparse": {"lr": settings.sparse_lr, "eps": settings.sparse_eps},
                "dense": {"name": "adam", "lr": settings.dense_lr},
                "schedule": {"decay": "linear"},
            },
            "parallelism": {
                "workers": settings.world_size,
                "shard_group_size": variant.shard_group_size,
                "moment_scale": variant.moment_scale,
                **sync,
            },
        }
    )


def _sharding_of(num_rows: int, variant: Variant) -> str:
    """Other than the peer's table-wise where that leaves every rank some rows."""
    num_shards = variant.shard_group_size
    return "row_wise" if num_shards > 1 and num_shards**2 <= num_rows else "table_wise"


def meter_of(settings: Settings) -> TaskMeter:
    """NE by torchrec.metrics, summed over all ranks."""
    tasks = spec_of(settings, Variant("meter", settings.world_size, 1.0)).model.tasks
    # Sizes matter to windowed values alone, and NE here is over everything since the last reset.
    return TaskMeter(tasks, batch_size=1)


@torch.no_grad()
def held_out_ne(model: nn.Module, meter: TaskMeter, held_out: ClickRows) -> float:
    """NE over the held-out rows of all ranks. Collective."""
    model.eval()
    for batch in batches(held_out, _EVALUATION_BATCH):
        meter.update(batch, *model(batch))
    model.train()
    return meter.compute("held_out")["held_out/ne"]


def teacher_ne_of(meter: TaskMeter, held_out: ClickRows) -> float:
    """NE of the true probabilities: on these rows no model is expected to reach less."""
    assert held_out.probability is not None, "generated rows know their teacher"
    logits = torch.logit(torch.from_numpy(held_out.probability))[:, None]
    (batch,) = batches(held_out, len(held_out))
    meter.update(batch, torch.zeros(()), logits)
    return meter.compute("teacher")["teacher/ne"]
