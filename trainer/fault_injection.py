"""Fault injection for tests: end, stop, slow or poison one rank at one point of the training.

The engine calls `inject` at each phase of its work, which does nothing until `arm` found faults in
the environment variable SHARDLOOM_FAULTS: a JSON list of `Fault`. Nothing but tests sets it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter

if TYPE_CHECKING:
    import torch

VARIABLE = "SHARDLOOM_FAULTS"
Phase = Literal["lookup", "backward", "exchange", "before_vote", "apply", "checkpoint", "join"]
"""Before the forward, before the backward, within the averaging, between it and the vote, before
the averages are applied, while a checkpoint is written, while a shard is copied from a peer."""
Kind = Literal["exit", "sigkill", "sigstop", "raise", "slow", "storage_error", "nan"]
PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[Kind, ...] = get_args(Kind)


class InjectedFault(RuntimeError):
    """The error that a fault of kind `raise` stands for."""


class Fault(BaseModel):
    """What befalls one rank, at the first pass of `phase` at `step` or later.

    It happens `times` times, in life number `incarnation` of the group. `arg` is the exit code of
    `exit` (1 where it is 0) and the seconds of `slow`. `nan` makes a loss NaN, in whatever phase.
    Steps are nominal ones; in the phases of a sync between groups they are numbers of commits, and
    joining is at step 0. Once there is a file `until` it happens no more.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    group: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)]
    step: Annotated[int, Field(ge=0)]
    phase: Phase
    incarnation: Annotated[int, Field(ge=0)] = 0
    arg: Annotated[float, Field(ge=0)] = 0.0
    times: PositiveInt = 1
    until: Path | None = None


FAULTS: TypeAdapter[list[Fault]] = TypeAdapter(list[Fault])


@dataclass
class _Armed:
    fault: Fault
    times_left: int


# Of this process: it is one rank, in one life.
_armed: list[_Armed] = []


def arm(incarnation: int, environment: Mapping[str, str] = os.environ) -> None:
    """Load the faults of life number `incarnation`, in place of those loaded before.

    Raises pydantic's `ValidationError` on text that is no list of faults.
    """
    faults = FAULTS.validate_json(environment.get(VARIABLE) or "[]")
    _armed[:] = [_Armed(each, each.times) for each in faults if each.incarnation == incarnation]


def inject(phase: Phase, group: int, rank: int, step: int) -> None:
    """Let whatever is due befall this rank.

    May not return, or raise `InjectedFault` or, for a storage error, `OSError`.
    """
    for armed in _armed:
        fault = armed.fault
        if fault.kind != "nan" and fault.phase == phase and _takes(armed, group, rank, step):
            _strike(fault)


def poison(loss: torch.Tensor, group: int, rank: int, step: int) -> torch.Tensor:
    """The loss, a scalar, or NaN with NaN gradients where a fault of kind `nan` is due."""
    for armed in _armed:
        if armed.fault.kind == "nan" and _takes(armed, group, rank, step):
            loss = loss * float("nan")
    return loss


def _takes(armed: _Armed, group: int, rank: int, step: int) -> bool:
    """Use up one of the times that a fault may happen, if it is due."""
    fault = armed.fault
    is_due = (fault.group, fault.rank) == (group, rank) and step >= fault.step
    if not (armed.times_left and is_due):
        return False
    if fault.until is not None and fault.until.exists():
        return False
    armed.times_left -= 1
    return True


def _strike(fault: Fault) -> None:
    match fault.kind:
        case "exit":
            os._exit(int(fault.arg) or 1)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise InjectedFault(f"a test lets rank {fault.rank} fail in phase {fault.phase}")
        case "slow":
            time.sleep(fault.arg)
        case "storage_error":
            raise OSError(errno.ENOSPC, f"a test lets storage fail in phase {fault.phase}")
