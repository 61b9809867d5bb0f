"""REST bodies of sweeps."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from service.domain.models import JobStatus, Value
from service.domain.sweeps import Direction, EarlyStopping, Parameter, Search, SweepStatus, loss_of
from service.schemas.common import ApiModel, RequestModel
from service.schemas.jobs import Secrets
from trainer.protocol.events import METRIC_NAME_PATTERN
from trainer.spec.base import MAX_INTEGER, problem
from trainer.spec.parse import parse_document

MetricName = Annotated[str, StringConstraints(max_length=255, pattern=METRIC_NAME_PATTERN)]
_MAX_TRIALS = 1000
_MAX_VALUES = 500


class ParameterSpec(RequestModel):
    """A field of the spec to search: one of `values`, or a number from `low` to `high`.

    Whole numbers where both bounds are; `log` for what is best compared by ratio, as learning
    rates are.
    """

    path: str = Field(min_length=1, max_length=500, examples=["optimizer.sparse.lr"])
    values: list[Any] | None = Field(default=None, min_length=1, max_length=100)
    low: int | float | None = Field(default=None, examples=[0.01])
    high: int | float | None = Field(default=None, examples=[0.3])
    log: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.values is None) == (self.low is None or self.high is None):
            raise problem("bounds", "give either values, or low and high")
        if self.values is not None and (self.low is not None or self.high is not None or self.log):
            raise problem("bounds", "values have no low, high or log")
        values = self.values or []
        for index, value in enumerate(values):
            if value in values[:index]:
                message = f"of {self.path} hold {value!r:.80} twice"
                raise problem("repeated_value", message, "values")
        if self.low is not None and self.high is not None:
            whole = [each for each in (self.low, self.high) if isinstance(each, int)]
            if any(abs(each) > MAX_INTEGER for each in whole):
                raise problem("bounds", f"whole numbers must be at most {MAX_INTEGER}")
            # The difference of two finite numbers need not be finite, but is what is drawn from.
            if not (self.low < self.high and math.isfinite(self.high - self.low)):
                message = f"of {self.path} must be below high, and their difference finite"
                raise problem("bounds", message, "low")
            if self.log and self.low <= 0:
                raise problem("bounds", f"of {self.path} must be above 0 with log", "low")
        return self

    @property
    def parameter(self) -> Parameter:
        if self.values is not None:
            return Parameter(self.path, values=tuple(self.values))
        assert self.low is not None and self.high is not None, "checked above"
        is_integer = isinstance(self.low, int) and isinstance(self.high, int)
        return Parameter(
            self.path, low=self.low, high=self.high, is_integer=is_integer, is_log=self.log
        )


_RANGE = re.compile(r"(log:)?([^.:]*(?:\.[^.:]+)?)\.\.(.*)")


def parameter_of(text: str) -> dict[str, Any]:
    """A parameter in words, KEY=RANGE, as the service takes it; raises `ValueError`.

    A range is values as in `1,4,16`, bounds as in `1..4`, or `log:0.01..0.3`.
    """
    path, separator, values = (part.strip() for part in text.partition("="))
    if not (separator and path and values):
        raise ValueError(f"{text!r} does not read KEY=RANGE")
    if bounds := _RANGE.fullmatch(values):
        try:
            low, high = (_number_in(text) for text in bounds.group(2, 3))
        except ValueError:
            raise ValueError(f"{values!r} does not read LOW..HIGH with two numbers") from None
        return {"path": path, "low": low, "high": high, "log": bool(bounds[1])}
    return {"path": path, "values": parse_document(f"[{values}]")}


def _number_in(text: str) -> int | float:
    read = parse_document(text)
    if type(read) is int:
        return read
    number = float(text)  # To YAML 1e-4 is a text.
    if not math.isfinite(number):
        raise ValueError(text)
    return number


class CreateSweep(RequestModel):
    """Body of POST /v1/sweeps: the spec as a mapping, and what to search in it."""

    spec: dict[str, Any]
    parameters: list[ParameterSpec] = Field(min_length=1, max_length=50)
    metric: MetricName = Field(examples=["validation/ne"])
    direction: Direction | None = Field(
        default=None,
        description="By default `maximize` for auc and the like, `approach_one` for calibration, "
        "else `minimize`.",
    )
    search: Search = "tpe"
    num_trials: int = Field(default=20, ge=1, le=_MAX_TRIALS)
    num_parallel: int = Field(default=4, ge=1, le=_MAX_TRIALS, description="Trials at a time.")
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    early_stopping: EarlyStopping | None = None
    secrets: Secrets = Field(default={}, description="Those of every trial's job.")

    @model_validator(mode="after")
    def _has_each_once(self) -> Self:
        paths = [each.path for each in self.parameters]
        if len({*paths}) < len(paths):
            raise problem("duplicate_field", "a field is searched once", "parameters")
        num_values = sum(len(each.values or ()) for each in self.parameters)
        if num_values > _MAX_VALUES:
            message = (
                f"there are {num_values} values, and each is checked: give {_MAX_VALUES} in all at "
                "most, or low and high for numbers"
            )
            raise problem("too_many", message, "parameters")
        if self.search == "grid" and any(each.values is None for each in self.parameters):
            message = "a grid has values, not bounds, for every parameter"
            raise problem("bounds", message, "parameters")
        return self


class TrialOut(ApiModel):
    """A trial: its values by path, its job, and what became of it.

    `value` is the newest of the sweep's metric. A trial with `stopped_at` lost a comparison at
    that step; its job is paused and can be resumed. `message` says why there is no job.
    """

    number: int
    values: dict[str, Any]
    job_id: str | None
    status: JobStatus | None
    step: int
    value: Value | None
    stopped_at: int | None
    message: str

    @property
    def has_value(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


class SweepSummary(ApiModel):
    """A sweep as a list shows it."""

    id: str
    name: str
    project: str
    status: SweepStatus
    message: str
    metric: str
    direction: Direction
    search: Search
    num_trials: int = Field(description="In all; no more than there are combinations of values.")
    created_at: float
    created_by: str
    ended_at: float | None


class SweepDetail(SweepSummary):
    """A sweep with its trials; `best` is the number of the best one so far."""

    num_parallel: int
    seed: int
    early_stopping: EarlyStopping | None
    parameters: list[Parameter]
    trials: list[TrialOut]
    best: int | None
    best_spec: dict[str, Any] | None = Field(description="The spec with the best trial's values.")

    @property
    def ranked(self) -> list[TrialOut]:
        """The trials, best first; then those that were stopped, and at last, in the order of their
        numbers, those without a value.
        """

        def order(trial: TrialOut) -> tuple[bool, bool, float]:
            value = trial.value if trial.has_value else None
            is_stopped = trial.stopped_at is not None and trial.status is not JobStatus.SUCCEEDED
            return value is None, is_stopped, loss_of(self.direction, value or 0.0)

        return sorted(self.trials, key=order)
