"""`import shardloom`: what a user of the SDK has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import shardloom
from service.local.state import StackHome, StackState
from tests.conftest import EXAMPLE_SPEC, REPO
from tests.harness.http_stub import HttpStub, http_stub
from tests.harness.service import job_body


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HttpStub]:
    """Answers every submission with one job, and keeps what was sent."""
    with http_stub(201) as stub:
        stub.body = json.dumps(job_body()).encode()
        monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path))
        monkeypatch.setenv("SHARDLOOM_URL", stub.url)
        yield stub


def test_mapping_typed_spec_and_file_submit_the_same_job(service: HttpStub) -> None:
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    typed = shardloom.JobSpec.model_validate(document)
    for spec in (document, typed, EXAMPLE_SPEC, str(EXAMPLE_SPEC)):
        assert shardloom.submit(spec).id == job_body()["id"]
    bodies = [json.loads(request.body) for request in service.received]
    sent = [shardloom.JobSpec.model_validate(body["spec"]) for body in bodies]
    assert sent[:2] == [typed] * 2
    # The data of a file are where the caller stands.
    data = typed.data.model_copy(update={"path": str(Path.cwd() / typed.data.path)})
    assert sent[2:] == [typed.model_copy(update={"data": data})] * 2


def test_code_and_files_are_taken_by_both_ways_to_submit(service: HttpStub, tmp_path: Path) -> None:
    (tmp_path / "towers.py").write_text("")
    told = job_body() | {"id": "a" * 64, "num_files": 1, "size_bytes": 9}
    service.body = json.dumps(told).encode()
    with shardloom.Client(service.url) as client:
        client.submit(EXAMPLE_SPEC, code=tmp_path)
    shardloom.submit(EXAMPLE_SPEC, code=str(tmp_path))
    upload, first, *_, second = service.received
    assert upload.body.startswith(b"PK")
    assert first.body == second.body
    assert json.loads(first.body)["spec"]["model"]["code"] == "a" * 64


def test_a_submission_without_a_url_goes_to_the_local_stack(
    service: HttpStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDLOOM_URL")
    stack = StackState(url=service.url, boot_id="this", started_at=0.0)
    StackHome().write(stack)
    assert shardloom.submit(EXAMPLE_SPEC).id == job_body()["id"]


def test_the_sdk_needs_nothing_that_windows_lacks() -> None:
    code = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None; import shardloom"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_a_file_with_a_faulty_spec_is_refused_before_anything_is_sent(
    service: HttpStub, tmp_path: Path
) -> None:
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    document["parallelism"]["workers"] = 5
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(shardloom.SpecError, match=r"parallelism\.workers"):
        shardloom.submit(path)
    assert service.received == []
