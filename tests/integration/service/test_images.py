"""What an image installs, in an empty environment: our wheel and the lock of the service.

It is run by another user than the one that installed it, on PostgreSQL, by the commands that
Dockerfile.service states. Where a container engine works, the image itself is built and run too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.lock import FOLDER as LOCKS
from tests.conftest import REPO
from tests.harness.databases import PostgresqlServer
from tests.harness.wait import free_port, scaled, wait_for
from tests.unit.deploy.dockerfiles import context_files, instructions_of, locked_versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOCKED_PYTHON = "3.11"
_TIMEOUT_S = 120
# Root becomes a user who can reach the socket of the tests' PostgreSQL, and who may read all files
# (this Python may be in root's home) but write only to its own.
_SETPRIV = shutil.which("setpriv")
_USER = "pgserver" if os.geteuid() == 0 and _SETPRIV else None
_AS_USER = [
    *(str(_SETPRIV), f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--"),
]
_DOCKERFILE = dict(instructions_of(REPO / "deploy" / "Dockerfile.service"))  # the last of each kind
COMMAND = json.loads(_DOCKERFILE["CMD"])
HEALTHCHECK = json.loads(_DOCKERFILE["HEALTHCHECK"].partition("CMD ")[2])


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the service, and a folder that its user may write to."""

    python: Path
    home: Path

    def start(self, command: list[str], settings: Mapping[str, str]) -> subprocess.Popen[str]:
        """Run a command as `_USER`, by nothing but the environment's own programs."""
        program = self.python.with_name(command[0])
        variables = {"PATH": str(self.python.parent), "HOME": str(self.home), **settings}
        return subprocess.Popen(
            [*(_AS_USER if _USER else ()), str(program), *command[1:]],
            cwd=self.home,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, **settings: str) -> tuple[int, str]:
        """Exit code and output of a command."""
        process = self.start(list(command), settings)
        output, _ = process.communicate(timeout=scaled(_TIMEOUT_S))
        return process.returncode, output


def _pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(postgresql: PostgresqlServer) -> Iterator[Environment]:
    """The wheel and the locked packages, installed by the steps of the Dockerfile."""
    if sys.version_info[:2] != tuple(map(int, LOCKED_PYTHON.split("."))):
        pytest.skip(f"the locks are for Python {LOCKED_PYTHON}")
    with tempfile.TemporaryDirectory(prefix="shardloom-image-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        context, home = folder / "context", folder / "home"
        for name in context_files():
            if (REPO / name).is_file():
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPO / name, context / name)
        _pip(
            *("wheel", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--wheel-dir", str(folder), "."),
            cwd=context,
        )
        base = [sys.executable, "-m", "venv", "--without-pip", str(folder / "env")]
        subprocess.run(base, check=True, capture_output=True)
        python = folder / "env" / "bin" / "python"
        into = ("--python", str(python), "install", "--no-deps")
        lock = str(LOCKS / "service.txt")
        _pip(*into, "--require-hashes", "--only-binary", ":all:", "-r", lock, cwd=folder)
        _pip(*into, "--no-index", str(next(folder.glob("*.whl"))), cwd=folder)
        home.mkdir()
        if _USER:
            shutil.chown(home, _USER)
        yield Environment(python, home)


def test_the_service_runs_from_wheel_and_lock_on_postgresql(
    installed: Environment, postgresql: PostgresqlServer
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {
        "SHARDLOOM_HOME": str(installed.home / "shardloom"),
        "SHARDLOOM_RUNS_DIR": str(installed.home / "runs"),
        "SHARDLOOM_HOST": "127.0.0.1",
        "SHARDLOOM_PORT": str(port),
        "SHARDLOOM_AUTH": "required",
        "SHARDLOOM_BACKEND": "fake",
        "SHARDLOOM_DATABASE_URL": postgresql.empty_database(),
    }
    code, said = installed.run("shardloom", "migrate", **settings)
    assert code == 0 and said.startswith("migrated the database from nothing to "), said
    code, key = installed.run("shardloom", "keys", "create", "first", "--admin", **settings)
    assert code == 0, key
    assert installed.run(*HEALTHCHECK, **settings)[0] == 1

    service = installed.start(COMMAND, settings)
    try:

        def is_healthy() -> bool:
            assert service.poll() is None, "the service ended"
            return installed.run(*HEALTHCHECK, **settings)[0] == 0

        wait_for(is_healthy, "the service", 60)
        known = {"Authorization": f"Bearer {key.split()[0]}"}
        assert '"postgresql"' in httpx.get(f"{url}/readyz", headers=known, trust_env=False).text
        assert httpx.get(f"{url}/v1/jobs", trust_env=False).status_code == 401
        client = {**settings, "SHARDLOOM_URL": url, "SHARDLOOM_API_KEY": key.split()[0]}
        code, listed = installed.run("shardloom", "ps", "--all", "--json", **client)
        assert (code, json.loads(listed)) == (0, [])
        stop = signal.Signals[_DOCKERFILE["STOPSIGNAL"]]
        service.send_signal(stop)
        # uvicorn raises the signal anew once all is shut down; process 1 of a container outlives it
        assert service.wait(timeout=scaled(_TIMEOUT_S)) in (0, -stop)
    finally:
        service.kill()
        service.communicate()


def test_the_lock_is_all_there_is_and_makes_no_exports(installed: Environment) -> None:
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['name']: d.version for d in m.distributions()}))"
    )
    code, said = installed.run("python", "-c", script)
    assert code == 0, said
    found = {re.sub(r"[-_.]+", "-", name).lower(): v for name, v in json.loads(said).items()}
    assert found.pop("shardloom")
    assert found == locked_versions(LOCKS / "service.txt")
    code, said = installed.run("python", "-m", "trainer.export", "--request", "/nowhere")
    assert code != 0 and "No module named 'torch'" in said
    if _USER:
        script = "import os, sys; print(os.getuid() == 0, os.access(sys.prefix, os.W_OK))"
        assert installed.run("python", "-c", script) == (0, "False False\n")


def _engine() -> str:
    for name in ("docker", "podman"):
        found = shutil.which(name)
        if found and subprocess.run([found, "info"], capture_output=True).returncode == 0:
            return found
    pytest.skip("neither docker nor podman works here")


def test_the_image_is_built_and_runs_as_nobody() -> None:
    engine, name = _engine(), f"shardloom-test-{os.getpid()}"
    variables = {**os.environ, "IMAGES": "service", "ENGINE": engine, "REPOSITORY": name}
    variables["PYTHON"] = sys.executable
    subprocess.run([REPO / "deploy" / "build_images.sh"], env=variables, check=True)
    listed = [engine, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", f"{name}/service"]
    (image,) = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    try:
        command = [engine, "run", "--rm", "--read-only", "--tmpfs", "/tmp", image]
        script = "import os, service.app; print(os.getuid(), os.access('/opt/shardloom', os.W_OK))"
        done = subprocess.run([*command, "python", "-c", script], capture_output=True, text=True)
        assert done.stdout.split() == ["1000", "False"], done.stderr
    finally:
        subprocess.run([engine, "image", "rm", image], check=False)
