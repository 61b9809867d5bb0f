"""Task metrics over real ranks: equal to what one process computes from all rows."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.harness.ranks import run_ranks
from trainer.data.batches import Batch
from trainer.spec.model import TaskSpec
from trainer.training import metrics
from trainer.training.metrics import _AUC_BINS, TaskMeter, _auc_of, _bins_of

NUM_BATCHES, BATCH_SIZE = 3, 16


def batch_of(rank: int, step: int, is_binary: bool) -> tuple[Batch, torch.Tensor]:
    """A batch with three padding rows, and the model's outputs for it."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    label = torch.randn(BATCH_SIZE, 1, generator=generator)
    weight = torch.ones(BATCH_SIZE)
    weight[-3:] = 0
    batch = Batch(
        dense=torch.zeros(BATCH_SIZE, 1),
        sparse=KeyedJaggedTensor(keys=[], values=torch.zeros(0), lengths=torch.zeros(0)),
        label=(label > 0).float() if is_binary else label,
        label_offset=torch.full((BATCH_SIZE, 1), -1.0 if is_binary else 3.5),
        label_scale=torch.full((BATCH_SIZE, 1), 2.0 if is_binary else 0.5),
        weight=weight,
    )
    return batch, torch.randn(BATCH_SIZE, 1, generator=generator)


def loss_of(batch: Batch, outputs: torch.Tensor) -> torch.Tensor:
    """Mean squared error over the real rows."""
    return ((outputs - batch.label)[:, 0].square() * batch.weight).sum() / batch.weight.sum()


def measure(loss: str) -> list[dict[str, float]]:
    """Two reports of this rank's meter; of the second one it keeps few outputs."""
    task = TaskSpec(name="t", loss=loss)
    meter = TaskMeter([task], BATCH_SIZE)
    reports = []
    for report, max_kept in enumerate((metrics._MAX_KEPT_ROWS, 2 * BATCH_SIZE)):
        with patch.object(metrics, "_MAX_KEPT_ROWS", max_kept):
            for step in range(NUM_BATCHES):
                _take_in(meter, report * NUM_BATCHES + step, loss)
        assert len(meter._kept) == (NUM_BATCHES, 1)[report]
        reports.append(meter.compute("train"))
    return reports


def measure_until(loss: str) -> dict[str, torch.Tensor]:
    """State of this rank's meter after a report and two more of three batches."""
    meter = TaskMeter([TaskSpec(name="t", loss=loss)], BATCH_SIZE)
    for step in range(NUM_BATCHES):
        _take_in(meter, step, loss)
    meter.compute("train")
    assert not meter.state()["loss"].any(), "nothing came in since the report"
    for step in range(NUM_BATCHES - 1):
        _take_in(meter, NUM_BATCHES + step, loss)
        meter.state()  # looking changes nothing
    return meter.state()


def measure_from(state: dict[str, torch.Tensor], loss: str) -> tuple[dict[str, float], bool]:
    """The report after one more batch, whose rows the ranks share; whether the state came along."""
    meter = TaskMeter([TaskSpec(name="t", loss=loss)], BATCH_SIZE)
    meter.load_state(state)
    came_along = all(
        torch.equal(value.sort()[0], state[name].sort()[0]) for name, value in meter.state().items()
    )
    if torch.distributed.get_rank() == 0:
        for rank in range(3):
            _take_in(meter, 2 * NUM_BATCHES - 1, loss, rank)
    return meter.compute("train"), came_along


def measure_nothing() -> list[dict[str, float]]:
    """Reports before any batch, after one without a row that counts, after one with rows, and after
    one with rows of a single class."""
    task = TaskSpec(name="t", loss="bce", metrics=("ne", "logloss", "calibration"))
    meter = TaskMeter([task], BATCH_SIZE)
    reports = [meter.compute("train")]
    batch, outputs = batch_of(torch.distributed.get_rank(), 0, is_binary=True)
    empty = replace(batch, weight=torch.zeros(BATCH_SIZE))
    meter.update(empty, torch.zeros(()), outputs)
    reports.append(meter.compute("train"))
    _take_in(meter, 0, "bce")
    reports.append(meter.compute("train"))
    one_class = replace(batch, label=torch.zeros(BATCH_SIZE, 1))
    meter.update(one_class, torch.zeros(()), outputs)
    return [*reports, meter.compute("train")]


