"""The service's image, made by its Dockerfile's own steps where no engine is, and run from it.

What an engine would add is not covered: pulling the base image (this machine's Python stands for
it) and putting the layers together. The trainer's image is gigabytes: `tests/unit/deploy` holds its
Dockerfile and locks against pyproject.toml and the manifests; deploy/images.md says how both were
built with an engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from deploy.lock import FOLDER as LOCKS
from deploy.sbom import pins_of
from tests.conftest import REPO
from tests.integration.dockerfile_tree import DockerfileTree, why_not
from tests.integration.ports import free_port
from tests.integration.postgresql import PostgresqlServer

_USER = "1000:1000"
_START_TIMEOUT_S = 60
_VOLUMES = ("/tmp", "/var/lib/shardloom/home", "/var/lib/shardloom/runs")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerfileTree]:
    """The file tree of shardloom/service, read-only but for its volumes."""
    if reason := why_not():
        pytest.skip(f"the image's tree cannot be made here: {reason}")
    folder = tmp_path_factory.mktemp("service-image")
    with DockerfileTree(REPO / "deploy" / "Dockerfile.service", REPO, folder) as made:
        made.build()
        for path in _VOLUMES:
            made.mount_writable(path)
        yield made


@pytest.fixture(scope="module")
def settings(tree: DockerfileTree, postgresql: PostgresqlServer) -> dict[str, str]:
    """The environment of a container: the image's, and what compose.yaml would say."""
    url = make_url(postgresql.empty_database())
    folder = str(url.query["host"])
    tree.bind_file(Path(folder) / ".s.PGSQL.5432", "/tmp/postgresql/.s.PGSQL.5432")
    url = url.update_query_dict({"host": "/tmp/postgresql"})
    return {
        **tree.image.env,
        "SHARDLOOM_HOST": "127.0.0.1",
        "SHARDLOOM_AUTH": "required",
        "SHARDLOOM_BACKEND": "fake",
        "SHARDLOOM_PORT": str(free_port()),
        "SHARDLOOM_DATABASE_URL": url.render_as_string(hide_password=False),
        "SHARDLOOM_SHUTDOWN_TIMEOUT_S": "5",
    }


def _run(
    tree: DockerfileTree, settings: Mapping[str, str], *command: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        tree.command(command, user=_USER, environment=settings),
        capture_output=True,
        text=True,
        timeout=_START_TIMEOUT_S,
        check=False,
    )


@contextmanager
def _container(
    tree: DockerfileTree, settings: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The image's own command as process 1 of a process namespace; yields what waits for it."""
    alone = ["unshare", "--pid", "--fork", "--kill-child=KILL"]
    command = tree.command(tree.image.command, user=_USER, environment=settings, prefix=alone)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(_first_process(process), signal.SIGKILL)
        process.wait()


def _first_process(container: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children")
    return int(children.read_text().split()[0])


def _wait_until_healthy(url: str, container: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert container.poll() is None, "the service ended"
        try:
            if httpx.get(f"{url}/healthz", trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the service was not healthy in time")


def test_the_service_runs_from_its_image_on_postgresql(
    tree: DockerfileTree, settings: dict[str, str]
) -> None:
    behind = _run(tree, settings, "shardloom", "migrate", "--check")
    assert behind.returncode == 1, behind.stderr
    assert _run(tree, settings, *tree.image.healthcheck).returncode == 1

    migrated = _run(tree, settings, "shardloom", "migrate")
    assert migrated.returncode == 0, migrated.stderr
    assert migrated.stdout.startswith("migrated the database from nothing to ")
    made = _run(tree, settings, "shardloom", "keys", "create", "first", "--admin")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()

    url = f"http://127.0.0.1:{settings['SHARDLOOM_PORT']}"
    with _container(tree, settings) as container:
        _wait_until_healthy(url, container)
        assert _run(tree, settings, *tree.image.healthcheck).returncode == 0
        assert '"postgresql"' in httpx.get(f"{url}/readyz", trust_env=False).text
        assert httpx.get(f"{url}/v1/jobs", trust_env=False).status_code == 401
        client = {**settings, "SHARDLOOM_URL": url, "SHARDLOOM_API_KEY": key}
        listed = _run(tree, client, "shardloom", "ps", "--all", "--json")
        assert listed.returncode == 0, listed.stderr
        assert json.loads(listed.stdout) == []

        first = _first_process(container)
        status = Path(f"/proc/{first}/status").read_text()
        assert "Uid:\t1000\t1000\t1000\t1000" in status
        assert "NSpid:\t" in status and status.split("NSpid:")[1].split()[1] == "1"
        os.kill(first, signal.Signals[tree.image.stop_signal])
        assert container.wait(timeout=30) == 0


def test_the_image_says_by_itself_that_it_makes_no_exports(tree: DockerfileTree) -> None:
    script = (
        "from service.export_python import missing_for_exports as m;"
        "from service.settings import Settings; print(m(Settings()))"
    )
    done = _run(tree, tree.image.env, "python", "-c", script)
    assert done.stdout.strip() == "it has no torch, torchrec, fbgemm_gpu", done.stderr


def test_the_image_has_what_its_lock_names_and_nothing_else(tree: DockerfileTree) -> None:
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['name']: d.version for d in m.distributions()}))"
    )
    done = _run(tree, tree.image.env, "python", "-c", script)
    assert done.returncode == 0, done.stderr
    found = {
        name.lower().replace("_", "-").replace(".", "-"): version
        for name, version in json.loads(done.stdout).items()
    }
    locked = {pin.name: pin.version for pin in pins_of(LOCKS / "service.txt")}
    assert found.pop("shardloom")
    assert found == locked


def test_nothing_of_the_image_can_be_changed_by_who_runs_it(tree: DockerfileTree) -> None:
    found = _run(tree, tree.image.env, "find", "/opt/shardloom", "-writable", "-not", "-type", "l")
    assert found.stdout == ""
    for path in ("/opt/shardloom", "/etc", "/var/lib/shardloom"):
        assert _run(tree, tree.image.env, "touch", f"{path}/x").returncode != 0
    for path in _VOLUMES:
        assert _run(tree, tree.image.env, "touch", f"{path}/x").returncode == 0


def test_its_bill_of_materials_is_where_the_label_says(tree: DockerfileTree) -> None:
    path = tree.image.labels["io.shardloom.sbom"]
    done = _run(tree, tree.image.env, "cat", path)
    assert done.stdout == (REPO / "deploy" / "sbom" / "service.cdx.json").read_text()
