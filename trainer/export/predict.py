"""Predictions of an export: `Predictor(DIR).predict(rows)`, or `predict(DIR, rows)` for once.

Needs torch and FBGEMM's CPU kernels, pyarrow and numpy; neither TorchRec, nor Ray, nor the source
of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from trainer.data.errors import DataError
from trainer.data.rows import Rows
from trainer.export.artifact import (
    FEATURES,
    PROGRAM,
    VOCABULARIES,
    check_files,
    read_manifest,
    read_spec,
)
from trainer.export.errors import ArtifactError
from trainer.export.inputs import (
    PAD_ROWS,
    program_arrays,
    rows_of_table,
    scoring_layout,
    table_of_dicts,
)
from trainer.export.raw_values import with_ids
from trainer.spec import JobSpec

Predictions = dict[str, NDArray[np.float32]]

_MAX_ROWS_AT_ONCE = 8192


class Predictor:
    """The model of an export, ready to score. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        """Load and check the export in `folder`; raises `ArtifactError`."""
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest)
        self.spec = read_spec(folder)
        try:
            self.layout = scoring_layout(self.spec, folder / VOCABULARIES)
        except DataError as error:
            raise ArtifactError(f"{folder} lacks a vocabulary: {error}") from error
        self.features = json.loads((folder / FEATURES).read_text(encoding="utf-8"))
        self._kinds = {
            each["name"]: each.get("precision", each["kind"]) for each in self.features["inputs"]
        }
        self._program = _load(folder / PROGRAM)
        self._vocabularies = folder / VOCABULARIES

    def predict(
        self,
        rows: Sequence[Mapping[str, Any]] | pa.Table,
        raw: Mapping[str, str] = MappingProxyType({}),
    ) -> Predictions:
        """A float32 array [n] for each task, in the unit of its label (`bce`: a probability).

        `rows` are dicts by column, or a table with at least these columns. `raw` names columns
        that hold values of the raw data, each with the vocabulary that makes them ids, as in
        `{"movie_id": "movie_id", "history_movies": "movie_id"}`. Raises `BadRow`, and of a table
        whose columns have other types `ColumnError`.
        """
        if raw:
            found = rows.to_pylist() if isinstance(rows, pa.Table) else rows
            rows = with_ids(found, raw, self._vocabularies)
        return self.score(self.decode(rows))

    def decode(self, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Rows:
        """Rows to score as the trainer has them; raises as `predict` does."""
        table = (
            rows if isinstance(rows, pa.Table) else table_of_dicts(rows, self.layout, self._kinds)
        )
        return rows_of_table(table, self.layout)

    def score(self, rows: Rows) -> Predictions:
        """The same of decoded rows."""
        pieces = [
            rows.take(np.arange(start, min(start + _MAX_ROWS_AT_ONCE, len(rows))))
            for start in range(0, len(rows), _MAX_ROWS_AT_ONCE)
        ]
        outputs = [self._outputs(piece) for piece in pieces]
        shape = (0, len(self.spec.model.tasks))
        whole = np.concatenate(outputs) if outputs else np.empty(shape, np.float32)
        return in_own_unit(whole, rows, self.spec)

    def _outputs(self, rows: Rows) -> NDArray[np.float32]:
        arrays = [torch.from_numpy(array) for array in program_arrays(rows, self.spec)]
        with torch.inference_mode():
            return self._program(*arrays)[:-PAD_ROWS].numpy()


def predict(folder: Path, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Predictions:
    """Predictions of the export in `folder`, which is loaded for them alone."""
    return Predictor(folder).predict(rows)


def in_own_unit(outputs: NDArray[np.float32], rows: Rows, spec: JobSpec) -> Predictions:
    """Outputs [n, K] of the model in the units of the labels, by task."""
    found = {}
    for index, task in enumerate(spec.model.tasks):
        values = outputs[:, index]
        if task.loss == "bce":
            values = (1 / (1 + np.exp(-values))).astype(np.float32)
        with np.errstate(over="ignore"):  # infinite then, which whoever asked has to look at
            found[task.name] = values * rows.scale[:, index] + rows.offset[:, index]
    return found


def _load(path: Path) -> Any:
    import fbgemm_gpu  # noqa: F401, registers the operators that programs call

    try:
        return torch.export.load(path).module()
    except Exception as error:  # whatever a damaged or newer file makes the reader raise
        raise ArtifactError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}; use the versions of torch "
            "and fbgemm-gpu that EXPORT.json names"
        ) from error
