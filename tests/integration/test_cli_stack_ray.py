"""The local stack with a real Ray: its Jobs API wants the token, and `down` leaves nobody."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import httpx
import pytest

from service.local import LocalStack
from service.local_process import ProcessId, family, is_alive, process_table
from service.local_state import StackHome, StackState
from tests.integration.ports import free_port

# Answers /healthz, so that this test is about Ray alone.
SERVICE_STAND_IN = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["SHARDLOOM_PORT"])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """A running stack; the first start costs seconds, so the tests share it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SHARDLOOM_")}
    command = [sys.executable, "-c", SERVICE_STAND_IN]
    stack = LocalStack(StackHome(tmp_path_factory.mktemp("stack")), kept, command)
    stack.up(port=free_port(), report=lambda line: None)
    yield stack
    stack.down(lambda line: None)
    # Ray's folder lies outside the test's own: it has to have a short path.
    shutil.rmtree(stack.home.ray_dir)


def everybody(state: StackState) -> set[ProcessId]:
    table = process_table()
    return family(state.ray, table) | family(state.service, table)


def processes_that_mention(text: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if text in _command(path)]


def _command(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_for(what, timeout_s: float = 60.0):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
    return found


def test_a_service_that_died_is_started_again_beside_the_ray_that_lives(stack):
    first = stack.running()
    os.kill(first.service.pid, 9)
    wait_for(lambda: not is_alive(first.service))
    assert stack.running() is None

    second = stack.up(report=lambda line: None)
    assert second.ray == first.ray
    assert second.url == first.url
    assert second.service != first.service


def test_ray_answers_with_its_token_only_and_down_leaves_nobody(stack):
    state = stack.up(report=lambda line: None)
    jobs_url = f"{state.ray_address}/api/jobs/"
    header = {"Authorization": f"Bearer {stack.home.token()}"}
    # Ray runs a job's entry point in a session of its own, out of reach of a process group.
    marker = f"import time; time.sleep(600)  # {stack.home.root}"
    with httpx.Client(trust_env=False, timeout=30.0) as http:
        assert http.get(jobs_url).status_code in (401, 403)
        assert http.get(jobs_url, headers=header).json() == []
        job = {"entrypoint": f'{sys.executable} -c "{marker}"'}
        http.post(jobs_url, headers=header, json=job).raise_for_status()
    wait_for(lambda: processes_that_mention(marker))
    members = everybody(state)

    milestones: list[str] = []
    assert stack.down(milestones.append) is True
    assert [line.split()[0] for line in milestones] == ["service", "ray"]
    assert [member for member in members if is_alive(member)] == []
    assert processes_that_mention(marker) == []
    assert stack.running() is None
