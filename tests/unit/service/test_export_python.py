"""What the Python beside the service lacks for exports is what an export would lack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from service.export_python import missing_for_exports
from service.settings import Settings


def test_packages_are_found_where_an_export_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Python that has no packages of its own.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    settings = Settings(home=tmp_path, trainer_python=str(bare))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert missing_for_exports(settings) == "it has no torch, torchrec, fbgemm_gpu"
    for name in ("torch", "torchrec", "fbgemm_gpu"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert missing_for_exports(settings) == ""
