"""`--code`: a folder travels with the job whose spec names a module of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from service.commands import stack
from tests.unit.service.api_samples import job_body, spec_document
from tests.unit.service.fake_service import FakeService, shardloom
from trainer.code_archive import check, id_of


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    model = {"module": "towers:Towers", "tasks": [{"loss": "mse"}]}
    path.write_text(yaml.safe_dump(spec_document(model=model)))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "mine" / "towers.py"
    path.parent.mkdir()
    path.write_text("class Towers: ...\n")
    return str(path.parent)


@pytest.mark.parametrize("command", ["submit", "run"])
def test_the_code_is_uploaded_before_the_job_that_names_it(
    service: FakeService, spec_file: str, folder: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "ensure_running", lambda: None)
    service.looks = [job_body(status="SUCCEEDED", reason="completed", ended_at=1100.0)]
    result = shardloom(command, spec_file, "--code", folder)
    assert result.exit_code == 0, result.output
    (archive,) = service.uploads
    assert check(archive).num_files == 1
    assert service.submitted[0]["model"]["code"] == id_of(archive)
    assert [r.url.path for r in service.requests][:2] == ["/v1/code", "/v1/jobs"]


def test_without_code_nothing_is_uploaded(service: FakeService, spec_file: str) -> None:
    assert shardloom("submit", spec_file).exit_code == 0
    assert service.uploads == []
    assert "code" not in service.submitted[0]["model"]


def test_a_folder_without_code_is_refused_before_anything_is_sent(
    service: FakeService, spec_file: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in (("empty", "no files"), ("missing", "does not exist")):
        result = shardloom("submit", spec_file, "--code", str(tmp_path / folder))
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())
    assert service.requests == []
