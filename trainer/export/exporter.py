"""One export from beginning to end: a checkpoint becomes a folder with the marker.

Everything is written beside the folder and moved there whole. Raises `ExportError` for what cannot
be exported, and the errors of reading data and checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from trainer.checkpoint.files import CommittedCheckpoint, read_commit
from trainer.checkpoint.save_load import CheckpointError
from trainer.data.decode import FLOAT32, InputColumn, RowLayout, raw_kind
from trainer.data.inputs import resolve_inputs
from trainer.data.parquet import is_data_file, read_schema
from trainer.data.reader import encodings_digest
from trainer.data.transforms import read_vocabulary
from trainer.errors import DataError, StorageError
from trainer.export import artifact
from trainer.export.artifact import ArtifactError, ExportError, write_manifest
from trainer.export.load import (
    check_memory,
    find_checkpoint,
    load_model,
    num_table_elements,
    read_run_spec,
    stored_weights,
    with_table_sizes,
)
from trainer.export.predict import (
    Predictor,
    input_columns,
    scoring_layout,
    wanted_kind,
)
from trainer.export.program import quantized, write_program
from trainer.export.report import DEFAULT_ROWS, Report, measure
from trainer.layout.hosts import host_memory_bytes
from trainer.protocol.code_archive import CodeError, unpack
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import open_folder
from trainer.protocol.versions import installed_versions
from trainer.spec.job import JobSpec
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization
from trainer.storage import Location

logger = logging.getLogger(__name__)
Tell = Callable[[str], None]


def features_document(spec: JobSpec, layout: RowLayout, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Inputs by column with their kinds and bounds, the features that read them, and the tasks.

    `kinds` are those of the training data's columns (`raw_kind`).
    """
    # An empty list, id 0, or a replacement stands for a missing value.
    required = {
        column.name
        for column in layout.columns
        if not (column.is_list or column.encoder is not None or column.is_replaced)
    }
    inputs = [
        _input(name, column, kinds.get(name), name in required)
        for name, column in input_columns(layout).items()
    ]
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
                if task.is_binary
                else f"in the unit of column '{(task.label or spec.data.label).column}'",
            }
            for task in spec.model.tasks
        ],
        "example": example_row(layout, kinds),
    }


def _input(name: str, column: InputColumn, kind: str | None, is_required: bool) -> dict[str, Any]:
    bounds: dict[str, Any] = {"num_ids": column.num_ids} if column.num_ids else {}
    stated = kind if column.encoder else "integer" if column.num_ids else "number"
    if stated == FLOAT32:
        stated, bounds["precision"] = "number", FLOAT32
    if column.max_length:
        bounds["max_length"] = column.max_length
    if column.weights:
        bounds["weights"] = column.weights.name
    return {
        "name": name,
        "kind": stated,
        "wanted": wanted_kind(column, kind),
        "is_required": is_required,
        "read_by": column.field,
        **bounds,
    }


def example_row(layout: RowLayout, kinds: Mapping[str, str]) -> dict[str, Any]:
    scales = {label.scale.name for label in layout.labels if label.scale}
    row: dict[str, Any] = {}
    for name, column in input_columns(layout).items():
        number = 0.5 if column.dense is None else column.dense.mean or 0.5
        value: Any = min(1, column.num_ids - 1) if column.num_ids else number
        takes_text = kinds.get(name) == "string"
        if column.encoder is not None and (takes_text or not column.encoder.accepts(pa.int64())):
            value = "text"
        row[name] = [value] if column.is_list else 1.0 if name in scales else value
    return row


