"""The release: workflows are thin and safe, and what they call pushes what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import helm_python
import pytest
import yaml

from deploy.chart import push
from tests.conftest import REPO
from tests.harness.processes import run_program
from tests.unit.k8s.pods import pods
from tests.unit.k8s.rendering import chart

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
DIGEST = "sha256:" + "a" * 64


def _stub(folder: Path, name: str, script: str) -> str:
    """A program of that name, and the PATH that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}")
    (folder / name).chmod(0o700)
    return f"{folder}:{os.environ['PATH']}"


# ---- workflows


def _steps() -> list[dict[str, Any]]:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    return [step for job in jobs for step in job.get("steps", [])]


def test_every_step_of_a_workflow_is_a_script_of_the_repository() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"].split() for step in _steps() if "run" in step]
    assert {" ".join(each) for each in commands} >= {".ci/run", "make images", "make docs"}
    for program, *arguments in commands:
        if program == "make":
            assert set(arguments) <= targets
        else:
            assert not arguments and os.access(REPO / program, os.X_OK)


def test_a_tag_of_another_version_is_not_released() -> None:
    done = run_program([".ci/run"], GITHUB_REF_TYPE="tag", GITHUB_REF_NAME="v9.9.9")
    assert done.returncode == 1 and "tag v9.9.9, but pyproject.toml has" in done.stderr


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    lines = [line for path in WORKFLOWS for line in path.read_text().splitlines()]
    used = [line.split("uses:")[1].strip() for line in lines if "uses:" in line]
    assert len(used) > 10
    for each in used:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\S+\.yml", each), (
            each
        )


def test_released_images_are_built_on_what_the_repository_pins() -> None:
    (built,) = [step for step in _steps() if step.get("run") == "make images"]
    for name in ("TORCH_INDEX_URL", "TORCH_SHA256", "PYTHON_DIGEST"):
        assert built["env"].get(name) == f"${{{{ vars.{name} }}}}"


def test_zizmor_finds_nothing_that_others_could_misuse() -> None:
    zizmor = Path(sys.executable).with_name("zizmor")
    options = ["--offline", "--no-progress", "--min-severity", "medium"]
    done = run_program([zizmor, *options, ".github"])
    assert done.returncode == 0, done.stdout


# ---- the installation


@pytest.mark.parametrize(("installed", "code"), [("cpu", 0), ("gpu", 1)])
def test_the_stacks_are_not_mixed_in_one_venv(tmp_path: Path, installed: str, code: int) -> None:
    script = tmp_path / "deploy" / "install.sh"
    script.parent.mkdir()
    shutil.copy(REPO / "deploy" / "install.sh", script)
    venv = tmp_path / ".venv"
    venv.mkdir()
    (venv / f".installed-{installed}").touch()
    # In place of Python: what makes .venv, and is in it.
    make = '[ "$2" != venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/python; }'
    _stub(tmp_path, "python", make)
    _stub(venv / "bin", "python", make)
    done = run_program([script, "run", "cpu"], PYTHON=str(tmp_path / "python"))
    assert done.returncode == code, done.stderr
    assert ("STACK=gpu" in done.stderr) == (code == 1)


# ---- the demos


@pytest.mark.parametrize(("said", "ends"), [("Shardloom is already up", False), ("ready", True)])
def test_a_demo_ends_the_stack_that_it_started_and_no_other(
    tmp_path: Path, said: str, ends: bool
) -> None:
    # `status` succeeds: another service may answer at the default port.
    _stub(tmp_path, "shardloom", f'echo "$1" >>"$STUB/calls"\n[ "$1" != up ] || echo "{said}"')
    script = 'source deploy/demo_common.sh; shardloom="$STUB/shardloom"; start_shardloom; exit 3'
    folder = str(tmp_path)
    done = run_program(["bash", "-c", script], STUB=folder, SHARDLOOM_HOME=folder)
    assert done.returncode == 3, done.stderr
    assert ("down" in (tmp_path / "calls").read_text().split()) == ends


