"""The locked requirements: complete, exact, with hashes, and what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.lock import FOLDER, LOCKS, Lock, header_of
from tests.conftest import REPO
from tests.unit.deploy.dockerfiles import default_of, locked_versions

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
# What images run on, as environment markers say it.
IMAGE = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.14",
    "python_version": "3.11",
    "sys_platform": "linux",
}


def _asked(extra: str | None) -> Iterator[Requirement]:
    """What an extra of ours asks for, those that it names included; None: what all need."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for named in requirement.extras:
                yield from _asked(named)
        else:
            yield requirement


def _applies(requirement: Requirement, extras: frozenset[str] = frozenset()) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**IMAGE, "extra": each}) for each in ("", *extras))


every_lock = pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)


@every_lock
def test_a_lock_has_exact_lines_with_hashes_and_all_that_pyproject_asks_for(lock: Lock) -> None:
    text, versions = lock.path.read_text(), locked_versions(lock.path)
    assert versions
    for line in text.splitlines():
        assert re.fullmatch(
            r"#.*|[a-z0-9-]+==[\w.+!]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line
        ), line
    assert not re.search(r"://|file:|@ |index", text)
    asked = [Requirement(each) for each in lock.more]
    for extra in lock.extras:
        asked += [*_asked(None), *_asked(extra)]
    assert asked
    for requirement in filter(_applies, asked):
        name = canonicalize_name(requirement.name)
        if name not in lock.elsewhere:
            assert requirement.specifier.contains(versions[name]), str(requirement)


def test_locks_lack_nothing_that_their_packages_need() -> None:
    """As far as the packages are here in the locked version: images resolve nothing anew."""
    for lock in LOCKS:
        versions, num_checked = locked_versions(lock.path), 0
        for name, version in versions.items():
            try:
                found = distribution(name)
            except PackageNotFoundError:
                continue
            if found.version != version:
                continue
            num_checked += 1
            for needed in filter(_applies, map(Requirement, found.requires or ())):
                key = canonicalize_name(needed.name)
                if key not in (*lock.elsewhere, *lock.without):
                    assert key in versions, f"{lock.name}: {name} needs {needed}"
                    assert needed.specifier.contains(versions[key], prereleases=True), str(needed)
        # Here are the newest versions, which leave those of a lock behind one by one.
        assert num_checked > 0 or not lock.extras, lock.name


def test_locks_that_lie_in_one_image_agree() -> None:
    for lock in LOCKS:
        ours = locked_versions(lock.path)
        for name in lock.beside:
            theirs = locked_versions(FOLDER / f"{name}.txt")
            shared = ours.keys() & theirs.keys()
            assert shared
            assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert {path.stem for path in FOLDER.glob("*")} == {lock.name for lock in LOCKS}
    for variant in ("cpu", "cuda"):
        # A layer of its own, which holds nothing but what the trainer has.
        layer, whole = (
            set((FOLDER / f"{name}-{variant}.txt").read_text().splitlines())
            for name in ("torch", "trainer")
        )
        assert layer < whole


def test_the_cpu_stack_has_nothing_of_cuda() -> None:
    names = locked_versions(FOLDER / "trainer-cpu.txt")
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert "fbgemm-gpu-cpu" in names and "fbgemm-gpu" not in names


def test_a_lock_with_cuda_states_its_version_and_the_driver_that_it_needs() -> None:
    for lock in LOCKS:
        text = lock.path.read_text()
        assert text.startswith(header_of(text))
        assert ("driver 580 or later" in text) == lock.name.endswith("-cuda"), lock.name


def test_torch_is_one_version_everywhere() -> None:
    wanted = {str(each) for extra in ("trainer-cpu", "trainer-gpu") for each in _asked(extra)
              if each.name == "torch"}  # fmt: skip
    (version,) = {each.removeprefix("torch==") for each in wanted}
    assert default_of("Dockerfile.trainer", "TORCH_VERSION") == f"{version}+cpu"
    assert locked_versions(FOLDER / "torch-cuda.txt")["torch"] == version
