"""The specs of examples as exports: a transformer, attention, a module of the user's own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE_SPEC
from tests.unit.trainer.export.export_case import write_run
from trainer.data.inputs import resolve_inputs
from trainer.export.artifact import ExportError
from trainer.export.exporter import export
from trainer.export.predict import Predictor
from trainer.protocol.code_archive import id_of, pack
from trainer.protocol.run_dir import RunDir
from trainer.spec import load_spec
from trainer.spec.job import JobSpec

EXAMPLES = EXAMPLE_SPEC.parent
CODE = EXAMPLES / "code"


def example(name: str, data: Path, *overrides: str) -> JobSpec:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    return resolve_inputs(load_spec(text, [f"data.path={data}", *overrides]))


def exported_error(run_dir: RunDir, folder: Path) -> float:
    """Largest difference from the trainer's predictions, on validation rows, without quantising."""
    report = export(run_dir, folder, quantize="none")
    (task,) = report.tasks.values()
    assert report.num_rows > 100
    assert task.prediction_std > 0.01
    return task.max_abs_error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["movielens-transformer", "movielens-sequence"])
def test_an_example_is_exported_with_the_predictions_of_its_model(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    run_dir = write_run(tmp_path / "run", example(name, prepared), 5)
    assert exported_error(run_dir, tmp_path / "out") < 1e-5


@pytest.fixture
def with_code(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunDir, Path]]:
    """A run of code that reads a file beside it, and the archive of that code in its folder."""
    source = shutil.copytree(CODE, tmp_path / "src")
    (source / "two_towers" / "words.txt").write_text("red")
    with (source / "two_towers" / "__init__.py").open("a") as file:
        file.write("import pathlib\n(pathlib.Path(__file__).parent / 'words.txt').read_text()\n")
    archive = pack(source)
    spec = example("movielens-module", prepared, f"model.code={id_of(archive)}")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(source))
        run_dir = write_run(tmp_path / "run", spec, 5)
    path = run_dir.code_path(id_of(archive))
    path.parent.mkdir()
    path.write_bytes(archive)
    for name in [name for name in sys.modules if name.partition(".")[0] == "two_towers"]:
        monkeypatch.delitem(sys.modules, name)
    yield run_dir, path
    for name in [name for name in sys.modules if name.partition(".")[0] == "two_towers"]:
        del sys.modules[name]


def test_a_module_of_the_users_own_is_exported_from_the_code_that_came_with_the_job(
    with_code: tuple[RunDir, Path], tmp_path: Path
) -> None:
    before = list(sys.path)
    assert exported_error(with_code[0], tmp_path / "out") < 1e-5
    # Numbers as they are prepared are scaled as training scaled them: those of the example to 0.
    predictor = Predictor(tmp_path / "out")
    row = predictor.features["example"]
    assert row["year"] > 1900 and not predictor.decode([row]).dense.round(5).any()
    assert "shardloom-code-" in str(sys.modules["two_towers"].__file__)
    assert sys.path == before


def test_code_that_was_changed_since_is_not_run(
    with_code: tuple[RunDir, Path], tmp_path: Path
) -> None:
    run_dir, path = with_code
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ExportError, match="changed or cut short since it was uploaded"):
        export(run_dir, tmp_path / "out")
    assert "two_towers" not in sys.modules
    path.unlink()
    with pytest.raises(ExportError, match="the code of the job cannot be had"):
        export(run_dir, tmp_path / "out")
