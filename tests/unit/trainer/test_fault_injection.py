"""The fault injector: what is due, for whom, how often; and that it is silent unless armed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from trainer import fault_injection


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    fault_injection.arm(0, 0, 0, {})


def arm(*documents: dict[str, Any], group: int = 1, rank: int = 0, incarnation: int = 0) -> None:
    environment = {fault_injection.VARIABLE: json.dumps(documents)}
    fault_injection.arm(group, rank, incarnation, environment)


def poisoned(step: int) -> torch.Tensor:
    """The sum of a loss at `step` and of its gradient."""
    weight = torch.tensor(2.0, requires_grad=True)
    loss = weight.square()
    fault_injection.poison(loss, step)
    loss.backward()
    assert weight.grad is not None
    assert loss.isnan() == weight.grad.isnan()
    return loss.detach() + weight.grad


def fault(**overrides: Any) -> dict[str, Any]:
    chosen = {"kind": "raise", "group": 1, "rank": 0, "step": 5, "phase": "exchange"}
    return chosen | overrides


def test_nothing_befalls_a_rank_for_which_no_faults_are_armed() -> None:
    for site in ({"group": 0}, {"rank": 1}, {"incarnation": 1}):
        arm(*(fault(phase=phase) for phase in fault_injection.PHASES), fault(kind="nan"), **site)
        for phase in fault_injection.PHASES:
            fault_injection.inject(phase, 5)
        assert not poisoned(5).isnan()


def test_a_fault_waits_for_its_phase_and_step() -> None:
    arm(fault(), fault(step=7))
    fault_injection.inject("apply", 5)
    fault_injection.inject("exchange", 4)
    for step in (5, 9):  # A step without its phase does not lose the fault.
        with pytest.raises(RuntimeError, match="exchange"):
            fault_injection.inject("exchange", step)


def test_a_fault_happens_once_or_as_often_as_told_or_until_its_file_is_there(
    tmp_path: Path,
) -> None:
    until = str(tmp_path / "release")
    arm(fault(), fault(phase="apply", times=2), fault(phase="join", times=9, until=until))
    for phase, step in (("exchange", 5), ("apply", 5), ("apply", 6), ("join", 5)):
        with pytest.raises(RuntimeError):
            fault_injection.inject(phase, step)
    (tmp_path / "release").touch()
    for phase in ("exchange", "apply", "join"):
        fault_injection.inject(phase, 7)


def test_another_life_of_the_group_has_faults_of_its_own() -> None:
    documents = fault(), fault(incarnation=1, phase="join", step=0)
    arm(*documents, incarnation=1)
    fault_injection.inject("exchange", 5)
    with pytest.raises(RuntimeError):
        fault_injection.inject("join", 0)


def test_a_poisoned_loss_is_nan_once_and_so_are_its_gradients() -> None:
    arm(fault(kind="nan", phase="backward"))
    fault_injection.inject("backward", 5)
    assert poisoned(5).isnan()
    assert not poisoned(6).isnan()


def test_faults_that_cannot_be_read_are_refused() -> None:
    for text in ("not json", "{}", '[{"kind": "flood"}]'):
        with pytest.raises(ValidationError):
            fault_injection.arm(0, 0, 0, {fault_injection.VARIABLE: text})