def test_without_a_row_that_counts_there_are_no_metrics_and_none_that_divides_by_0() -> None:
    for before, without, after, of_one_class in run_ranks(measure_nothing, 2):
        assert (before, without) == ({}, {})
        assert set(after) - set(of_one_class) == {"train/ne", "train/calibration"}
        assert set(of_one_class) == {"train/loss", "train/logloss"}
        assert all(map(math.isfinite, [*after.values(), *of_one_class.values()]))


def measure_rows_without_a_score() -> dict[str, float]:
    meter = TaskMeter([TaskSpec(name="t", loss="bce", metrics=("auc", "logloss"))], BATCH_SIZE)
    batch, outputs = batch_of(0, 0, is_binary=True)
    outputs[0] = math.nan
    meter.update(batch, torch.zeros(()), outputs)
    return meter.compute("train")


def test_an_auc_of_rows_without_a_score_is_none_as_other_metrics_are() -> None:
    (values,) = run_ranks(measure_rows_without_a_score, 1)
    assert math.isnan(values["train/auc"]) and math.isnan(values["train/logloss"])


def _take_in(meter: TaskMeter, seed: int, loss: str, rank: int | None = None) -> None:
    """A batch of this rank, or of another one."""
    rank = torch.distributed.get_rank() if rank is None else rank
    batch, outputs = batch_of(rank, seed, loss == "bce")
    meter.update(batch, loss_of(batch, outputs), outputs)


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_meter_goes_on_at_another_number_of_ranks(loss: str) -> None:
    whole = run_ranks(measure, 3, loss)[0][1]
    states = run_ranks(measure_until, 3, loss)
    for resumed, came_along in run_ranks(measure_from, 2, states[0], loss):
        assert came_along
        assert resumed == pytest.approx(whole, rel=1e-9)


TASKS = (
    TaskSpec(name="stars", loss="mse", metrics=("rmse", "mae", "auc"), auc_threshold=3.5),
    TaskSpec(name="click", loss="bce", metrics=("calibration", "logloss", "ne", "auc")),
)


def batch_of_two_tasks(rank: int, step: int) -> tuple[Batch, torch.Tensor]:
    """Rows that count unequally, labels of an mse and of a bce task in columns of other units, and
    outputs: infinite where a row counts for nothing, and once very sure."""
    stars, star_outputs = batch_of(rank, step, is_binary=False)
    clicks, click_outputs = batch_of(rank, step + 100, is_binary=True)
    weight = stars.weight * torch.linspace(0.5, 3.0, BATCH_SIZE)
    fields = ("label", "label_offset", "label_scale")
    both = {name: torch.cat([getattr(stars, name), getattr(clicks, name)], 1) for name in fields}
    batch = Batch(**{**vars(stars), **both, "weight": weight})
    outputs = torch.cat([star_outputs, click_outputs], 1)
    outputs[0, 1], outputs[-1] = 18.0, math.inf
    return batch, outputs


def measure_two_tasks() -> dict[str, float]:
    rank, meter = torch.distributed.get_rank(), TaskMeter(TASKS, BATCH_SIZE)
    for step in range(NUM_BATCHES):
        batch, outputs = batch_of_two_tasks(rank, step)
        meter.update(batch, (rank + step) * torch.ones(()), outputs)
    return meter.compute("train")


