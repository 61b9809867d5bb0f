"""Sweeps: a search for settings of a spec, and the pure decision of what happens next in one.

The trials of a sweep are ordinary jobs, whose spec is that of the sweep but for the searched
fields. A trial counts once its row is stored; its job has an idempotency key of the trial's own, so
a sweep goes on after a restart where it was, and nothing is started or suggested twice.

Early stopping is ASHA with stopping (Li et al., "A System for Massively Parallel Hyperparameter
Tuning", 2020): at `min_steps`, and at each `reduction_factor`-fold of that, a trial goes on only
if it is among the best 1 / `reduction_factor` of the trials that came so far. It is stopped by a
pause, so that it can be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from service.domain.models import DEFAULT_PROJECT, Job, JobStatus

Direction = Literal["minimize", "maximize", "approach_one"]
Search = Literal["tpe", "random", "grid"]
# Of metrics whose names begin so, a greater value is better; of calibration the one nearest to 1,
# as for the best checkpoint; of all others a smaller one.
_GREATER_IS_BETTER = ("auc", "accuracy", "ndcg", "recall", "rows_per_s", "steps_per_s")
# A sweep of which so many trials failed, and none did not, is faulty itself.
MAX_FAILURES = 5
# Of one sweep in one pass: a submission reads storage, and others wait for the pass.
_MAX_NEW = 16


def direction_of(metric: str) -> Direction:
    """Which values of a metric are the better ones, by its name."""
    name = metric.rpartition("/")[2]
    if name == "calibration":
        return "approach_one"
    return "maximize" if name.startswith(_GREATER_IS_BETTER) else "minimize"


def loss_of(direction: Direction, value: float) -> float:
    """What is the smaller the better a value is."""
    match direction:
        case "minimize":
            return value
        case "maximize":
            return -value
        case "approach_one":
            return abs(value - 1.0)


class SweepStatus(StrEnum):
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self not in (SweepStatus.RUNNING, SweepStatus.CANCELLING)


@dataclass(frozen=True)
class Parameter:
    """A searched field of the spec: one of `values`, or a number from `low` to `high` (included).

    `is_integer` numbers are whole; with `is_log` equal ratios are equally likely.
    """

    path: str
    values: tuple[Any, ...] = ()
    low: int | float = 0.0
    high: int | float = 0.0
    is_integer: bool = False
    is_log: bool = False

    @property
    def corners(self) -> list[Any]:
        """Values of which all are legal if every one of these is, as far as can be told."""
        if self.values:
            return list(self.values)
        if self.is_integer:
            return [int(self.low), int(self.high)]
        # One with a fraction, too: a field of whole numbers takes 1.0 and 3.0.
        return [self.low, self.low + (self.high - self.low) / math.e, self.high]


@dataclass(frozen=True)
class EarlyStopping:
    """Asynchronous successive halving (ASHA): trials are compared at `min_steps` and at each
    `reduction_factor`-fold of that, and only the best 1 / `reduction_factor` go on."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    min_steps: Annotated[int, Field(ge=1, le=2**53)]
    reduction_factor: Annotated[int, Field(ge=2, le=100)] = 3

    def rung_step(self, rung: int) -> int:
        return self.min_steps * self.reduction_factor**rung


@dataclass(frozen=True)
class Sweep:
    """A search, as stored.

    At most `num_parallel` of its `num_trials` trials are under way at a time.
    """

    id: str
    name: str
    spec: Mapping[str, Any]
    parameters: tuple[Parameter, ...]
    metric: str
    num_trials: int
    created_at: float
    project: str = DEFAULT_PROJECT
    direction: Direction = "minimize"
    search: Search = "tpe"
    num_parallel: int = 4
    seed: int = 0
    early_stopping: EarlyStopping | None = None
    created_by: str = "user"
    status: SweepStatus = SweepStatus.RUNNING
    message: str = ""
    ended_at: float | None = None

    @property
    def num_points(self) -> float:
        """How many combinations there are of the values of all parameters.

        What earlier versions stored may hold a value twice.
        """
        distinct = ({*map(each.values.index, each.values)} for each in self.parameters)
        return math.prod(len(each) or math.inf for each in distinct)

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another; NaN is worse than any number."""
        if math.isnan(value) or math.isnan(other):
            return math.isnan(other) and not math.isnan(value)
        return loss_of(self.direction, value) < loss_of(self.direction, other)


@dataclass(frozen=True)
class Trial:
    """Trial `number` (from 0) of a sweep, as stored: values of the parameters, by path.

    `rungs` are the values of the metric at which it was compared with others. `stopped_at` is the
    step of the comparison that it lost; it `is_paused` once its job was asked to pause for it.
    `message` says why no job could be made.
    """

    sweep_id: str
    number: int
    values: Mapping[str, Any]
    created_at: float
    job_id: str | None = None
    rungs: tuple[float, ...] = ()
    stopped_at: int | None = None
    is_paused: bool = False
    message: str = ""


@dataclass(frozen=True)
class Observed:
    """A trial with its job, None if there is none (any more), as they are now.

    `reached` is the metric's value at the next rung, None while that is ahead and of a trial that
    was stopped. A job that `is_unreadable` was stored by another version of the service, and has
    not ended.
    """

    trial: Trial
    job: Job | None = None
    reached: float | None = None
    is_unreadable: bool = False

    def value(self, metric: str) -> float | None:
        """The newest value of the metric."""
        return self.job.latest_metrics.get(metric) if self.job else None

    @property
    def is_stopped(self) -> bool:
        """Whether it lost a comparison, and was not trained to its end all the same."""
        has_succeeded = self.job is not None and self.job.status is JobStatus.SUCCEEDED
        return self.trial.stopped_at is not None and not has_succeeded

    @property
    def has_failed(self) -> bool:
        if self.job is None:
            return bool(self.trial.message)
        return self.job.status is JobStatus.FAILED

    @property
    def is_active(self) -> bool:
        """Whether it has workers, or may get them without anybody's doing."""
        if self.job is None:
            return self.is_unreadable or (self.trial.job_id is None and not self.trial.message)
        return not self.job.status.is_terminal and self.job.status is not JobStatus.PAUSED


