"""Labels of several tasks and weights of rows, against their Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from trainer.data.batches import TrainBatches, validation_batches
from trainer.data.columns import layout_of
from trainer.data.decode import decode
from trainer.data.errors import BadValueError
from trainer.data.reader import open_source
from trainer.spec import JobSpec, TaskSpec

NORMALISED = {"column": "rating", "offset_column": "user_mean", "scale_column": "user_scale"}


@pytest.fixture
def weighted_spec(prepared, make_spec):
    """A function that makes a spec whose rows are weighted by a column."""

    def make(column: str, batch_size: int = 16, **document: Any) -> JobSpec:
        data = {
            "path": str(prepared),
            "batch_size": batch_size,
            "shuffle": False,
            "label": {"column": "rating"},
            "weight_column": column,
        }
        return make_spec(data=data, **document)

    return make


def with_tasks(spec: JobSpec, *tasks: TaskSpec) -> JobSpec:
    return spec.model_copy(update={"model": spec.model.model_copy(update={"tasks": tasks})})


def test_each_task_has_its_own_column_of_labels(prepared, make_spec):
    spec = make_spec(batch_size=8, shuffle=False)
    raw = TaskSpec.model_validate(
        {"name": "year", "loss": "mse", "label": {"column": "year", "offset_column": "user_mean"}}
    )
    spec = with_tasks(spec, spec.model.task, raw)
    with TrainBatches(open_source(spec, prepared / "train"), spec, 0, 1) as batches:
        batch, _ = next(batches)
    rows = pl.read_parquet(prepared / "train" / "part-00000.parquet")[:8]
    assert batch.label.shape == batch.label_offset.shape == batch.label_scale.shape == (8, 2)
    stars = (rows["rating"] - rows["user_mean"]) / rows["user_scale"]
    assert batch.label[:, 0].tolist() == pytest.approx(stars.to_list(), abs=1e-5)
    years = (rows["year"] - rows["user_mean"]).to_list()
    assert batch.label[:, 1].tolist() == pytest.approx(years, abs=1e-5)
    assert batch.label_scale[:, 1].tolist() == [1.0] * 8


def test_a_bad_label_is_named_by_the_field_of_its_task(prepared, make_spec):
    click = TaskSpec.model_validate({"name": "c", "loss": "bce", "label": {"column": "rating"}})
    spec = with_tasks(make_spec(), make_spec().model.task, click)
    layout = layout_of(spec)
    assert [label.value.field for label in layout.labels] == [
        "data.label.column",
        "model.tasks[1].label.column",
    ]
    source = open_source(spec, prepared / "train")
    with pytest.raises(BadValueError, match=r"column 'rating': .* is not 0 or 1"):
        decode(source.read([0]), layout, source.locate)


def test_rows_weigh_what_their_column_says_and_padding_nothing(prepared, weighted_spec):
    spec = weighted_spec("user_scale", batch_size=64)
    source = open_source(spec, prepared / "validation")
    weights = torch.cat([batch.weight for batch in validation_batches(source, spec, 0, 1)])
    rows = pl.read_parquet(prepared / "validation" / "*.parquet")
    assert weights[: len(rows)].tolist() == pytest.approx(rows["user_scale"].to_list())
    assert len(rows) % 64
    assert set(weights[len(rows) :].tolist()) == {0.0}


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), None])
def test_a_weight_that_is_no_weight_is_refused(spoil, weighted_spec, value):
    folder: Path = spoil("user_scale", 77, value)
    spec = weighted_spec("user_scale")
    with (
        TrainBatches(open_source(spec, folder), spec, 0, 1) as batches,
        pytest.raises(BadValueError, match=r"row 77, column 'user_scale': .* is not a"),
    ):
        list(batches)
