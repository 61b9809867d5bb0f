"""Early stopping against its definition, and the spec checks of the training loop's options."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.test_spec import minimal
from trainer.early_stopping import after_validation, is_over
from trainer.elastic.protocol import Plateau
from trainer.metrics import is_better
from trainer.spec import EarlyStoppingSpec, SpecError, validate_spec


def stops_at(values: list[float], spec: EarlyStoppingSpec, metric: str = "rmse") -> int | None:
    """Number of the validation (from 0) that ends the run."""
    plateau: Plateau | None = None
    for number, value in enumerate(values):
        plateau = after_validation(plateau, metric, value, spec)
        if is_over(plateau, spec):
            return number
    return None


def test_a_run_ends_after_patience_validations_without_a_gain() -> None:
    spec = EarlyStoppingSpec(patience=2, min_delta=0.01)
    assert stops_at([1.0, 0.9, 0.895, 0.891], spec) == 3, "gains below min_delta are none"
    assert stops_at([1.0, 0.9, 0.95, 0.88, 0.9, 0.9], spec) == 5
    assert stops_at([1.0, 0.9, 0.8, 0.7], spec) is None


def test_a_run_that_gets_worse_ends_whichever_way_the_metric_counts() -> None:
    spec = EarlyStoppingSpec(patience=1)
    assert stops_at([0.7, 0.8, 0.75], spec, "auc") == 2
    assert stops_at([0.7, 0.8, 0.75], spec, "click/auc") == 2
    assert stops_at([0.8, 0.9, 1.05, 1.06], spec, "calibration") == 3, "1 is perfect"


def test_a_nan_at_the_start_is_not_the_value_to_beat() -> None:
    spec = EarlyStoppingSpec(patience=2)
    assert stops_at([math.nan, 0.9, 0.8, 0.7], spec) is None
    assert stops_at([math.nan, math.nan], spec) == 1


def test_without_a_spec_no_run_ends() -> None:
    assert not is_over(Plateau(best=1.0, num_validations=99), None)
    assert not is_over(None, EarlyStoppingSpec(patience=1))


@given(
    values=st.lists(st.floats(0, 2) | st.just(math.nan), max_size=20),
    patience=st.integers(1, 4),
    min_delta=st.floats(0, 0.5),
)
def test_it_stops_where_patience_values_in_a_row_beat_nothing(
    values: list[float], patience: int, min_delta: float
) -> None:
    best, waiting, expected = None, 0, None
    for number, value in enumerate(values):
        gains = is_better("rmse", value, best, min_delta)
        best, waiting = (value, 0) if gains else (best, waiting + 1)
        if waiting >= patience:
            expected = number
            break
    spec = EarlyStoppingSpec(patience=patience, min_delta=min_delta)
    assert stops_at(values, spec) == expected


@pytest.mark.parametrize(
    ("change", "path", "code"),
    [
        ({"checkpoint": {"every_steps": 6}}, "checkpoint.every_steps", "accumulate_steps"),
        (
            {"training": {"accumulate_steps": 4, "report_every_steps": 10}},
            "training.report_every_steps",
            "accumulate_steps",
        ),
        (
            {"training": {"early_stopping": {"patience": 1}}, "split": {"validation": None}},
            "training.early_stopping",
            "no_validation",
        ),
        (
            {"optimizer": {"sparse": {"max_gradient": 1.0}}, "sharding_types": ["data_parallel"]},
            "embedding_tables[0].constraints.sharding_types",
            "max_gradient",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_field(change: dict, path: str, code: str) -> None:
    document = minimal()
    document["training"] = {"accumulate_steps": 4, "report_every_steps": 8}
    if split := change.pop("split", None):
        document["data"]["split"] = split
    if types := change.pop("sharding_types", None):
        document["embedding_tables"][0]["constraints"] = {"sharding_types": types}
    with pytest.raises(SpecError) as caught:
        validate_spec(document | change)
    assert [(p.path, p.code) for p in caught.value.problems] == [(path, code)]


def test_a_sync_of_the_dense_part_comes_where_its_gradients_are_used_up() -> None:
    document = minimal()
    document["parallelism"] |= {"placement": "inter_host", "sync": {"every_steps": 6}}
    document["training"] = {"accumulate_steps": 4, "report_every_steps": 8}
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    assert [p.path for p in caught.value.problems] == ["parallelism.sync.every_steps"]
