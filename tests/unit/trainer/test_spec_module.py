"""`model.module` and `model.code`: a network of the user's own in the spec."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.test_spec import minimal
from trainer.spec import JobSpec, SpecError, validate_spec


def spec_with(**model: Any) -> dict[str, Any]:
    return minimal() | {"model": {"tasks": [{"name": "rating", "loss": "mse"}], **model}}


def fault_of(document: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        validate_spec(document)
    return caught.value.problems[0].path, caught.value.problems[0].code


def test_a_module_needs_no_layers_of_ours() -> None:
    spec = validate_spec(spec_with(module="towers.two:Towers", options={"width": 8}))
    assert spec.model.module == "towers.two:Towers"
    assert spec.model.options == {"width": 8}


def test_a_spec_with_a_module_survives_its_own_json() -> None:
    spec = validate_spec(spec_with(module="towers:Towers", code="ab" * 32))
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_without_a_module_the_layers_are_still_required() -> None:
    with pytest.raises(SpecError) as caught:
        validate_spec(spec_with())
    paths = {problem.path: problem.code for problem in caught.value.problems}
    assert paths == {"model.dense_arch": "missing", "model.over_arch": "missing"}


@pytest.mark.parametrize(
    "path", ["towers", "towers:", ":Towers", "../evil:Towers", "a b:C", "a:b.C"]
)
def test_what_is_no_class_path_is_refused(path: str) -> None:
    assert fault_of(spec_with(module=path))[0] == "model.module"


@pytest.mark.parametrize("code", ["ab", "zz" * 32, "../" + "a" * 61])
def test_what_is_no_code_id_is_refused(code: str) -> None:
    assert fault_of(spec_with(module="towers:Towers", code=code))[0] == "model.code"


@pytest.mark.parametrize("field", [{"code": "ab" * 32}, {"options": {"width": 8}}])
def test_code_without_a_module_would_have_no_effect_and_is_refused(field: dict[str, Any]) -> None:
    layers = {"dense_arch": {"layer_sizes": [16]}, "over_arch": {"layer_sizes": [1]}}
    assert fault_of(spec_with(**layers, **field)) == (
        f"model.{next(iter(field))}",
        "unexpected_field",
    )
