"""Bills of materials: valid CycloneDX, what the locks name, and where images look for them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.lock import FOLDER as LOCKS
from deploy.sbom import IMAGES, bill_of, default_of, pins_of, write_bills
from tests.unit.deploy.dockerfiles import DOCKERFILES, expand, instructions_of

pytestmark = pytest.mark.slow


def test_written_bills_are_valid_cyclonedx_and_the_same_each_time(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert {path.name for path in write_bills(folder)} == {f"{i}.cdx.json" for i in IMAGES}
    for path in (tmp_path / "a").iterdir():
        text = path.read_text()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None, path.name
        assert text == (tmp_path / "b" / path.name).read_text()


@pytest.mark.parametrize("image", list(IMAGES))
def test_a_bill_names_every_locked_package_by_its_url(image: str) -> None:
    named = {part["purl"].replace("%2B", "+") for part in json.loads(bill_of(image))["components"]}
    pins = [pin for lock in IMAGES[image] for pin in pins_of(LOCKS / f"{lock}.txt")]
    locked = {f"pkg:pypi/{pin.name}@{pin.version}" for pin in pins}
    if "trainer-cpu" in IMAGES[image]:
        # torch's CPU build is in no lock.
        locked.add("pkg:pypi/torch@" + default_of("Dockerfile.trainer", "TORCH_VERSION"))
    assert named == locked


def test_an_image_holds_at_its_label_the_bill_of_all_locks_that_it_installs() -> None:
    for path in DOCKERFILES:
        for variant in ("cpu", "cuda"):
            said = [
                (name, expand(text, {"VARIANT": variant})) for name, text in instructions_of(path)
            ]
            labels = " ".join(text for name, text in said if name == "LABEL")
            (image,) = re.findall(r"\.sbom=/opt/shardloom/sbom/(\S+)\.cdx\.json", labels)
            copied = [text.split()[0] for name, text in said if name == "COPY"]
            assert f"deploy/sbom/{image}.cdx.json" in copied
            locks = {Path(each).stem for each in copied if each.startswith("deploy/requirements/")}
            # Those of the build stay out, and torch's lock is part of the trainer's.
            locks = {each for each in locks if each != "build" and not each.startswith("torch-")}
            base = dict(text.split("=", 1) for name, text in said if name == "ARG" and "=" in text)
            if "TRAINER_IMAGE" in base:
                locks.add(f"trainer-{base['TRAINER_IMAGE'].rpartition('-')[2]}")
            assert locks == set(IMAGES[image])
