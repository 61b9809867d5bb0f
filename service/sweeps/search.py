"""Which values a trial of a sweep gets, and the spec that they make.

Optuna suggests; what it knows is what is stored, so a suggestion follows from the trials before it
and the seed, whichever process makes it.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from service.auth.permissions import paths_of
from service.domain.models import JobStatus
from service.domain.sweeps import Observed, Parameter, Sweep, loss_of
from trainer.protocol.events import METRICS
from trainer.spec import validate_spec
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import set_values

if TYPE_CHECKING:
    import optuna

# Random ones first, so that the model of the objective has something to go by.
_NUM_STARTUP_TRIALS = 8
# Trials share the seed of their spec, so that a repeated one tells nothing; but there may be no
# other values left.
_MAX_TRIES = 30
# Nobody mends more at once.
_MAX_PROBLEMS = 100
# What tells whether the workers of a cluster hold the tables of a spec.
_ASKED_OF_CLUSTER: Any = {
    **dict.fromkeys(("data", "features", "embedding_tables", "parallelism", "resources"), True),
    "optimizer": {"sparse": {"name", "weight_decay"}},
}


def suggest(sweep: Sweep, trials: Sequence[Observed]) -> dict[str, Any]:
    """Values for the next trial, by path of their parameter."""
    known = [each.trial.values for each in trials]
    if sweep.search == "grid" or sweep.num_points <= sweep.num_trials:  # random ones would repeat
        paths = [each.path for each in sweep.parameters]
        points = itertools.product(*(each.values for each in sweep.parameters))
        on_grid = (dict(zip(paths, point, strict=True)) for point in points)
        return next(each for each in on_grid if each not in known)
    # Imported here because it takes a second, which a service without sweeps need not spend.
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Of both, or a sweep with the next seed would repeat this one, a trial later.
    seed = random.Random(f"{sweep.seed}/{len(trials)}").getrandbits(32)
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if sweep.search == "tpe":
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=_NUM_STARTUP_TRIALS, constant_liar=True
        )
    study = optuna.create_study(sampler=sampler)  # which minimizes
    space = {each.path: _distribution(each) for each in sweep.parameters}
    for each in trials:
        study.add_trial(_as_known(sweep, each, space))
    found: dict[str, Any] = {}
    for _ in range(_MAX_TRIES):
        asked = study.ask(space).params
        found = {
            each.path: each.values[asked[each.path]] if each.values else asked[each.path]
            for each in sweep.parameters
        }
        if found not in known:
            break
    return found


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if parameter.values:
        # By index, as values may be lists.
        return CategoricalDistribution(range(len(parameter.values)))
    if parameter.is_integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.is_log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.is_log)


def _as_known(
    sweep: Sweep, observed: Observed, space: Mapping[str, optuna.distributions.BaseDistribution]
) -> optuna.trial.FrozenTrial:
    """A trial as Optuna knows it: those under way count as no better than what is known."""
    from optuna.trial import TrialState, create_trial

    params = {
        each.path: each.values.index(observed.trial.values[each.path])
        if each.values
        else observed.trial.values[each.path]
        for each in sweep.parameters
    }
    value, job = observed.value(sweep.metric), observed.job
    outcome: dict[str, Any]
    if observed.is_active:
        outcome = {"state": TrialState.RUNNING}
    elif value is None or math.isnan(value):
        outcome = {"state": TrialState.FAIL}
    elif job is not None and job.status is JobStatus.SUCCEEDED:
        outcome = {"value": loss_of(sweep.direction, value)}
    else:
        reached = {job.progress.step if job else 0: loss_of(sweep.direction, value)}
        outcome = {"state": TrialState.PRUNED, "intermediate_values": reached}
    return create_trial(params=params, distributions=dict(space), **outcome)


def spec_of_trial(
    sweep: Sweep, number: int, values: Mapping[str, Any], base: JobSpec | None = None
) -> JobSpec:
    """The spec of a trial's job; raises `SpecError` for values that are not legal together.

    Where it reads and writes, what code it runs and for whom cannot be searched: that was checked
    once, for the user that made the sweep. `base` is the sweep's own spec, where it is known.
    """
    check: Callable[[Any], JobSpec] = validate_spec
    try:
        base = base or check(dict(sweep.spec))
    except SpecError:
        # Newer checks refuse what was accepted once: all but that of the layout are left out.
        check = partial(JobSpec.checked, context={"stored": True, "laid_out": True})
        base = check(dict(sweep.spec))
    spec = check(set_values(dict(sweep.spec), values))
    if _fixed(spec) != _fixed(base):
        message = "name, project, paths, sinks, code and cluster are the same for all trials"
        raise SpecError([FieldProblem(path, "fixed_field", message) for path in values])
    labels = {**spec.labels, "sweep": sweep.id, "trial": str(number)}
    name = f"{spec.name[:50].rstrip('-')}-{number}"
    return spec.model_copy(update={"name": name, "labels": labels})


def _fixed(spec: JobSpec) -> tuple[Any, ...]:
    """What all trials of a sweep have in common."""
    model, sinks = spec.model, spec.sinks
    return (
        paths_of(spec),
        *(spec.project, spec.name, spec.labels, spec.priority, spec.preemptible, sinks),
        *(model.code, model.module, spec.resources.cluster),
    )


def _metric_problems(spec: JobSpec, metric: str) -> list[FieldProblem]:
    """That jobs of a spec never report a metric, if so."""
    parts = ["train", "validation"] if spec.data.split.validation else ["train"]
    of_tasks = [f"{part}/{name}" for part in parts for name in ("loss", *spec.model.metric_names)]
    others = METRICS.keys() - {"train/METRIC", "validation/METRIC"}
    # Words in capitals stand for any.
    patterns = ["[^/]+".join(map(re.escape, re.split("[A-Z]+", name))) for name in others]
    if metric in of_tasks or any(re.fullmatch(pattern, metric) for pattern in patterns):
        return []
    message = f"the jobs do not report {metric!r}; of quality they report {', '.join(of_tasks)}"
    return [FieldProblem("metric", "unknown_metric", message)]


def check_sweep(sweep: Sweep) -> list[JobSpec]:
    """Specs of trials with the bounds and values; `SpecError` for one that the spec does not take,
    for a metric that its jobs do not report, and for comparisons beyond their last step.

    Each is tried by itself, with what the spec has for the others; of those that ask the same of a
    cluster there is one.
    """
    base = validate_spec(dict(sweep.spec))
    tried: dict[str, JobSpec] = {}
    problems = _metric_problems(base, sweep.metric)
    last_step = base.training.max_steps or math.inf
    for parameter in sweep.parameters:
        for value in parameter.corners:
            try:
                spec = spec_of_trial(sweep, 0, {parameter.path: value}, base)
                last_step = max(last_step, spec.training.max_steps or math.inf)
                tried.setdefault(spec.model_dump_json(include=_ASKED_OF_CLUSTER), spec)
            except SpecError as error:
                problems += [
                    FieldProblem(
                        each.path, each.code, f"{parameter.path}={value!r:.80}: {each.message}"
                    )
                    for each in error.problems
                ]
            if len(problems) >= _MAX_PROBLEMS:
                raise SpecError(problems)
    if sweep.early_stopping and sweep.early_stopping.min_steps > last_step:
        message = f"trials end at step {last_step} and are never compared; lower it"
        problems.append(FieldProblem("early_stopping.min_steps", "no_effect", message))
    if problems:
        raise SpecError(problems)
    return list(tried.values())