def readme(report: Report, example: Mapping[str, Any]) -> str:
    """How to score with the export, and what was measured."""
    row = json.dumps(example)
    return f"""# {report.job}, step {report.step}

Exported by Shardloom from checkpoint `{report.checkpoint}`; tables: {report.quantize}.
`features.json` says what a row to score holds, and what its predictions are.

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


def export(
    run_dir: RunDir,
    to: Path,
    checkpoint: str = "newest",
    quantize: Quantization = DEFAULT_QUANTIZATION,
    *,
    max_report_rows: int = DEFAULT_ROWS,
    may_run_code: bool = True,
    places: str | None = None,
    tell: Tell = logger.info,
) -> Report:
    """Export a checkpoint of the job in `run_dir` into the new folder `to`.

    `checkpoint` is `newest`, `best`, a step, or the path of a checkpoint's folder. Without
    `may_run_code` a model that is a module of the user's own is refused. With `places` (of
    `places_digest`) a spec that names others is, and job code may write in `to` at the same time.
    Lines of progress go to `tell`. Raises `ExportError`.
    """
    if to.exists():
        raise ArtifactError(f"{to} exists already; name a folder that does not")
    run_spec = read_run_spec(run_dir, places)
    if run_spec.dynamic_tables:
        raise ExportError(
            f"embedding_tables '{next(iter(run_spec.dynamic_tables))}' is dynamic: which id has "
            "which row is kept in TorchRec's managed collision modules, which torch.export cannot "
            "trace; export needs tables of a fixed vocabulary"
        )
    if run_spec.model.module is not None and not may_run_code:
        raise ExportError(
            f"the model is the user's own module {run_spec.model.module}, and no user code may run "
            "here; export on a host of the cluster (`shardloom export --run-dir DIR --to DIR`)"
        )
    with _users_code(run_dir, run_spec.model.code):
        while True:
            found = find_checkpoint(run_dir, checkpoint, places)
            try:
                spec, notes, trained = _load(run_spec, found, quantize, tell)
                break
            except (ExportError, CheckpointError, DataError, OSError) as error:
                if read_commit(found.path) is not None:
                    raise
                if checkpoint not in ("newest", "best"):
                    raise ExportError(
                        f"checkpoint {found.path.name} was removed while it was read, as the job "
                        "has saved later ones; name another one, or `newest`"
                    ) from error
        staging = to.with_name(f".{to.name}.partial")
        within = to.parent if places is None else run_dir.runs_dir
        shutil.rmtree(staging, ignore_errors=True)
        try:
            with open_folder(staging, within, make=True) as opened:
                # Not by its path, in which job code may put a link.
                folder = staging if places is None else Path(f"/proc/self/fd/{opened}")
                report = _write(
                    quantize, max_report_rows, spec, found, trained, notes, folder, tell
                )
            staging.rename(to)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return report


def _load(
    run_spec: JobSpec, found: CommittedCheckpoint, quantize: Quantization, tell: Tell
) -> tuple[JobSpec, list[str], nn.Module]:
    """The job's spec with what data and checkpoint tell, notes for the report, and the model."""
    written = with_table_sizes(run_spec, stored_weights(found.path))
    _check_encodings(written, found)
    spec, notes = with_data(written)
    check_memory(spec, quantize, host_memory_bytes()[1])
    tell(f"loading checkpoint {found.path.name}")
    return spec, notes, load_model(spec, found.path)


@contextlib.contextmanager
def _users_code(run_dir: RunDir, code: str | None) -> Iterator[None]:
    """Put the job's own code, if any, on the module path.

    Unpacked, as in training: it may read files beside it.
    """
    if code is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="shardloom-code-") as folder:
        try:
            path = unpack(run_dir.code_path(code).read_bytes(), code, Path(folder) / "unpacked")
        except (CodeError, OSError) as error:
            raise ExportError(f"the code of the job cannot be had: {error}") from None
        sys.path.insert(0, str(path))
        try:
            yield
        finally:
            sys.path.remove(str(path))


