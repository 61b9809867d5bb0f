"""Fault injection for tests: end, stop, slow or poison one rank at one point of the training.

What a rank trains with knows of no faults: `install` wraps it, in a process whose environment has
SHARDLOOM_FAULTS, a JSON list of `Fault`. Nothing but tests sets it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

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


class Fault(BaseModel):
    """What befalls one rank, at the first pass of `phase` at `step` or later.

    It happens `times` times, in life number `incarnation` of the group. `arg` is the seconds of
    `slow`. `nan` makes a loss NaN, in whatever phase.
    Steps are nominal ones; in the phases of a sync between groups they are numbers of commits, and
    joining is at step 0. Once there is a file `until` it happens no more.
    """

    model_config = ConfigDict(extra="forbid")

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


# Those due to this process, which is one rank in one life; `times` is how often they still happen.
_armed: list[Fault] = []


def install(config: Any, rank: int) -> None:
    """Let this rank of a `WorkerConfig` suffer what its environment says, if that says anything."""
    if VARIABLE in os.environ:
        group = config.group
        arm(group.group if group else 0, rank, group.incarnation if group else config.run_index)
        wrap()


def arm(
    group: int, rank: int, incarnation: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Load the faults of life number `incarnation` of a rank, in place of those loaded before.

    Raises pydantic's `ValidationError` on text that is no list of faults.
    """
    faults = FAULTS.validate_json(environment.get(VARIABLE) or "[]")
    own = group, rank, incarnation
    _armed[:] = [each for each in faults if (each.group, each.rank, each.incarnation) == own]


@cache
def wrap() -> None:
    """Let what is armed, now or later, befall this process as it trains; for good."""
    place_of = resolve_name("trainer.checkpoint.files:place_of")
    at = {"step": 0, "exchange": -1, "apply": -1}  # -1: not now

    def begin_backward(_weighting: Any, loss: torch.Tensor, _weigh: Any) -> None:
        poison(loss, at["step"])
        inject("backward", at["step"])

    def begin_vote(_client: Any, vote: Any) -> None:
        at.update(exchange=-1, apply=vote.commit)  # what is averaged next may be moments
        inject("before_vote", vote.commit if vote.ok else -1)

    begins: dict[str, Callable[..., object]] = {
        "training.session:Session.run_step": lambda _, __, step, *___: at.update(step=step),
        "training.loss:LossWeighting.begin": lambda *_: inject("lookup", at["step"]),
        "training.loss:LossWeighting.scaled": begin_backward,
        "coordination.client:CoordinatorClient.arrive": lambda _, arrive: at.update(
            exchange=arrive.commit + 1
        ),
        "parallel.sync:ReplicaCollectives.average_batch": lambda *_: inject(
            "exchange", at["exchange"]
        ),
        "coordination.client:CoordinatorClient.vote": begin_vote,
        "parallel.sync:PendingSync.land": lambda _: inject("apply", at["apply"]),
        "elastic.peer_copy:LiveCopy.next_chunk": lambda *_: inject("join", 0),
        "checkpoint.remote_io:FileSystemWriter.write_data": lambda writer, *_: inject(
            "checkpoint", place_of(writer.path.name)[0]
        ),
    }
    for method, begin in begins.items():
        _put_before(method, begin)


def _put_before(method: str, begin: Callable[..., object]) -> None:
    """Let `begin` have the arguments of a method's calls before the method has."""
    owner, _, name = method.rpartition(".")
    call = resolve_name(f"trainer.{method}")

    def both(*args: Any, **named: Any) -> Any:
        begin(*args, *named.values())
        return call(*args, **named)

    setattr(resolve_name(f"trainer.{owner}"), name, both)


def inject(phase: Phase, step: int) -> None:
    """Let whatever is due befall this rank.

    May not return, or raise `RuntimeError` or, for a storage error, `OSError`.
    """
    for fault in _armed:
        if fault.kind != "nan" and fault.phase == phase and _takes(fault, step):
            _strike(fault)


def poison(loss: torch.Tensor, step: int) -> None:
    """Make the loss, a scalar, NaN with NaN gradients where a fault of kind `nan` is due."""
    for fault in _armed:
        if fault.kind == "nan" and _takes(fault, step):
            loss.mul_(float("nan"))


def _takes(fault: Fault, step: int) -> bool:
    """Use up one of the times that a fault may happen, if it is due."""
    if step < fault.step or not fault.times or (fault.until and fault.until.exists()):
        return False
    fault.times -= 1
    return True


def _strike(fault: Fault) -> None:
    match fault.kind:
        case "exit":
            os._exit(1)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise RuntimeError(f"a test lets rank {fault.rank} fail in phase {fault.phase}")
        case "slow":
            time.sleep(fault.arg)
        case "storage_error":
            raise OSError(errno.ENOSPC, f"a test lets storage fail in phase {fault.phase}")