def test_metrics_of_several_tasks_weigh_rows_and_carry_the_task_in_their_name() -> None:
    values, same = run_ranks(measure_two_tasks, 2)
    assert values == same
    pairs = [batch_of_two_tasks(rank, step) for rank in range(2) for step in range(NUM_BATCHES)]
    weight = torch.cat([batch.weight for batch, _ in pairs]).double()
    stars, clicks = torch.cat([batch.label for batch, _ in pairs]).double().unbind(1)
    guesses, logits = torch.cat([outputs for _, outputs in pairs]).double().unbind(1)
    weight, stars, clicks, guesses, logits = (
        each[weight > 0] for each in (weight, stars, clicks, guesses, logits)
    )
    shares = weight / weight.sum()
    errors = 0.5 * (guesses - stars)  # in the unit of the label
    cross = torch.nn.functional.binary_cross_entropy_with_logits(logits, clicks, reduction="none")
    base = (shares * clicks).sum()
    entropy = -(base * base.log() + (1 - base) * (1 - base).log())
    expected = {
        "train/loss": torch.tensor(1.5),  # the mean of rank + step
        "train/stars/rmse": (shares * errors.square()).sum().sqrt(),
        "train/stars/mae": (shares * errors.abs()).sum(),
        "train/stars/auc": weighted_auc(guesses, stars >= 0, weight),
        "train/click/calibration": (shares * logits.sigmoid()).sum() / base,
        "train/click/logloss": (shares * cross).sum(),
        "train/click/ne": (shares * cross).sum() / entropy,
        "train/click/auc": weighted_auc(logits, clicks == 1, weight),
    }
    assert set(values) == set(expected)
    for name, value in expected.items():
        # In so few rows each pair that shares a bin is seen in the AUC.
        tolerance = 1e-3 if name.endswith("auc") else 1e-5
        assert values[name] == pytest.approx(value.item(), abs=tolerance), name


@pytest.mark.parametrize(
    ("center", "spread"), [(-4.0, 1.0), (0.0, 0.05), (0.003, 0.001), (3e4, 1e4)]
)
def test_auc_from_bins_is_that_of_all_pairs(center: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    is_positive = torch.rand(10_000, generator=generator) < 0.1
    scores = center + spread * (torch.randn(10_000, generator=generator) + is_positive)
    scores[:200] = torch.where(is_positive[:200], math.inf, -math.inf)
    weights = torch.rand(10_000, generator=generator).double()
    bins = torch.zeros(2, _AUC_BINS, dtype=torch.float64)
    bins.view(-1).index_add_(0, _bins_of(scores) + _AUC_BINS * is_positive, weights)
    wanted = weighted_auc(scores, is_positive, weights).item()
    assert _auc_of(bins) == pytest.approx(wanted, abs=1e-4)


def weighted_auc(
    scores: torch.Tensor, is_positive: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Share of the weight of (positive, negative) pairs that is in the right order."""
    order = (scores[is_positive][:, None] > scores[~is_positive][None, :]).double()
    weights = weight[is_positive][:, None] * weight[~is_positive][None, :]
    return (order * weights).sum() / weights.sum()


def measure_labels_around(stars: float, unit: float) -> float:
    """AUC for >= `stars` of labels, some `unit` apart, that were normalised in float32 and back."""
    task = TaskSpec(loss="mse", metrics=("auc",), auc_threshold=stars)
    meter = TaskMeter([task], 6)
    given = stars + unit * torch.tensor([[0.0], [0.0], [0.5], [-0.5], [-0.5], [-3.0]])
    offset, scale = torch.full((6, 1), stars - 0.8765433), torch.full((6, 1), 0.7654321 * unit)
    label = (given - offset) / scale
    empty = KeyedJaggedTensor(keys=[], values=torch.zeros(0), lengths=torch.zeros(0))
    batch = Batch(torch.zeros(6, 1), empty, label, offset, scale, torch.ones(6))
    meter.update(batch, torch.zeros(()), label)
    return meter.compute("v")["v/auc"]


@pytest.mark.parametrize(("stars", "unit"), [(4.0, 1.0), (1000.0, 1.0), (30_000.0, 4.0)])
def test_labels_at_the_threshold_are_positive_in_spite_of_rounding_wherever_it_lies(
    stars: float, unit: float
) -> None:
    assert run_ranks(measure_labels_around, 1, stars, unit) == [1.0]
