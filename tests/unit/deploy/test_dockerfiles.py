"""The Dockerfiles: linted, small, without root, and what the manifests run is in them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.conftest import REPO
from tests.unit.deploy.dockerfiles import (
    DOCKERFILES,
    context_files,
    default_of,
    expand,
    instructions_of,
)
from tests.unit.k8s.pods import pods
from tests.unit.k8s.rendering import VERSION, settings_of

SERVICE, TRAINER = (REPO / "deploy" / f"Dockerfile.{name}" for name in ("service", "trainer"))
every_dockerfile = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def _last_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions_of(path)
    begin = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[begin:]


def _environment(path: Path) -> dict[str, str]:
    said = " ".join(value for name, value in _last_stage(path) if name == "ENV")
    return dict(re.findall(r"(\w+)=(\S+)", said))


@every_dockerfile
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_everything_that_is_copied_is_in_the_context() -> None:
    sent = context_files()
    folders = {str(parent) for name in sent for parent in Path(name).parents}
    for path, variant in product(DOCKERFILES, ("cpu", "cuda")):
        for instruction, said in instructions_of(path):
            if instruction == "COPY" and not said.startswith("--from"):
                *sources, _ = expand(said, {"VARIANT": variant}).split()
                missing = [each for each in sources if each not in sent | folders]
                assert missing == [], path.name


def test_the_context_holds_nothing_that_images_do_not_need() -> None:
    sent = {name for name in context_files() if (REPO / name).is_file()}
    allowed = ("service/", "trainer/", "deploy/requirements/", "deploy/wheels/")
    examples = {str(path.relative_to(REPO)) for path in REPO.glob("examples/*.yaml")}
    others = {name for name in sent - examples if not name.startswith(allowed)}
    # The engine itself wants the first; an allowed folder's parents come along as names only.
    assert others <= {".dockerignore", "pyproject.toml", "README.md", "shardloom.py"}
    assert not [
        name for name in sent if re.search(r"\.env|\.git/|__pycache__|\.pyc|secret-key", name)
    ]


def test_nothing_runs_as_root_and_no_instruction_holds_a_secret_or_an_address() -> None:
    for path in DOCKERFILES:
        users = [said for name, said in _last_stage(path) if name == "USER"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]), f"{path.name}: a number"
    for name, said in (each for path in DOCKERFILES for each in instructions_of(path)):
        if name in ("ARG", "ENV"):
            assert not re.search(r"(TOKEN|PASSWORD|SECRET|_KEY)\b", said), said
        assert not re.search(r"https?://(?!127\.0\.0\.1)", said), said


def test_both_images_have_one_exact_base_that_a_digest_can_be_given_for() -> None:
    tag = default_of(SERVICE.name, "PYTHON_TAG")
    assert re.fullmatch(r"\d+\.\d+\.\d+-slim-bookworm", tag)
    assert default_of(TRAINER.name, "PYTHON_TAG") == tag
    for path in (SERVICE, TRAINER):
        base = next(said for name, said in instructions_of(path) if name == "FROM")
        given = {"PYTHON_TAG": tag, "PYTHON_DIGEST": "sha256:00"}
        assert expand(base, given) == f"python:{tag}@sha256:00 AS base"
        assert expand(base, {"PYTHON_TAG": tag}) == f"python:{tag} AS base"


def test_commands_defaults_and_docs_name_the_images_of_this_version() -> None:
    paths = [*(REPO / "deploy").glob("[Dc]o*"), *(REPO / "docs").rglob("*.md")]
    texts = [path.read_text() for path in paths]
    named = [re.findall(r"\b(?:service|trainer):(\d+\.\d+\.\d+)", text) for text in texts]
    assert {version for versions in named for version in versions} == {VERSION}


def test_packages_come_from_locks_with_hashes_only() -> None:
    for name, said in (each for path in DOCKERFILES for each in instructions_of(path)):
        for step in re.split(r"&&|;", said) if name == "RUN" else []:
            if re.search(r"\bpip\b.* install", step):
                is_local = "--no-index" in step and "/wheel/" in step
                is_torch = "/tmp/torch.txt" in step
                assert "--no-deps" in step
                assert is_local or is_torch or "--require-hashes" in step, step


@pytest.mark.parametrize("path", [SERVICE, TRAINER], ids=lambda path: path.name)
def test_a_wheel_of_what_an_image_is_built_from_has_the_specs_that_new_jobs_begin_with(
    path: Path, tmp_path: Path
) -> None:
    for name, said in instructions_of(path):
        if name == "COPY" and not said.startswith(("--from", "deploy/")):
            *sources, target = said.split()
            subprocess.run(["cp", "-r", *sources, tmp_path / target], cwd=REPO, check=True)
    # By way of an sdist, as `make wheel` does.
    build = [sys.executable, "-m", "uv", "build", "--no-build-isolation", "--offline", "--quiet"]
    subprocess.run(build, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("dist/*.whl")
    packed = [Path(each) for each in ZipFile(wheel).namelist() if "/examples/" in each]
    assert {path.parent for path in packed} == {Path("service/dashboard/examples")}
    assert {path.name for path in packed} == {path.name for path in REPO.glob("examples/*.yaml")}


def test_the_service_pod_finds_its_ports_paths_command_and_settings_in_the_image() -> None:
    (container,) = pods("gpu", "service")[0].containers
    said = " ".join(value for _, value in instructions_of(SERVICE))
    command = next(value for name, value in _last_stage(SERVICE) if name == "CMD")
    assert container["command"] == json.loads(command)
    exposed = [value for name, value in _last_stage(SERVICE) if name == "EXPOSE"]
    assert [str(port["containerPort"]) for port in container["ports"]] == exposed
    for mount in container["volumeMounts"]:
        assert mount["mountPath"] == "/tmp" or mount["mountPath"] in said
    settings = settings_of("gpu")
    image = _environment(SERVICE)
    shared = image.keys() & settings.keys()
    assert {"SHARDLOOM_HOME", "SHARDLOOM_RUNS_DIR", "SHARDLOOM_TRAINER_PYTHON"} <= shared
    assert {key: image[key] for key in shared} == {key: settings[key] for key in shared}


def test_the_ray_pods_find_their_paths_and_ports_in_the_image() -> None:
    container = pods("gpu", "ray-head")[0].containers[0]
    said = " ".join(value for _, value in instructions_of(TRAINER))
    for mount in container["volumeMounts"]:
        assert mount["mountPath"] == "/tmp" or mount["mountPath"] in said
    exposed = next(value for name, value in _last_stage(TRAINER) if name == "EXPOSE").split()
    assert {str(port["containerPort"]) for port in container["ports"]} == set(exposed)
    health = next(value for name, value in _last_stage(TRAINER) if name == "HEALTHCHECK")
    probe = container["livenessProbe"]["httpGet"]
    assert f":{probe['port']}{probe['path']}" in health


def test_gpus_are_given_to_containers_that_ask_for_them_alone() -> None:
    # Where NVIDIA's runtime is the default one, an image that names GPUs gets them unasked.
    assert "NVIDIA_DRIVER_CAPABILITIES" in _environment(TRAINER)
    assert "NVIDIA_VISIBLE_DEVICES" not in _environment(TRAINER)


def test_the_cuda_image_has_what_nccl_loads_for_rdma_and_a_compiler_for_triton() -> None:
    # Without libibverbs and the adapters' drivers NCCL takes TCP, and says nothing.
    (step,) = [text for name, text in _last_stage(TRAINER) if "apt-get install" in text]
    assert {"g++", "libibverbs1", "ibverbs-providers", "librdmacm1", "rdma-core"} <= set(
        step.split()
    )
    assert 'if [ "$VARIANT" = cpu ]; then exit 0; fi' in step
