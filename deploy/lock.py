"""Writes the locked requirements of the images: `make lock`, or `python -m deploy.lock --upgrade`.

Each lock under `deploy/requirements/` names everything that an image installs, by exact version and
with the hashes of its files, so that `pip install --require-hashes --no-deps` can resolve nothing
anew. They are resolved from the extras of `pyproject.toml` by uv, for CPython 3.11 on Linux x86-64.
Versions that still fit stay as they are without `--upgrade`.

`torch-VARIANT` has the gigabytes of `trainer-VARIANT`, for a layer of their own. torch's CPU build
is in no lock: it is published beside PyPI under hashes of its own, and `Dockerfile.trainer` has a
step for it. What it needs is locked. torchrec says that it needs the CUDA build of fbgemm even
where the CPU one is there: that is overruled here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
FOLDER = REPO / "deploy" / "requirements"
# What torch's CUDA build brings along; `Lock.without` keeps these out of a CPU image.
CUDA_PACKAGES = (
    "cuda-bindings",
    "cuda-toolkit",
    "fbgemm-gpu",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "triton",
)
# The oldest driver of NVIDIA that runs programs of a major version of CUDA (docs.nvidia.com/deploy/
# cuda-compatibility: minor version compatibility).
_OLDEST_DRIVER = {12: 525, 13: 580}
_HEADER = "# Written by `make lock` (deploy/lock.py) from pyproject.toml; not to be edited.\n"


@dataclass(frozen=True)
class Lock:
    """One file of locked requirements.

    `extras` of Shardloom and `more` requirements are resolved together, at the versions that the
    locks `beside` have, without the packages `without`; `elsewhere` are installed in another way.
    """

    name: str
    extras: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return FOLDER / f"{self.name}.txt"


# What drivers send metrics and spans with: who runs jobs cannot install it in an image.
_TRAINER = ("sinks", "tracing")
LOCKS = (
    # What builds our own wheel, in a stage that is thrown away.
    Lock("build", more=("setuptools>=77",)),
    Lock("service", extras=("service",)),
    # The service's image with exports has the locks `service` and `trainer-cpu` side by side.
    Lock(
        "trainer-cpu",
        extras=("trainer-cpu", *_TRAINER),
        more=("torchrec==1.8.0",),
        beside=("service",),
        without=CUDA_PACKAGES,
        elsewhere=("torch",),
    ),
    Lock(
        "torch-cpu",
        more=("torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"),
        beside=("trainer-cpu",),
        without=CUDA_PACKAGES,
        elsewhere=("torch",),
    ),
    Lock("torch-cuda", more=("torch==2.13.0", "fbgemm-gpu==1.8.0"), beside=("trainer-cpu",)),
    Lock("trainer-cuda", extras=("trainer-gpu", *_TRAINER), beside=("trainer-cpu", "torch-cuda")),
)


def write_lock(lock: Lock, *, upgrade: bool) -> None:
    """Resolve a lock anew and write it; raises `CalledProcessError` where uv finds no solution."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        (inputs / "more.in").write_text("".join(f"{each}\n" for each in lock.more))
        (inputs / "overrides.in").write_text(
            "".join(f"{name} ; sys_platform == 'never'\n" for name in lock.without)
        )
        subprocess.run(_command(lock, inputs, upgrade=upgrade), cwd=REPO, check=True)
    text = lock.path.read_text()
    lock.path.write_text(header_of(text) + text)


def header_of(lock: str) -> str:
    """The first lines of a lock: who wrote it and, where it has CUDA, on which driver it runs."""
    found = re.search(r"^cuda-toolkit==((\d+)\.\d+)", lock, re.MULTILINE)
    if found is None:
        return _HEADER
    oldest = _OLDEST_DRIVER[int(found[2])]
    return f"{_HEADER}# CUDA {found[1]}: NVIDIA driver {oldest} or later on the machines.\n"


def _command(lock: Lock, inputs: Path, *, upgrade: bool) -> list[str]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    # No line may name where a package came from, or this machine's folders.
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
    command += ["--only-binary", ":all:", "--overrides", str(inputs / "overrides.in")]
    # Versions that the file has already are kept, unless they are to be new.
    command += ["--output-file", str(lock.path), *(["--upgrade"] if upgrade else [])]
    for name in lock.beside:
        command += ["--constraints", str(FOLDER / f"{name}.txt")]
    for name in lock.elsewhere:
        command += ["--no-emit-package", name]
    for extra in lock.extras:
        command += ["--extra", extra]
    return [*command, *(["pyproject.toml"] if lock.extras else []), str(inputs / "more.in")]


def main() -> None:
    """Write all locks, in the order in which they build on each other."""
    parser = argparse.ArgumentParser(description="Write the locked requirements of the images.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade
    for lock in LOCKS:
        write_lock(lock, upgrade=upgrade)
        print(f"{lock.path.relative_to(REPO)}: {lock.path.read_text().count('==')} packages")


if __name__ == "__main__":
    main()
