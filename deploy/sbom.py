"""Writes what the images hold as CycloneDX, from their locks: `make sbom`.

`deploy/sbom/NAME.cdx.json` goes into the image that is made from the locks in `IMAGES`; `make
images` writes them before it builds, and git ignores them. A file depends on its locks and
Dockerfile only, so that two builds of one commit agree: no time of making, and a serial number that
is a digest of the content. Of what lies below Python's packages
(Debian's, in the base image) the base's own bill of materials tells.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.lock import FOLDER as LOCKS
from deploy.lock import REPO

FOLDER = REPO / "deploy" / "sbom"
# By image: the locks under `deploy/requirements` that it is made from.
IMAGES: Mapping[str, tuple[str, ...]] = {
    "service": ("service",),
    "service-export": ("trainer-cpu", "service"),
    "trainer-cpu": ("trainer-cpu",),
    "trainer-cuda": ("trainer-cuda",),
}
_NAMESPACE = uuid.UUID("6f1f0f3e-7d0c-4f5d-9a54-3b1c1f6f5c11")


@dataclass(frozen=True)
class Pin:
    """One locked package, with the SHA-256 of each of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]


def pins_of(lock: Path) -> list[Pin]:
    """What a lock names; raises `ValueError` for a line that is no exact version with hashes."""
    text = re.sub(r"\\\n", " ", lock.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [_pin(line) for line in lines]


def _pin(line: str) -> Pin:
    stated, *hashes = line.split("--hash=sha256:")
    requirement = Requirement(stated.strip())
    specifiers = list(requirement.specifier)
    if len(specifiers) != 1 or specifiers[0].operator != "==" or not hashes:
        raise ValueError(f"a lock wants NAME==VERSION --hash=sha256:..., not {line[:100]!r}")
    digests = tuple(each.strip() for each in hashes)
    return Pin(canonicalize_name(requirement.name), specifiers[0].version, digests)


def packages_of(image: str) -> list[Pin]:
    """Everything that an image has of its locks, and torch's CPU build, which is in none."""
    locks = IMAGES[image]
    pins = {pin.name: pin for lock in locks for pin in pins_of(LOCKS / f"{lock}.txt")}
    if "trainer-cpu" in locks:
        version = default_of("Dockerfile.trainer", "TORCH_VERSION")
        pins["torch"] = Pin("torch", version, ())
    return list(pins.values())


def bill_of(image: str) -> str:
    """The bill of materials of an image, as JSON."""
    pins = packages_of(image)
    bom = Bom(version=1)
    ours = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    bom.metadata.component = Component(
        name=f"shardloom-{image}",
        version=ours["version"],
        type=ComponentType.CONTAINER,
        bom_ref=f"shardloom-{image}",
    )
    dockerfile = "Dockerfile.service" if image == "service" else "Dockerfile.trainer"
    tag = default_of(dockerfile, "PYTHON_TAG")
    bom.metadata.properties.add(Property(name="shardloom:base", value=f"python:{tag}"))
    parts = [_component(pin) for pin in sorted(pins, key=lambda pin: pin.name)]
    bom.components.update(parts)
    bom.register_dependency(bom.metadata.component, parts)
    content = " ".join(f"{pin.name}=={pin.version}" for pin in pins)
    bom.serial_number = uuid.uuid5(_NAMESPACE, f"{image} {tag} {content}")
    bill = json.loads(JsonV1Dot6(bom).output_as_string())
    del bill["metadata"]["timestamp"]
    return json.dumps(bill, indent=1, sort_keys=True) + "\n"


def _component(pin: Pin) -> Component:
    purl = PackageURL("pypi", name=pin.name, version=pin.version)
    return Component(
        name=pin.name,
        version=pin.version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in pin.hashes]
        # Of several files an image has one; which one, pip decides.
        if len(pin.hashes) == 1
        else [],
    )


def default_of(dockerfile: str, name: str) -> str:
    """The value that a Dockerfile gives an ARG; raises `ValueError` if it gives none."""
    text = (REPO / "deploy" / dockerfile).read_text()
    found = re.search(rf"^ARG {name}=(\S+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{dockerfile} gives no default for {name}")
    return found[1]


def write_bills(folder: Path) -> list[Path]:
    """Write the bills of all images into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for image in IMAGES:
        path = folder / f"{image}.cdx.json"
        path.write_text(bill_of(image))
        paths.append(path)
    return paths


def main() -> None:
    """Write all of them where the Dockerfiles take them from."""
    for path in write_bills(FOLDER):
        print(path.relative_to(REPO))


if __name__ == "__main__":
    main()
