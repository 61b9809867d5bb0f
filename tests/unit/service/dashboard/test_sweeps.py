"""What the page of a sweep draws of its trials."""

from __future__ import annotations

import math
from dataclasses import replace

from service.api.views import sweep_detail
from service.dashboard import fragments
from service.dashboard.sweeps import csv_of, parallel_options, value_options
from service.domain.models import JobStatus
from service.domain.sweeps import Observed, Parameter, Sweep, Trial
from service.schemas.sweeps import SweepDetail, parameter_of
from service.schemas.wording import trial_state
from tests.harness.builders import NOW, queued_job

SWEEP = Sweep(
    id="sweep-1",
    name="ratings",
    spec={},
    parameters=(
        Parameter("optimizer.sparse.lr", low=0.01, high=0.3, is_log=True),
        Parameter("parallelism.sync.every_steps", values=(1, 4)),
    ),
    metric="validation/ne",
    num_trials=5,
    created_at=NOW,
)


def detail(*values: float | None) -> SweepDetail:
    """A sweep with a trial for each value; None is a trial that told none."""
    trials = []
    for number, value in enumerate(values):
        metrics = {} if value is None else {SWEEP.metric: value}
        job = replace(queued_job(), status=JobStatus.RUNNING, latest_metrics=metrics)
        chosen = {"optimizer.sparse.lr": 0.1, "parallelism.sync.every_steps": 4}
        trials.append(Observed(Trial(SWEEP.id, number, chosen, NOW, job_id=job.id), job))
    return sweep_detail(SWEEP, trials)


def test_a_trial_without_a_job_is_being_made_or_was_deleted() -> None:
    gone = detail(0.8).trials[0].model_copy(update={"status": None})
    trials = (gone, gone.model_copy(update={"job_id": None}))
    assert [trial_state(each)[0] for each in trials] == ["deleted", "being made"]


def test_a_sweep_says_why_its_trials_were_refused() -> None:
    failed = replace(queued_job(), status=JobStatus.FAILED, message="it broke")
    trials = [Trial(SWEEP.id, number, {}, NOW, message=f"no data {number}") for number in (1, 2)]
    observed = [Observed(trial, None) for trial in trials]
    began = Trial(SWEEP.id, 0, {}, NOW, job_id=failed.id)
    found = sweep_detail(SWEEP, [Observed(began, failed), *observed])
    table = fragments.render("trials.html", sweep=found, paths=[])
    assert all(f"<small>{told}</small>" in table for told in ("it broke", "no data 1", "no data 2"))
    head = fragments.render("sweep.html", sweep=found)
    assert "Trial 1 was refused: no data 1" in head
    assert "it broke" not in head
    assert "no data 2" not in head


def test_trials_are_ranked_by_value_and_those_without_a_number_come_last() -> None:
    found = detail(0.8, None, 0.6, math.nan)
    assert [trial.number for trial in found.ranked] == [2, 0, 1, 3]
    found.trials[2] = found.trials[2].model_copy(update={"stopped_at": 200})
    assert [trial.number for trial in found.ranked] == [0, 2, 1, 3], "it lost where they compared"
    turned = found.model_copy(update={"direction": "maximize"})
    assert [trial.number for trial in turned.ranked] == [0, 2, 1, 3]
    nearest = detail(0.2, None, 1.1, 0.98).model_copy(update={"direction": "approach_one"})
    assert [trial.number for trial in nearest.ranked] == [3, 2, 0, 1]
    assert value_options(nearest)["series"][1]["data"] == [[0, 0.2], [2, 1.1], [3, 0.98]]
    colours = parallel_options(nearest)["visualMap"]
    assert (colours["min"], colours["max"]) == (0.2, 1.8) and len(colours["inRange"]["color"]) == 3


def test_the_line_of_the_best_never_gets_worse_and_skips_what_is_no_number() -> None:
    points, best = value_options(detail(0.8, 0.9, None, math.nan, 0.6))["series"]
    assert points["data"] == [[0, 0.8], [1, 0.9], [4, 0.6]]
    assert best["data"] == [[0, 0.8], [1, 0.8], [4, 0.6]]


def test_a_trial_is_a_line_through_its_values_to_the_metric() -> None:
    options = parallel_options(detail(0.8, None))
    assert [axis["type"] for axis in options["parallelAxis"]] == ["log", "category", "value"]
    assert options["series"][0]["data"] == [[0.1, "4", 0.8]]
    assert parallel_options(detail())["series"][0]["data"] == []


def test_charts_of_a_sweep_say_while_they_have_nothing_to_show() -> None:
    for options_of in (value_options, parallel_options):
        shown = [options_of(detail(value))["title"]["show"] for value in (None, 0.8)]
        assert shown == [True, False]


def test_the_trials_are_a_table_too() -> None:
    assert csv_of(detail(0.8)).splitlines()[0].startswith("trial,job,step,optimizer.sparse.lr,")
    assert csv_of(detail(0.8, None)).splitlines()[1].endswith(",0.1,4,0.8")


def test_bounds_are_read_as_values_are() -> None:
    read = [parameter_of(f"training.epochs={text}") for text in ("0x10..0x20", "1..1e2", "0x10,1")]
    assert [each.get("low") for each in read] == [16, 1, None]
    assert (read[0]["high"], read[1]["high"], read[2]["values"]) == (32, 100.0, [16, 1])