# ---- images


_DOCKER = r"""
echo "$@" >>"$STUB/calls"
case "$1 $2 $3" in
*"login"*) cat >"$STUB/password" ;;
"buildx inspect"*) exit 1 ;;
"buildx imagetools inspect") echo '{"spdxVersion": "SPDX-2.3"}' ;;
"buildx build"*)
    while [ "$1" != --metadata-file ]; do shift; done
    echo '{"containerimage.digest": "@DIGEST@"}' >"$2" ;;
esac
"""


def test_images_are_pushed_with_provenance_and_the_sbom_of_what_was_built(tmp_path: Path) -> None:
    path = _stub(tmp_path / "bin", "docker", _DOCKER.replace("@DIGEST@", DIGEST))
    done = run_program(
        ["deploy/build_images.sh"],
        PATH=path,
        STUB=str(tmp_path),
        IMAGES="service trainer-cuda",
        PUSH="1",
        REPOSITORY="registry.example/shardloom",
        REGISTRY_USER="robot",
        REGISTRY_PASSWORD="hunter2",
        DIST=str(tmp_path),
        GITHUB_OUTPUT=str(tmp_path / "output"),
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    builds = re.findall(r"^buildx build .*$", calls, re.MULTILINE)
    for words in ("--push", "--provenance mode=max", "--sbom true"):
        assert all(words in build for build in builds)
    named = {pod.containers[0]["image"] for pod in pods("gpu") if pod.component != "redis"}
    assert {re.findall(r"--tag (\S+)", build)[0] for build in builds} == named, "as the chart does"
    name = "registry.example/shardloom/service"
    assert f"imagetools inspect {name}@{DIGEST}" in calls, "of what was pushed, not of the locks"
    assert (tmp_path / "output").read_text().startswith(f"name={name}\ndigest={DIGEST}\n")
    assert json.loads((tmp_path / "service.spdx.json").read_text())["spdxVersion"] == "SPDX-2.3"
    assert (tmp_path / "password").read_text() == "hunter2"
    assert "hunter2" not in calls + done.stdout + done.stderr


@pytest.mark.parametrize(
    ("engine", "repository", "said"),
    [
        ("docker", "localhost/shardloom", "set REPOSITORY to a registry and folder of yours"),
        ("buildah", "registry.example/ads", "buildah attests neither provenance nor SBOM"),
    ],
)
def test_images_are_pushed_nowhere_by_default_and_never_without_attestations(
    engine: str, repository: str, said: str, tmp_path: Path
) -> None:
    path = _stub(tmp_path, engine, "exit 0")
    settings = {"ENGINE": engine, "REPOSITORY": repository, "PATH": path}
    done = run_program(["deploy/build_images.sh"], PUSH="1", **settings)
    assert done.returncode == 1 and said in done.stderr


# ---- chart


def test_the_chart_is_pushed_to_an_oci_registry_with_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = helm_python.package(chart(), destination=tmp_path)
    with tarfile.open(package) as packed:
        assert "shardloom/files/rules.yaml" in packed.getnames()
    registry = create_autospec(helm_python.RegistryClient)
    monkeypatch.setattr(helm_python, "RegistryClient", registry)
    client = registry.return_value.__enter__.return_value
    client.push.return_value = {"output": "Pushed"}
    repository = "oci://registry.example/charts"
    user = {"REGISTRY_USER": "robot", "REGISTRY_PASSWORD": "hunter2"}
    assert push(package, {"CHART_REPOSITORY": repository, **user}) == "Pushed"
    client.login.assert_called_once_with("registry.example", "robot", "hunter2")
    client.push.assert_called_once_with(package, repository)
    with pytest.raises(SystemExit, match="CHART_REPOSITORY=: set the registry and folder"):
        push(package, {})
