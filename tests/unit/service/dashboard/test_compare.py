"""What a comparison tells of jobs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest

from service.dashboard import compare
from service.dashboard.compare import Compared, ComparePage, best_of, default_metrics, places
from service.domain.models import MetricPoint, Progress
from tests.harness.builders import NOW, attempt_of, queued_job

POINTS = [MetricPoint(10, NOW + 360, 0.9, 0.8, 1.0), MetricPoint(20, NOW + 720, 0.7, math.nan, 0.7)]


def compared(**fields: object) -> Compared:
    """A job of four workers at step 20, which began at `NOW`."""
    progress = Progress(step=20, rows=2000)
    job = replace(queued_job(), started_at=NOW, progress=progress, **fields)
    return Compared(job, (), ("train/loss",), {"train/loss": POINTS})


def test_points_stand_by_steps_rows_or_hours() -> None:
    assert places(compared(), POINTS, "step") == [10, 20]
    assert places(compared(), POINTS, "rows") == [1000, 2000]
    assert places(compared(), POINTS, "hours") == pytest.approx([0.1, 0.2])


def test_the_best_value_is_the_least_unless_more_is_better() -> None:
    assert best_of("validation/rmse", POINTS) == 0.7
    assert best_of("validation/auc", POINTS) == 1.0
    assert best_of("validation/auc", ()) is None
    assert best_of("validation/caucasus/ne", POINTS) == 0.7
    assert best_of("validation/calibration", POINTS) == 1.0
    on_both_sides = MetricPoint(30, NOW, 1.0, 0.9, 1.1)
    assert best_of("validation/calibration", [*POINTS, on_both_sides]) is None, "it is not told"
    assert best_of("validation/auc", [on_both_sides]) == 1.1
    assert default_metrics([queued_job()])[:2] == ["validation/rmse", "train/rmse"]


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.1, 10.0), (3.0, 60.0)])
def test_a_comparison_that_takes_long_to_read_is_read_less_often(
    monkeypatch: pytest.MonkeyPatch, took_s: float, pause_s: float
) -> None:
    clock = Mock(side_effect=[100.0, 100.0 + took_s])
    monkeypatch.setattr(compare, "time", Mock(monotonic=clock))
    page = Mock(
        _reading=None, _compared=[], _metrics=[], _shown=[], _read=AsyncMock(return_value=False)
    )
    asyncio.run(ComparePage._refresh(page))
    assert page._timer.interval == pytest.approx(pause_s)


def test_a_cost_counts_the_hours_of_every_attempt_and_of_one_that_lives_until_its_last_word() -> (
    None
):
    job = compared().job
    ended = attempt_of(job, started_at=NOW, ended_at=NOW + 3600)
    alive = attempt_of(job, index=1, started_at=NOW, ended_at=None)
    assert replace(compared(), attempts=[ended]).worker_hours == pytest.approx(4.0)
    assert replace(compared(), attempts=[alive]).worker_hours == pytest.approx(4 * 0.2)
    silent = attempt_of(job, index=1, started_at=NOW + 9000, ended_at=None)
    assert replace(compared(), attempts=[ended, silent]).worker_hours == pytest.approx(4.0)
