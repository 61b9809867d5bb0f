"""A run folder and its exports, one for each quantisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.trainer.export.export_case import make_spec, write_data, write_run
from trainer.export.__main__ import main
from trainer.export.load import read_run_spec
from trainer.export.predict import Predictor
from trainer.export.report import Report
from trainer.export.requests import ask_for, places_digest
from trainer.protocol.run_dir import RunDir

Exports = Callable[[Any], tuple[Path, Report]]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both splits of the rows, and a vocabulary of users."""
    folder = write_data(tmp_path_factory.mktemp("data"))
    (folder / "vocab").mkdir()
    names = {"value": ["ann", "bob", "cid"], "index": [1, 2, 3]}
    pq.write_table(pa.table(names), folder / "vocab" / "user.parquet")
    return folder


@pytest.fixture(scope="session")
def run_dir(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run with checkpoints of steps 7 and 20, of a job that trains in bf16: exports do not."""
    spec = make_spec(data, training={"dense_precision": "bf16"})
    return write_run(tmp_path_factory.mktemp("run"), spec, 7, 20)


@pytest.fixture(scope="session")
def exports(run_dir: RunDir) -> Exports:
    """A function that gives the export of step 20 in a quantisation, and its report.

    Made as it is asked for by the service.
    """
    made: dict[Any, tuple[Path, Report]] = {}
    places = places_digest(read_run_spec(run_dir))

    def exported(quantize: Any) -> tuple[Path, Report]:
        if quantize not in made:
            folder = ask_for(run_dir, "newest", quantize)
            arguments = ["--request", str(folder.root), "--places", places]
            assert main(arguments) == 0, folder.message
            made[quantize] = folder.artifact, Report.model_validate(folder.read_report())
        return made[quantize]

    return exported


@pytest.fixture(scope="session")
def exported(exports: Exports) -> Path:
    return exports("int8")[0]


@pytest.fixture(scope="session")
def predictor(exported: Path) -> Predictor:
    return Predictor(exported)
