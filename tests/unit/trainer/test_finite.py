"""An entropy that explodes ends the job; one that is bad once, or NaN, does not by itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.unit.service.builders import spec
from trainer.failures import NonFiniteLoss
from trainer.finite import FiniteGuard
from trainer.run_dir import RunDir


@pytest.fixture
def guard(tmp_path: Path) -> FiniteGuard:
    return FiniteGuard(spec(), RunDir(tmp_path), 100, torch.device("cpu"), lambda event: None)


def test_an_entropy_that_stays_far_above_its_best_ends_the_job(guard: FiniteGuard) -> None:
    guard.judge({"train/ne": 0.8})
    guard.judge({"train/ne": 2.0})
    guard.judge({"train/ne": 2.5})
    with pytest.raises(NonFiniteLoss, match=r"3 reports in a row.*optimizer.schedule"):
        guard.judge({"train/ne": 3.0})


def test_one_bad_report_is_forgiven(guard: FiniteGuard) -> None:
    for ne in (0.8, 2.0, 2.5, 0.9, 2.0, 2.5):
        guard.judge({"train/ne": ne})


@pytest.mark.parametrize("values", [{}, {"train/ne": math.nan}, {"train/rmse": 9.0}])
def test_without_an_entropy_nothing_is_judged(guard: FiniteGuard, values: dict[str, float]) -> None:
    for _ in range(5):
        guard.judge(values)
