"""The `shardloom` command against a real service with the scripted backend: up to down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

from service.cli.main import build_app
from service.local.processes import ProcessId, is_alive
from service.local.state import StackHome
from tests.harness.builders import spec_document
from tests.harness.processes import if_killed
from tests.harness.service_process import variables_of_others
from tests.harness.wait import free_port, scaled, wait_for


@dataclass(frozen=True)
class Shell:
    """Runs `shardloom` in a home of its own."""

    home: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        return variables_of_others() | {
            "SHARDLOOM_HOME": str(self.home),
            "SHARDLOOM_PORT": str(self.port),
            "SHARDLOOM_BACKEND": "fake",
        }

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def __call__(self, *arguments: str) -> Result:
        """Run a command to its end; in this process, as one of its own takes seconds to start."""
        environment = {**dict.fromkeys(os.environ, None), **self.environment}
        return CliRunner().invoke(build_app(), list(arguments), env=environment)

    def read(self, *arguments: str) -> str:
        """What a command prints that does well."""
        done = self(*arguments)
        assert (done.exit_code, done.stderr) == (0, ""), done.output
        return done.stdout


def service_of(shell: Shell) -> ProcessId:
    """The process of a stack that has no other."""
    state = StackHome(shell.home).read_state()
    assert state is not None and state.service is not None and state.ray is None
    return state.service


@pytest.fixture(scope="module")
def shardloom(tmp_path_factory):
    """The command, with its stack up."""
    shell = Shell(tmp_path_factory.mktemp("home"), free_port())
    with if_killed([sys.executable, "-m", "service.cli", "down"], shell.environment):
        done = shell("up", "--detach")
        assert done.exit_code == 0, done.stderr
        yield shell
        service = service_of(shell)
        assert "service ended" in shell("down").stdout
        assert not is_alive(service)


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec_document()))
    return str(path)


def wait_until_starting(shardloom: Shell, job: str) -> None:
    def shown() -> bool:
        return json.loads(shardloom.read("show", job, "--json"))["status"] == "STARTING"

    wait_for(shown, f"{job} to start")


def test_a_second_up_says_that_it_is_up_already(shardloom):
    done = shardloom("up")
    assert done.exit_code == 0
    assert "already up" in done.stdout
    assert f"http://127.0.0.1:{shardloom.port}" in done.stdout


def test_only_the_user_of_its_home_may_use_a_service(shardloom):
    url = f"http://127.0.0.1:{shardloom.port}"
    assert httpx.get(f"{url}/v1/jobs").status_code == 401
    page = httpx.get(f"{url}/dashboard/", headers={"Accept": "text/html"})
    assert page.headers["location"].startswith("/login")
    (link,) = re.findall(r"http\S+/login\S+", shardloom.read("status"))
    with httpx.Client(follow_redirects=True) as browser:
        assert browser.get(link).url.path == "/dashboard/"
        assert browser.get(f"{url}/v1/jobs").status_code == 200
    assert httpx.get(link).status_code == 401
    token = shardloom.home / "local-token.json"
    assert token.stat().st_mode & 0o777 == 0o600


def test_status_tells_service_and_cluster(shardloom):
    answer = json.loads(shardloom.read("status", "--json"))
    assert answer["service_alive"] is True
    assert answer["cluster"]["backend"] == "fake"


def assert_ctrl_c_detaches(follower: subprocess.Popen[str], job: str) -> None:
    """Ctrl-C ends what follows a job, which says how to come back."""
    follower.send_signal(signal.SIGINT)
    output, _ = follower.communicate(timeout=scaled(60))
    assert follower.returncode == 4
    assert "the job goes on" in output
    for command in ("follow", "logs -f", "show", "cancel"):
        assert f"shardloom {command} {job}" in output


def test_ctrl_c_detaches_and_the_job_goes_on(shardloom, spec_file):
    with shardloom.start("run", spec_file) as follower:
        assert follower.stdout is not None
        job = follower.stdout.readline().split()[-1]
        wait_until_starting(shardloom, job)
        assert_ctrl_c_detaches(follower, job)
    with shardloom.start("follow", job) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline()
        assert_ctrl_c_detaches(follower, job)
    wait_until_starting(shardloom, job)
    shardloom("cancel", job)


def test_a_service_without_access_control_says_so_and_stops_with_ctrl_c(tmp_path):
    shardloom = Shell(tmp_path / "home", free_port())
    with shardloom.start("up", "--no-auth") as stack:
        assert stack.stdout is not None
        for line in stack.stdout:
            assert "login?code" not in line
            if "Ctrl-C" in line:
                break
        url = f"http://127.0.0.1:{shardloom.port}"
        assert httpx.get(f"{url}/v1/jobs").status_code == 200
        log = (shardloom.home / "logs" / "service.log").read_text()
        assert "whoever is on this machine may use the service" in log
        service = service_of(shardloom)
        assert is_alive(service)
        stack.send_signal(signal.SIGINT)
        stack.communicate(timeout=scaled(60))
    assert stack.returncode == 0
    assert not is_alive(service)
    # Without a stack that is another one's service, where this machine has one at port 8700.
    down, status = shardloom("down"), shardloom("status", "--url", url, "--json")
    assert (down.exit_code, down.stdout) == (0, "nothing was running\n")
    assert (status.exit_code, json.loads(status.stdout)["service_alive"]) == (3, False)
