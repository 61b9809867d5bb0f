"""Bills of materials: valid CycloneDX, and what the locks name."""

from __future__ import annotations

import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.lock import FOLDER as LOCKS
from deploy.sbom import FOLDER, IMAGES, bill_of, default_of, pins_of

every_image = pytest.mark.parametrize("image", IMAGES)


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
    locked = {f"pkg:pypi/{pin.name}@{pin.version}" for pin in pins_of(LOCKS / f"{image}.txt")}
    if image == "trainer-cpu":
        (torch,) = named - locked
        assert torch.replace("%2B", "+") == (
            "pkg:pypi/torch@" + default_of("Dockerfile.trainer", "TORCH_VERSION")
        )
        named.remove(torch)
    assert named == locked
