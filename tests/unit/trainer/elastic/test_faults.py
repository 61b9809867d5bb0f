"""The fault injector: what is due, for whom, how often; and that it is silent unless armed."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.elastic import faults

LOSS = torch.tensor(2.0)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm(0, {})


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would have befallen this process."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "_exit", lambda code: calls.append(("exit", code)))
    monkeypatch.setattr(os, "kill", lambda pid, signum: calls.append((pid, signum)))
    monkeypatch.setattr(time, "sleep", lambda seconds: calls.append(("sleep", seconds)))
    return calls


def arm(*documents: dict[str, Any], incarnation: int = 0) -> None:
    faults.arm(incarnation, {faults.VARIABLE: json.dumps(documents)})


def fault(**overrides: Any) -> dict[str, Any]:
    chosen = {"kind": "raise", "group": 1, "rank": 0, "step": 5, "phase": "exchange"}
    return chosen | overrides


def test_nothing_befalls_a_rank_unless_faults_are_armed() -> None:
    faults.arm(0, {})
    for phase in faults.PHASES:
        faults.point(phase, 1, 0, 5)
    assert faults.poison(LOSS, 1, 0, 5) is LOSS


def test_a_fault_waits_for_its_group_rank_phase_and_step() -> None:
    arm(fault())
    faults.point("exchange", 0, 0, 5)
    faults.point("exchange", 1, 1, 5)
    faults.point("apply", 1, 0, 5)
    faults.point("exchange", 1, 0, 4)
    with pytest.raises(faults.InjectedFault, match="exchange"):
        faults.point("exchange", 1, 0, 5)


def test_a_step_without_its_phase_does_not_lose_the_fault() -> None:
    arm(fault(step=5))
    with pytest.raises(faults.InjectedFault):
        faults.point("exchange", 1, 0, 8)


def test_a_fault_happens_once_or_as_often_as_told() -> None:
    arm(fault(), fault(phase="apply", times=2))
    with pytest.raises(faults.InjectedFault):
        faults.point("exchange", 1, 0, 5)
    faults.point("exchange", 1, 0, 6)
    for step in (5, 6):
        with pytest.raises(faults.InjectedFault):
            faults.point("apply", 1, 0, step)
    faults.point("apply", 1, 0, 7)


def test_a_fault_ends_once_its_file_is_there(tmp_path: Path) -> None:
    arm(fault(times=9, until=str(tmp_path / "release")))
    with pytest.raises(faults.InjectedFault):
        faults.point("exchange", 1, 0, 5)
    (tmp_path / "release").touch()
    faults.point("exchange", 1, 0, 6)


def test_another_life_of_the_group_has_faults_of_its_own() -> None:
    documents = fault(), fault(incarnation=1, phase="join", step=0)
    arm(*documents, incarnation=1)
    faults.point("exchange", 1, 0, 5)
    with pytest.raises(faults.InjectedFault):
        faults.point("join", 1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "arg", "expected"),
    [
        ("exit", 0, ("exit", 1)),
        ("exit", 7, ("exit", 7)),
        ("sigkill", 0, (os.getpid(), signal.SIGKILL)),
        ("sigstop", 0, (os.getpid(), signal.SIGSTOP)),
        ("slow", 1.5, ("sleep", 1.5)),
    ],
)
def test_a_process_ends_stops_or_waits(
    kind: str, arg: float, expected: tuple[Any, ...], struck: list[tuple[Any, ...]]
) -> None:
    arm(fault(kind=kind, arg=arg))
    faults.point("exchange", 1, 0, 5)
    assert struck == [expected]


def test_a_storage_error_is_what_a_full_disk_gives() -> None:
    arm(fault(kind="storage_error", phase="checkpoint"))
    with pytest.raises(OSError) as caught:
        faults.point("checkpoint", 1, 0, 5)
    assert caught.value.errno == errno.ENOSPC


def test_a_poisoned_loss_is_nan_once() -> None:
    arm(fault(kind="nan", phase="backward"))
    faults.point("backward", 1, 0, 5)
    assert faults.poison(LOSS, 1, 1, 5) is LOSS
    assert faults.poison(LOSS, 1, 0, 5).isnan()
    assert faults.poison(LOSS, 1, 0, 6) is LOSS


@pytest.mark.parametrize("text", ["not json", "{}", '[{"kind": "flood"}]'])
def test_faults_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(faults.FaultsError, match=faults.VARIABLE):
        faults.arm(0, {faults.VARIABLE: text})
