"""`import shardloom`: what a user of the SDK has, without torch or Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

import shardloom
from tests.conftest import EXAMPLE_SPEC, REPO
from tests.harness.service import job_body


class _Service:
    """Answers every submission with one job, and keeps what was sent."""

    def __init__(self) -> None:
        sent: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                sent.append(json.loads(self.rfile.read(length)))
                body = json.dumps(job_body()).encode()
                self.send_response(201)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.sent = sent
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path))
    service = _Service()
    monkeypatch.setenv("SHARDLOOM_URL", service.url)
    yield service
    service.server.shutdown()
    service.server.server_close()


def test_mapping_typed_spec_and_file_submit_the_same_job(service: _Service) -> None:
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    typed = shardloom.JobSpec.model_validate(document)
    for spec in (document, typed, EXAMPLE_SPEC):
        assert shardloom.submit(spec).id == job_body()["id"]
    sent = [shardloom.JobSpec.model_validate(body["spec"]) for body in service.sent]
    assert sent == [typed, typed, typed]


def test_a_file_with_a_faulty_spec_is_refused_before_anything_is_sent(
    service: _Service, tmp_path: Path
) -> None:
    document = yaml.safe_load(EXAMPLE_SPEC.read_text())
    document["parallelism"]["workers"] = 5
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(shardloom.SpecError, match=r"parallelism\.workers"):
        shardloom.submit(path)
    assert service.sent == []


@pytest.mark.parametrize("path", sorted((REPO / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_typed_spec_survives_json(path: Path) -> None:
    spec = shardloom.load_spec(path.read_text())
    assert shardloom.JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_the_import_loads_neither_torch_nor_ray_nor_the_server() -> None:
    look = "import sys, shardloom; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True, cwd=REPO
    )
    loaded = set(done.stdout.split())
    assert "shardloom" in loaded
    assert loaded.isdisjoint({"torch", "ray", "fastapi", "sqlalchemy", "polars", "nicegui"})
