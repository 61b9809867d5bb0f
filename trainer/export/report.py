"""How far an export's predictions are from the trainer's, measured on validation rows.

The trainer's are those of the unsharded float model with the checkpoint's weights, through the
trainer's own decoding and batches; the export's are those of a served table. Besides, the exported
program is compared with the model that it was traced from: a difference there is no quantisation
but a fault of the export (`ExportError`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import nn

from trainer.data.batches import make_batch
from trainer.data.decode import decode, layout_of
from trainer.data.parquet import ParquetSource
from trainer.data.quarantine import FaultLog, FaultMarks
from trainer.data.rows import Rows
from trainer.errors import CorruptFileError, DataError, SourceMissingError
from trainer.export.artifact import ExportError
from trainer.export.predict import Predictor, in_own_unit, rows_at_once
from trainer.spec.job import JobSpec
from trainer.spec.model import TaskSpec
from trainer.spec.training import Quantization
from trainer.storage import Location

DEFAULT_ROWS = 100_000
_VALIDATION = "validation"
# Two ways of computing the same in float32, sums in another order.
_ROUNDING = 1e-4
_BATCH_ROWS = 4096
_NUM_SAMPLES = 3


class TaskError(BaseModel):
    """|export - trainer| of one task's predictions, in the unit of its label.

    `trainer_metric` and `export_metric` are both measured here on the same labels: the root mean
    squared error for `mse`, the log loss for `bce`, of rows weighed as in training.
    """

    mean_abs_error: float
    max_abs_error: float
    p99_abs_error: float
    prediction_std: float
    metric: str
    trainer_metric: float
    export_metric: float


class Report(BaseModel):
    """What an export is, and how good. `not_measured` says why nothing was, if so.

    `program_error` is the largest difference of the program from the model that was traced (in the
    units that the model learns); `table_bytes` is one float copy of the tables.
    """

    job: str
    checkpoint: str
    step: int
    quantize: Quantization
    num_rows: int = 0
    rows_from: str = ""
    not_measured: str | None = None
    program_error: float | None = None
    tasks: dict[str, TaskError] = {}
    recorded_metrics: dict[str, float] = {}
    table_bytes: int = 0
    program_bytes: int = 0
    notes: list[str] = []

    @property
    def text(self) -> str:
        if self.not_measured:
            return f"predictions were not compared with the trainer's: {self.not_measured}"
        lines = [
            f"{name}: |export - trainer| mean {e.mean_abs_error:.2e}, 99% {e.p99_abs_error:.2e}, "
            f"max {e.max_abs_error:.2e}; {e.metric} {e.trainer_metric:.6f} (trainer) "
            f"{e.export_metric:.6f} (export)"
            for name, e in self.tasks.items()
        ]
        return "\n".join([f"{self.num_rows} rows of {self.rows_from} compared", *lines])


def measure(
    predictor: Predictor,
    trained: nn.Module,
    traced: nn.Module,
    spec: JobSpec,
    max_rows: int = DEFAULT_ROWS,
) -> Report:
    """Compare `predictor` with the `trained` model, and with the model that was `traced`.

    The rows are those of `spec`, whose data is on this host. Raises `ExportError` where the
    program does not compute what it was traced from.
    """
    report = Report(**predictor.manifest.model_dump(include={*Report.model_fields}))
    split = spec.data.split.validation
    try:
        if split is None:
            raise SourceMissingError("the spec has no validation rows (data.split.validation)")
        pieces = list(_pieces(spec, Location.parse(spec.data.path) / split, max_rows))
        weights = np.concatenate([[0.0], *(rows.row_weight for _, rows in pieces)])[1:]
        if not weights.any():
            raise SourceMissingError("there is no validation row that can be used")
        ours = [predictor.predict(table) for table, _ in pieces]
    except DataError as error:
        report.not_measured = str(error)
        # The program can be wrong without validation rows, too.
        sample = predictor.decode([predictor.features["example"]] * _NUM_SAMPLES)
        report.program_error = _program_error(predictor, traced, sample)
        return report
    report.rows_from = f"{spec.data.path}/{split}"
    report.num_rows = sum(len(rows) for _, rows in pieces)
    report.program_error = _program_error(predictor, traced, pieces[0][1])
    theirs = [in_own_unit(outputs_of(trained, rows, spec), rows, spec) for _, rows in pieces]
    for index, task in enumerate(spec.model.tasks):
        found, wanted = (np.concatenate([part[task.name] for part in p]) for p in (ours, theirs))
        errors = np.abs(found.astype(np.float64) - wanted)
        label = np.concatenate([_label_of(task, rows, index) for _, rows in pieces])
        name, metric = ("logloss", _log_loss) if task.is_binary else ("rmse", _rmse)
        report.tasks[task.name] = TaskError(
            mean_abs_error=float(errors.mean()),
            max_abs_error=float(errors.max()),
            p99_abs_error=float(np.quantile(errors, 0.99)),
            prediction_std=float(wanted.std()),
            metric=name,
            trainer_metric=metric(wanted, label, weights),
            export_metric=metric(found, label, weights),
        )
    return report


def _pieces(spec: JobSpec, folder: Location, max_rows: int) -> Iterator[tuple[pa.Table, Rows]]:
    """The first `max_rows` rows, raw and decoded, without those that training leaves out."""
    layout, num_left = layout_of(spec), max_rows
    num_rows = min(_BATCH_ROWS, rows_at_once(spec))
    is_lenient = spec.data.on_bad_rows == "quarantine"
    source = ParquetSource(folder, [column.name for column in layout.columns])
    for number in range(len(source.group_rows)):
        try:
            group = source.read_group(number).slice(0, num_left)
        except CorruptFileError:
            if not is_lenient:
                raise
            continue
        for start in range(0, len(group), num_rows):
            table = group.slice(start, num_rows)
            if is_lenient:
                marks = FaultMarks(
                    np.arange(len(table)),
                    FaultLog(),
                    lambda bad: [(_VALIDATION, np.arange(len(bad)))],
                )
                decode(table, layout, _locate, marks)
                table = table.filter(pa.array(marks.faults == 0))
            if len(table):
                yield table, decode(table, layout, _locate)
        num_left -= len(group)
        if not num_left:
            return


def _locate(row: int) -> tuple[str, int]:
    return _VALIDATION, row


def outputs_of(model: nn.Module, rows: Rows, spec: JobSpec) -> NDArray[np.float32]:
    """Outputs [n, K] of a model as the trainer runs it."""
    with torch.no_grad():
        return model(make_batch(rows, spec))[1].numpy()


def _program_error(predictor: Predictor, traced: nn.Module, rows: Rows) -> float:
    """Largest difference of the program from `traced`; raises `ExportError` if it is no rounding.

    In the units of the labels, on both sides.
    """
    spec = predictor.spec
    wanted = in_own_unit(outputs_of(traced, rows, spec), rows, spec)
    found = predictor.score(rows)
    error = float(np.max([np.abs(found[name] - wanted[name]).max() for name in wanted]))
    largest = max(1.0, *(float(np.abs(values).max()) for values in wanted.values()))
    if not error <= _ROUNDING * largest:
        raise ExportError(
            f"the exported program differs by {error:.3g} from the model that it was traced from: "
            "the model's forward does something that torch.export does not keep (state that "
            "changes, randomness, branches on values)"
        )
    return error


def _label_of(task: TaskSpec, rows: Rows, index: int) -> NDArray[np.float32]:
    """Labels [n] of `task` number `index` in the unit of its predictions."""
    label = rows.label[:, index]
    return label if task.is_binary else label * rows.scale[:, index] + rows.offset[:, index]


def _rmse(predictions: NDArray[Any], label: NDArray[Any], weights: NDArray[Any]) -> float:
    squares = (predictions.astype(np.float64) - label) ** 2
    return float(np.sqrt(np.average(squares, weights=weights)))


def _log_loss(predictions: NDArray[Any], label: NDArray[Any], weights: NDArray[Any]) -> float:
    inside = np.clip(predictions.astype(np.float64), 1e-7, 1 - 1e-7)
    losses = label * np.log(inside) + (1 - label) * np.log(1 - inside)
    return -float(np.average(losses, weights=weights))
