"""The trainer's import rules, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trainer

ROOT = Path(trainer.__file__).parent
KNOWS_TORCHREC = (
    "parallel/",
    "models/",
    "data/",
    "elastic/training_state.py",
    "metrics.py",
    "export/",
)
LIGHT = (
    "trainer.spec",
    "trainer.events",
    "trainer.run_dir",
    "trainer.export.folder",
    "trainer.versions",
    "trainer.parallel.layout",
    "trainer.parallel.layout_choice",
    "trainer.driver",
    "service.client",
    "service.cli",
)


def _imports() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                yield path.relative_to(ROOT).as_posix(), name


def test_the_trainer_never_imports_the_service() -> None:
    assert [found for found in _imports() if found[1].partition(".")[0] == "service"] == []


def test_torchrec_stays_in_the_engine() -> None:
    users = {path for path, module in _imports() if module.partition(".")[0] == "torchrec"}
    assert {path for path in users if not path.startswith(KNOWS_TORCHREC)} == set()


def test_what_the_control_plane_and_the_driver_import_is_free_of_torch() -> None:
    code = f"import sys, importlib; [importlib.import_module(n) for n in {LIGHT!r}]; "
    code += "print([m for m in ('torch', 'torchrec', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
