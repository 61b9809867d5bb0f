"""The control plane stays light: what it may import, read from its source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import service

ROOT = Path(service.__file__).parent
# All free of torch and Ray.
FROM_TRAINER = {
    "trainer.spec",
    "trainer.code_archive",
    "trainer.events",
    "trainer.log_pump",
    "trainer.run_dir",
    "trainer.parallel.layout",
    "trainer.parallel.layout_choice",
    "trainer.data.errors",
    "trainer.export.artifact",
    "trainer.export.errors",
    "trainer.export.folder",
    "trainer.spec.export",
    "trainer.data.resolve",
    "trainer.versions",
}
CONCRETE_BACKENDS = {
    "service.backends.ray_jobs",
    "service.backends.kuberay",
    "service.backends.fake",
}


def _imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _by_file() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        for module in _imports(path):
            yield path.relative_to(ROOT).as_posix(), module


def test_the_service_imports_no_torch_and_no_ray() -> None:
    heavy = {"torch", "torchrec", "ray", "fbgemm_gpu"}
    assert [found for found in _by_file() if found[1].partition(".")[0] in heavy] == []


def test_the_service_takes_only_light_modules_from_the_trainer() -> None:
    taken = [found for found in _by_file() if found[1].partition(".")[0] == "trainer"]
    assert [found for found in taken if found[1] not in FROM_TRAINER] == []


@pytest.mark.parametrize("name", ["domain.py", "lifecycle.py"])
def test_domain_and_lifecycle_import_only_each_other_and_the_spec(name: str) -> None:
    ours = {m for m in _imports(ROOT / name) if m.partition(".")[0] in ("service", "trainer")}
    pure = {"service.domain", "service.lifecycle", "service.lines", "service.retries"}
    assert ours <= {*pure, "trainer.spec"}


def test_only_main_knows_the_concrete_backends() -> None:
    users = {path for path, module in _by_file() if module in CONCRETE_BACKENDS}
    # One backend is made of another: the shared cluster beside those of jobs' own.
    assert users == {"main.py", "backends/kuberay.py"}


def test_the_client_of_kubernetes_is_loaded_for_its_backend_only() -> None:
    users = {path for path, module in _by_file() if module.partition(".")[0] == "kubernetes"}
    assert users == {"backends/kuberay_api.py"}
    program = "import service.main, sys; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
