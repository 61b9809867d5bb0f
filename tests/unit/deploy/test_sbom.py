"""Bills of materials: valid CycloneDX, and what the locks name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.lock import FOLDER as LOCKS
from deploy.sbom import FOLDER, IMAGES, bill_of, default_of, pins_of
from tests.integration.dockerfile_tree import expand, instructions_of

DEPLOY = FOLDER.parent

every_image = pytest.mark.parametrize("image", list(IMAGES))


@every_image
def test_the_stored_bill_is_that_of_the_lock(image: str) -> None:
    stored = (FOLDER / f"{image}.cdx.json").read_text()
    assert stored == bill_of(image), "run `make sbom`"


@every_image
def test_a_bill_is_valid_cyclonedx(image: str) -> None:
    stored = (FOLDER / f"{image}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(stored) is None


@every_image
def test_a_bill_names_every_locked_package_by_its_url(image: str) -> None:
    stored = json.loads((FOLDER / f"{image}.cdx.json").read_text())
    named = {part["purl"] for part in stored["components"]}
    pins = [pin for lock in IMAGES[image] for pin in pins_of(LOCKS / f"{lock}.txt")]
    locked = {f"pkg:pypi/{pin.name}@{pin.version}" for pin in pins}
    if "trainer-cpu" in IMAGES[image]:
        (torch,) = named - locked
        assert torch.replace("%2B", "+") == (
            "pkg:pypi/torch@" + default_of("Dockerfile.trainer", "TORCH_VERSION")
        )
        named.remove(torch)
    assert named == locked


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
@pytest.mark.parametrize("path", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda path: path.name)
def test_an_image_holds_at_its_label_the_bill_of_all_locks_that_it_installs(
    path: Path, variant: str
) -> None:
    said = [(name, expand(text, {"VARIANT": variant})) for name, text in instructions_of(path)]
    labels = " ".join(text for name, text in said if name == "LABEL")
    found = re.search(r"io\.shardloom\.sbom=/opt/shardloom/sbom/(\S+)\.cdx\.json", labels)
    assert found is not None
    image = found[1]
    copied = [text.split()[0] for name, text in said if name == "COPY"]
    assert f"deploy/sbom/{image}.cdx.json" in copied
    locks = {Path(each).stem for each in copied if each.startswith("deploy/requirements/")}
    # Those of the build stay out, and torch's lock is part of the trainer's.
    locks = {each for each in locks if each != "build" and not each.startswith("torch-")}
    base = dict(text.split("=", 1) for name, text in said if name == "ARG" and "=" in text)
    if "TRAINER_IMAGE" in base:
        locks.add(f"trainer-{base['TRAINER_IMAGE'].rpartition('-')[2]}")
    assert locks == set(IMAGES[image])
