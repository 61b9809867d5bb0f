"""What `kubectl apply -k` would send: our kustomizations, built by kustomize itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "k8s"
# What people apply: each a folder of ours, and components that are added to it.
VARIANTS = {
    "base": ("base",),
    "dev": ("overlays/dev",),
    "gpu": ("overlays/gpu",),
    "spot": ("overlays/spot",),
    "multi-rack": ("overlays/multi-rack",),
    "gpu+kueue": ("overlays/gpu", "components/kueue"),
    "spot+kueue": ("overlays/spot", "components/kueue"),
    "gpu+own-clusters": ("overlays/gpu", "components/own-clusters"),
    "spot+volcano": ("overlays/spot", "components/volcano"),
}
GPU_VARIANTS = tuple(name for name in VARIANTS if name != "dev")
# The variant that has all of ours beside queues of the platform.
FULL = "gpu+own-clusters"
# Those that `make test` builds; together they have nearly all that the others have.
_FIRST = ("dev", FULL, "spot+kueue")
_MARKED = [
    pytest.param(name, marks=() if name in _FIRST else pytest.mark.slow) for name in VARIANTS
]

every_variant = pytest.mark.parametrize("variant", _MARKED)
every_gpu_variant = pytest.mark.parametrize(
    "variant", [each for each in _MARKED if each.values != ("dev",)]
)


@cache
def build(variant: str) -> tuple[Manifest, ...]:
    """Every object of a variant; skips the test where there is no kustomize."""
    folder, *components = VARIANTS[variant]
    if not components:
        return build_folder(FOLDER / folder)
    with tempfile.TemporaryDirectory() as made:
        # As a user's own overlay would name them: kustomize wants relative paths.
        def relative(path: str) -> str:
            return os.path.relpath(FOLDER / path, Path(made).resolve())

        text = yaml.safe_dump(
            {"resources": [relative(folder)], "components": [relative(each) for each in components]}
        )
        (Path(made) / "kustomization.yaml").write_text(text)
        return build_folder(Path(made))


@cache
def build_folder(folder: Path) -> tuple[Manifest, ...]:
    """Every object of a kustomization; skips the test where there is no kustomize."""
    done = subprocess.run([*_command(), str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns: " + done.stderr
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(yaml.load_all(done.stdout, loader))


def _command() -> list[str]:
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    pytest.skip("needs kubectl or kustomize on PATH to build the manifests")


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    """The objects of one kind."""
    return [each for each in manifests if each["kind"] == kind]


def one(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The object of that kind and name."""
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name]
    return found


def ray_cluster(variant: str) -> Manifest:
    """The RayCluster of a variant."""
    return one(build(variant), "RayCluster", "shardloom-ray")


def settings_of(variant: str) -> dict[str, str]:
    """The ConfigMap with the settings of the service."""
    maps = of_kind(build(variant), "ConfigMap")
    (found,) = [each for each in maps if each["metadata"]["name"].startswith("shardloom-settings")]
    return dict(found["data"])
