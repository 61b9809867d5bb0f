"""What an export says of itself: `features.json` for programs, `README.md` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trainer.data.columns import InputColumn, RowLayout
from trainer.data.transforms import IdEncoder
from trainer.export.inputs import FLOAT32, input_columns, wanted_kind
from trainer.export.report import Report
from trainer.spec import JobSpec


def features_document(spec: JobSpec, layout: RowLayout, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Inputs by column with their kinds and bounds, the features that read them, and the tasks.

    `kinds` are those of the training data's columns (`trainer.export.inputs.raw_kind`).
    """
    columns = input_columns(layout).items()
    inputs = [_input(name, column, kinds.get(name)) for name, column in columns]
    return {
        "inputs": inputs,
        "features": [feature.model_dump(exclude_defaults=True) for feature in spec.features],
        "tables": {
            table.name: {"num_embeddings": table.num_embeddings, "dim": table.embedding_dim}
            for table in spec.embedding_tables
        },
        "tasks": [
            {
                "name": task.name,
                "loss": task.loss,
                "prediction": "a probability"
                if task.loss == "bce"
                else f"in the unit of column '{(task.label or spec.data.label).column}'",
            }
            for task in spec.model.tasks
        ],
        "example": example_row(layout, kinds),
    }


def _input(name: str, column: InputColumn, kind: str | None) -> dict[str, Any]:
    bounds = {"num_ids": column.num_ids} if column.num_ids else {}
    stated = kind if column.encoder else "integer" if column.num_ids else "number"
    if stated == FLOAT32:
        stated, bounds["precision"] = "number", FLOAT32  # type: ignore[assignment]
    if column.max_length:
        bounds["max_length"] = column.max_length
    if column.weights:
        bounds["weights"] = column.weights.name  # type: ignore[assignment]
    return {
        "name": name,
        "kind": stated,
        "wanted": wanted_kind(column, kind),
        "is_required": not may_be_missing(column),
        "read_by": column.field,
        **bounds,
    }


def may_be_missing(column: InputColumn) -> bool:
    """Whether a row without the column can be scored: an empty list, id 0, a replacement."""
    return column.is_list or column.encoder is not None or column.rule.missing is not None


def example_row(layout: RowLayout, kinds: Mapping[str, str]) -> dict[str, Any]:
    """A row that can be scored."""
    scales = {label.scale.name for label in layout.labels if label.scale}
    row: dict[str, Any] = {}
    for name, column in input_columns(layout).items():
        value: Any = min(1, column.num_ids - 1) if column.num_ids else 0.5
        if column.encoder is not None and _takes_text(column.encoder, kinds.get(name)):
            value = "text"
        row[name] = [value] if column.is_list else 1.0 if name in scales else value
    return row


def _takes_text(encoder: IdEncoder, kind: str | None) -> bool:
    return kind == "string" or not encoder.accepts(pa.int64())


def readme(report: Report, example: Mapping[str, Any]) -> str:
    """How to score with the export, and what was measured."""
    row = json.dumps(example)
    return f"""# {report.job}, step {report.step}

Exported by Shardloom from checkpoint `{report.checkpoint}`; tables: {report.quantize}.
`features.json` says what a row to score holds; predictions come in the unit of the label.

Serve it:

    shardloom serve . --port 8800
    curl -s localhost:8800/v1/predict -H 'Content-Type: application/json' \\
      -d '{{"rows": [{row}]}}'

Or from Python:

    from pathlib import Path
    from trainer.export.predict import Predictor

    predictor = Predictor(Path("."))
    predictor.predict([{row}])  # or a pyarrow Table

`model.pt2` is a `torch.export` program over flat arrays; `torch.export.load` reads it anywhere,
after `import fbgemm_gpu`. Its inputs are described in `trainer/export/program.py`.

## Measured

{report.text}
"""
