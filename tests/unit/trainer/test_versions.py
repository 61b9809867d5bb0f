"""The check of packages that must match."""

import pytest

from trainer.versions import MATCHED_STACKS, Mismatch, check_versions

NEWEST = {name: f"{minor}.0" for name, minor in MATCHED_STACKS[0].items()}


@pytest.mark.parametrize("stack", MATCHED_STACKS, ids=lambda stack: f"torch-{stack['torch']}")
def test_every_tested_stack_fits(stack):
    assert check_versions({name: f"{minor}.3" for name, minor in stack.items()}) == []


def test_a_package_of_another_stack_is_named_with_what_is_wanted():
    found = check_versions(NEWEST | {"torchrec": "1.6.0"})
    assert found == [Mismatch("torchrec", "1.6.0", "1.8")]
    assert "torchrec 1.6.0 is installed, 1.8 is needed" in found[0].message
    assert "make setup" in found[0].message


def test_the_stack_to_match_is_that_of_the_installed_torch():
    older = {"torch": "2.11.0", "fbgemm-gpu": "1.8.0", "torchrec": "1.6.0", "ray": "2.60.0"}
    assert check_versions(older) == [Mismatch("fbgemm-gpu", "1.8.0", "1.6")]


def test_a_minor_version_is_not_taken_for_a_longer_one():
    assert check_versions(NEWEST | {"ray": "2.6.0"}) == [Mismatch("ray", "2.6.0", "2.60")]
    assert check_versions(NEWEST | {"fbgemm-gpu": "1.80.0"}) != []


def test_missing_packages_are_named_with_the_extra_that_brings_them():
    found = check_versions({})
    assert [mismatch.package for mismatch in found] == list(MATCHED_STACKS[0])
    assert "torch is missing, 2.13 is needed" in found[0].message
    assert "shardloom[trainer-cpu]" in found[0].message
