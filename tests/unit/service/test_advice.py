"""What to change after an end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel

from service.advice import advice_of
from service.domain import EndReason
from trainer.spec import JobSpec

GOOD_ENDS = {EndReason.COMPLETED, EndReason.CANCELLED, EndReason.PAUSED}


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_that_somebody_must_mend_has_advice(reason: EndReason) -> None:
    assert bool(advice_of(reason)) == (reason not in GOOD_ENDS)


def test_a_spent_budget_is_explained_by_the_last_attempt() -> None:
    exhausted = EndReason.RETRIES_EXHAUSTED
    assert advice_of(exhausted, EndReason.HANG) == advice_of(EndReason.HANG)
    assert "retry.max_failures" in advice_of(exhausted, EndReason.COMPLETED)
    assert advice_of(None) == ""


def _has_field(model: Any, path: list[str]) -> bool:
    if not path:
        return True
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    inner = _models_in(field.annotation)
    return len(path) == 1 or any(_has_field(each, path[1:]) for each in inner)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _models_in(argument)]


def test_the_fields_that_are_advised_exist() -> None:
    named = {
        path
        for reason in EndReason
        for path in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", advice_of(reason))
    }
    assert len(named) >= 8
    assert {path for path in named if not _has_field(JobSpec, path.split("."))} == set()
