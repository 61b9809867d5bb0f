"""What happens next in a sweep, decided from what is stored."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from service.domain.models import JobStatus, Progress
from service.domain.sweeps import (
    MAX_FAILURES,
    EarlyStopping,
    Observed,
    Parameter,
    Sweep,
    SweepStatus,
    Trial,
    best_of,
    decide,
    direction_of,
    num_of_trials,
)
from tests.harness.builders import NOW, queued_job

SWEEP = Sweep(
    id="sweep-1",
    name="ratings",
    spec={},
    parameters=(Parameter("optimizer.sparse.lr", low=0.01, high=0.3, is_log=True),),
    metric="validation/ne",
    num_trials=8,
    num_parallel=3,
    created_at=NOW,
)
HALVING = replace(SWEEP, early_stopping=EarlyStopping(min_steps=10, reduction_factor=2))


def observed(
    number: int,
    status: JobStatus | None = JobStatus.RUNNING,
    value: float | None = None,
    reached: float | None = None,
    step: int = 5,
    **fields: object,
) -> Observed:
    """A trial with its job, or without one yet."""
    job = None
    if status is not None:
        job = replace(
            queued_job(),
            status=status,
            progress=Progress(step=step),
            latest_metrics={} if value is None else {SWEEP.metric: value},
        )
    job_id = job.id if job else None
    told = {"values": {}, "job_id": job_id, **fields}
    trial = Trial(SWEEP.id, number, created_at=NOW, **told)  # type: ignore[arg-type]
    return Observed(trial, job, reached)


@given(
    st.lists(st.sampled_from([None, *JobStatus]), max_size=12),
    st.integers(1, 12),
    st.integers(1, 5),
)
def test_there_are_never_more_trials_at_a_time_or_in_all_than_asked_for(
    statuses, num_trials, num_parallel
):
    sweep = replace(SWEEP, num_trials=num_trials, num_parallel=num_parallel)
    trials = [observed(number, status) for number, status in enumerate(statuses)]
    step = decide(sweep, trials)
    num_active = sum(each.is_active for each in trials)
    if step.num_new:
        assert num_active + step.num_new <= num_parallel
        assert len(trials) + step.num_new <= num_trials
    if step.end is SweepStatus.COMPLETED:
        assert num_active == 0
        assert len(trials) >= num_trials


def test_a_trial_whose_job_was_never_made_is_made_again():
    assert decide(SWEEP, [observed(0), observed(1, None)]).submit == [1]


def test_a_grid_ends_with_its_last_point_whatever_was_repeated():
    # Earlier versions took a value twice, and tried points twice.
    parameters = (Parameter("a", values=(1, 2, 2)), Parameter("b", values=([1], 2)))
    grid = replace(SWEEP, search="grid", parameters=parameters)
    assert num_of_trials(grid) == 4
    points = [(1, [1]), (1, [1]), (1, 2), (2, [1]), (2, 2)]
    ended = [
        observed(number, JobStatus.SUCCEEDED, values={"a": a, "b": b})
        for number, (a, b) in enumerate(points)
    ]
    step = decide(grid, ended[:4])
    assert (step.num_new, step.end) == (1, None)
    assert decide(grid, ended).end is SweepStatus.COMPLETED
    assert decide(replace(grid, num_trials=4), ended[:4]).end is SweepStatus.COMPLETED


def test_only_the_best_of_a_comparison_go_on():
    step = decide(
        HALVING,
        [
            observed(0, rungs=(0.5,)),
            observed(1, rungs=(0.9,), stopped_at=10, is_paused=True, status=JobStatus.PAUSED),
            observed(2, reached=0.7),
            observed(3, reached=0.4),
            observed(4, reached=math.nan),
            observed(5, JobStatus.SUCCEEDED, reached=0.9),
        ],
    )
    assert {rung.number: rung.stop_at for rung in step.rungs} == {2: 10, 3: None, 4: 10, 5: None}
    assert step.pause == []
    again = decide(HALVING, [observed(2, rungs=(0.7,), stopped_at=10)])
    assert again.pause == [2]
    resumed = observed(2, rungs=(0.7,), stopped_at=10, is_paused=True)
    assert decide(HALVING, [resumed]).pause == []


def test_a_cancelled_sweep_ends_once_its_jobs_have():
    cancelling = replace(SWEEP, status=SweepStatus.CANCELLING)
    step = decide(cancelling, [observed(0, JobStatus.SUCCEEDED), observed(1), observed(2, None)])
    assert (step.cancel, step.submit, step.num_new, step.end) == ([1], [2], 0, None)
    ended = [observed(0, JobStatus.SUCCEEDED), observed(1, JobStatus.CANCELLED)]
    assert decide(cancelling, ended).end is SweepStatus.CANCELLED


def test_a_sweep_whose_trials_all_fail_at_once_is_given_up():
    failed = [observed(number, JobStatus.FAILED, step=0) for number in range(MAX_FAILURES)]
    assert decide(SWEEP, failed).end is SweepStatus.FAILED
    # It may have a job of which nothing was stored yet, to be cancelled.
    step = decide(SWEEP, [*failed, observed(MAX_FAILURES, None)])
    assert (step.submit, step.num_new, step.end) == ([MAX_FAILURES], 0, None)
    one_trains = [*failed, observed(MAX_FAILURES, step=3)]
    assert decide(SWEEP, one_trains).end is None


def test_values_that_are_not_legal_together_end_no_sweep_of_which_others_wait():
    illegal = [observed(n, None, message="too many workers") for n in range(MAX_FAILURES)]
    waiting = observed(MAX_FAILURES, JobStatus.QUEUED, step=0)
    step = decide(SWEEP, [*illegal, waiting])
    assert (step.cancel, step.end) == ([], None)
    forgotten = replace(waiting, job=None)
    assert decide(SWEEP, [*illegal, forgotten]).end is None
    assert decide(SWEEP, illegal).end is SweepStatus.FAILED, "none is legal"
    failed = observed(MAX_FAILURES, JobStatus.FAILED, step=0)
    assert decide(SWEEP, [*illegal, failed]).end is SweepStatus.FAILED, (
        "nor did the legal one train"
    )


def test_trials_begin_a_few_at_a_time_so_that_others_need_not_wait():
    vast = replace(SWEEP, num_trials=1000, num_parallel=1000)
    num_new = decide(vast, []).num_new
    assert 0 < num_new <= 20
    assert decide(vast, [observed(n) for n in range(num_new)]).num_new == num_new


def test_the_best_trial_has_the_best_value_that_is_a_number():
    trials = [
        observed(0, value=0.8),
        observed(1, value=math.nan),
        observed(2, value=0.6),
        observed(3),
    ]
    best = best_of(SWEEP, trials)
    assert best is not None
    assert best.trial.number == 2
    best = best_of(replace(SWEEP, direction="maximize"), trials)
    assert best is not None
    assert best.trial.number == 0
    assert best_of(SWEEP, [observed(0)]) is None
    # It was the best of all where they were compared, and has trained on.
    winner = observed(0, JobStatus.SUCCEEDED, value=0.9)
    losers = [observed(n, JobStatus.PAUSED, value=0.8 + n / 100, stopped_at=200) for n in (2, 1)]
    assert best_of(SWEEP, [*losers, winner]) == winner
    assert best_of(SWEEP, losers) == losers[1]


def test_of_calibration_the_trial_nearest_to_1_wins():
    assert direction_of("validation/click/calibration") == "approach_one"
    nearest = replace(HALVING, direction="approach_one")
    trials = [observed(n, value=v, reached=v) for n, v in enumerate((0.2, 0.98, 1.5, math.nan))]
    best = best_of(nearest, trials)
    assert best is not None
    assert best.trial.number == 1
    stopped = {rung.number for rung in decide(nearest, trials).rungs if rung.stop_at}
    assert stopped == {2, 3}, "the first came to the comparison alone"