def _write(
    quantize: Quantization,
    max_report_rows: int,
    spec: JobSpec,
    found: CommittedCheckpoint,
    trained: nn.Module,
    notes: list[str],
    folder: Path,
    tell: Tell,
) -> Report:
    what = {
        "job": spec.name,
        "checkpoint": found.path.name,
        "step": found.commit.step,
        "quantize": quantize,
        "versions": installed_versions(),
    }
    tell(f"quantising the tables: {quantize}")
    traced = quantized(trained, quantize)
    tell("tracing the model with torch.export")
    write_program(traced, spec, folder / artifact.PROGRAM)
    _write_new(folder / artifact.SPEC, json.dumps(spec.model_dump(mode="json"), indent=1))
    copy_vocabularies(spec, folder / artifact.VOCABULARIES)
    layout = scoring_layout(spec, folder / artifact.VOCABULARIES)
    features = features_document(spec, layout, _kinds(spec))
    _write_new(folder / artifact.FEATURES, json.dumps(features, indent=1))
    write_manifest(folder, **what)
    tell("comparing with the trainer's predictions")
    report = measure(Predictor(folder), trained, traced, spec, max_report_rows)
    report.notes, report.recorded_metrics = notes, dict(found.commit.metrics)
    report.program_bytes = (folder / artifact.PROGRAM).stat().st_size
    report.table_bytes = 4 * num_table_elements(spec)
    _write_new(folder / artifact.REPORT, report.model_dump_json(indent=1))
    _write_new(folder / artifact.README, readme(report, features["example"]))
    write_manifest(folder, **what)
    return report


def _kinds(spec: JobSpec) -> dict[str, str]:
    """Kinds of the training data's columns; none where it is not there any more."""
    split = spec.data.split
    for part in filter(None, (split.train, split.validation)):
        with contextlib.suppress(DataError):
            schema = read_schema(Location.parse(spec.data.path) / part)
            return {field.name: raw_kind(field.type) for field in schema}
    return {}


def with_data(spec: JobSpec) -> tuple[JobSpec, list[str]]:
    """`spec` with what its data tells, and notes for the report where the data is gone.

    Raises `DataError` where rows could not be scored without it.
    """
    try:
        return resolve_inputs(spec), []
    except DataError as error:
        for each in spec.features:
            lacks_statistics = each.transform == "standardise" and None in (each.mean, each.std)
            if each.vocabulary or lacks_statistics:
                raise
        return spec, [f"the job's data is not there: {error}"]


def _check_encodings(spec: JobSpec, found: CommittedCheckpoint) -> None:
    """Raise `ExportError` where the ids of the data stand for other values than at the save."""
    encodings = found.commit.row_order.encodings
    with contextlib.suppress(DataError):  # data that is away is told of in the report
        if not Location.parse(spec.data.path).is_dir():
            return
        if encodings not in (None, encodings_digest(spec)):
            raise ExportError(
                f"{spec.data.path} was prepared anew, with other vocabularies or hashes, since "
                f"{found.path.name} was saved: its ids stand for other values than the rows of the "
                "tables. Put the data back as it was, or move it away: a model of plain ids needs "
                "none"
            )


def copy_vocabularies(spec: JobSpec, folder: Path) -> None:
    """Copy the vocabularies that map raw values to ids, with their paths below `data.path`.

    Those of the prepared data are copied even where the spec uses none, as far as they can be read:
    they made the ids. Raises OSError, or `DataError` where one that is used cannot be read.
    """
    source = Location.parse(spec.data.path)
    used = [source / each.vocabulary_file for each in spec.features if each.vocabulary]
    files = list(used)
    with contextlib.suppress(StorageError):  # data that is away is told of in the report
        files += [file for file in (source / "vocab").list() if is_data_file(file.name)]
    folder.mkdir()
    for path in sorted({file.relative_to(source) for file in files}):
        # Not its bytes: a link may lead to any file of this host.
        try:
            table = read_vocabulary(source / path)
        except (DataError, pa.ArrowException, OSError):
            if source / path in used:
                raise
            continue
        target = folder / path
        with (
            open_folder(target.parent, folder.parent, make=True) as opened,
            Path(f"/proc/self/fd/{opened}/{target.name}").open("xb") as file,
        ):
            pq.write_table(table, file)


def _write_new(path: Path, text: str) -> None:
    """Write a file; raises OSError where anything is there, also a link, which may lead away."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