@dataclass(frozen=True)
class Rung:
    """A comparison: `value` at the next rung of trial `number`, which stops at `stop_at` if set."""

    number: int
    value: float
    stop_at: int | None


@dataclass(frozen=True)
class SweepStep:
    """What is to be done: jobs to make, to pause and to cancel (by number of the trial), trials
    that came to a rung, how many new trials, and how the sweep has ended, if it has."""

    submit: list[int] = field(default_factory=list)
    pause: list[int] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    rungs: list[Rung] = field(default_factory=list)
    num_new: int = 0
    end: SweepStatus | None = None
    message: str = ""


def decide(sweep: Sweep, trials: Sequence[Observed]) -> SweepStep:
    """What happens next in a sweep, from what is stored."""
    active = [each for each in trials if each.is_active]
    to_submit = [each.trial.number for each in active if each.trial.job_id is None]
    if sweep.status is SweepStatus.CANCELLING:
        # Of a trial without a job we do not know whether it has one: making it again tells.
        live = [each for each in active if each.job and not each.job.cancel_requested]
        return SweepStep(
            submit=to_submit,
            cancel=[each.trial.number for each in live],
            end=None if active else SweepStatus.CANCELLED,
        )
    # Values that are not legal together say nothing of trials that have a job and may yet train.
    made = [each for each in trials if each.trial.job_id is not None]
    num_failed = sum(e.has_failed for e in (trials if all(e.has_failed for e in made) else made))
    if num_failed >= MAX_FAILURES and not any(
        each.job is not None and each.job.progress.step for each in trials
    ):
        message = f"{num_failed} trials failed and none trained a step; mend the spec"
        return SweepStep(
            submit=to_submit,
            cancel=[each.trial.number for each in active if each.job],
            end=None if to_submit else SweepStatus.FAILED,
            message=message,
        )
    num_left = _num_left(sweep, trials)
    num_new = max(0, min(sweep.num_parallel - len(active), num_left, _MAX_NEW))
    return SweepStep(
        submit=to_submit,
        pause=[
            each.trial.number
            for each in active
            if each.job and each.trial.stopped_at is not None and not each.trial.is_paused
        ],
        rungs=_rungs(sweep, trials),
        num_new=num_new,
        end=SweepStatus.COMPLETED if not active and num_left <= 0 else None,
    )


def num_of_trials(sweep: Sweep) -> int:
    """How many trials a sweep has in all: there may be fewer points than are asked for."""
    return int(min(sweep.num_trials, sweep.num_points))


def _num_left(sweep: Sweep, trials: Sequence[Observed]) -> int:
    """How many trials are still to be made; in those of earlier versions points may be repeated."""
    num_left = sweep.num_trials - len(trials)
    if sweep.num_points > sweep.num_trials:
        return num_left
    points = (each.trial.values for each in trials)
    tried = {tuple(each.values.index(at[each.path]) for each in sweep.parameters) for at in points}
    return min(num_left, int(sweep.num_points) - len(tried))


def _rungs(sweep: Sweep, trials: Sequence[Observed]) -> list[Rung]:
    if sweep.early_stopping is None:
        return []
    found: list[Rung] = []
    known = {each.trial.number: list(each.trial.rungs) for each in trials}
    for each in trials:
        trial = each.trial
        if each.reached is None:
            continue
        rung = len(trial.rungs)
        known[trial.number].append(each.reached)
        at_rung = [values[rung] for values in known.values() if len(values) > rung]
        num_better = sum(sweep.is_better(value, each.reached) for value in at_rung)
        num_kept = max(1, len(at_rung) // sweep.early_stopping.reduction_factor)
        has_lost = each.is_active and num_better >= num_kept
        step = sweep.early_stopping.rung_step(rung)
        found.append(Rung(trial.number, each.reached, step if has_lost else None))
    return found


def best_of(sweep: Sweep, trials: Sequence[Observed]) -> Observed | None:
    """The trial with the best newest value of the metric, the earliest of equals.

    One that was stopped is the best only where all were: others went on, and may be worse by now
    than it was when it lost to them.
    """
    best: Observed | None = None
    for each in sorted(trials, key=lambda each: each.is_stopped):
        value = each.value(sweep.metric)
        if value is None or math.isnan(value):
            continue
        is_alike = best is not None and each.is_stopped == best.is_stopped
        if best is None or (is_alike and sweep.is_better(value, best.value(sweep.metric) or 0.0)):
            best = each
    return best
