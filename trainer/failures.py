"""Why a run ended: reasons that the control plane knows, and which failures lead to a restart.

Losses, hangs, out of memory and divergence may not recur after a restart from the newest
checkpoint; bad data, a bad spec, a NaN loss or an error in training would. Failures that are not
the job's own (a lost host, a preemption) never spend the user's retry budget. Without room, or
while another attempt holds the run folder, the attempt ends and the control plane tries later.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_DEVICE_SIGNS = ("torch.outofmemoryerror", "cuda out of memory", "hip out of memory")
# Ray's memory monitor, torch's CPU allocator, the C library, Python, container runtimes.
_HOST_SIGNS = (
    "node running low on memory",
    "memory usage threshold",
    "can't allocate memory",
    "cannot allocate memory",
    "memoryerror",
    "std::bad_alloc",
    "oomkilled",
)
COMPLETED = "completed"
CANCELLED = "cancelled"
PAUSED = "paused"
WORKERS_LOST = "workers_lost"
HOST_LOST = "host_lost"
PREEMPTED = "preempted"
NO_ROOM = "no_room"
HANG = "hang"
DEVICE_OOM = "device_oom"
HOST_OOM = "host_oom"
DIVERGED = "diverged"
NON_FINITE = "non_finite"
ROWS_SKIPPED = "rows_skipped"
BAD_SPEC = "bad_spec"
DATA_ERROR = "data_error"
STORAGE_ERROR = "storage_error"
TRAINING_ERROR = "training_error"
USER_CODE = "user_code"
VERSION_MISMATCH = "version_mismatch"
RUN_IN_USE = "run_in_use"
# Restarting may help; PAID spends the user's retry budget.
PAID = frozenset({WORKERS_LOST, DIVERGED, ROWS_SKIPPED, HANG, DEVICE_OOM, HOST_OOM})
FREE = frozenset({HOST_LOST, PREEMPTED})
RESTARTABLE = PAID | FREE
# A sharding group that ended by these is restarted at most as often as the budget allows.
SUSPICIOUS = frozenset({TRAINING_ERROR, STORAGE_ERROR, VERSION_MISMATCH})
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
_MAX_CHAIN = 4
_MAX_USER_LINES = 40
_MAX_LINE_CHARS = 300
_PEER_LOST_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timeout waiting",
    "socket closed",
    "pair closure",
    "connect timeout",
    "failed to recv",
    "application timeout",
    "nccl communicator was aborted",
)


class DivergenceError(Exception):
    """Replicas of a shard differ although they were synced; names table, shard and ranks.

    `found` are `DivergentShard`s.
    """

    def __init__(self, found: Sequence[object]) -> None:
        where = "; ".join(map(str, found))
        super().__init__(
            f"copies that a sync made equal differ: {where}. Faulty memory or links of these "
            "ranks' hosts are the usual cause: check or exclude them, and resume from the newest "
            "checkpoint. parallelism.divergence_check.action=rebroadcast repairs such copies "
            "without ending the attempt"
        )


class WorkerFailure(Exception):
    """How a worker ended; can be pickled on its way to the driver."""

    def __init__(
        self, reason: str, message: str, evidence: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(reason, message, evidence)
        self.reason = reason
        self.message = message
        self.evidence = dict(evidence or {})

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class UserCodeError(Exception):
    """The user's own code failed; `lines` is what its traceback says of that code."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite."""


class NonFiniteRows(NonFiniteLoss):
    """The loss became NaN or infinite on known rows, which are left out after a restart."""


@dataclass(frozen=True)
class Failure:
    """Why a rank, or a whole worker group run, ended.

    `is_death` says that the rank's process itself is gone, which explains its peers' errors.
    `evidence` has what speaks for `reason`: `rank`, `host`, `exit`, `exception`, ...
    """

    reason: str
    message: str
    is_death: bool = False
    evidence: Mapping[str, str] = field(default_factory=dict)


def reason_of(error: BaseException) -> str:
    """The reason behind an unexpected error, by its type and text."""
    message = str(error).lower()
    type_names = [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__]
    text = " ".join([*type_names, message]).lower()
    if any(sign in text for sign in _DEVICE_SIGNS):
        return DEVICE_OOM
    if any(sign in text for sign in _HOST_SIGNS):
        return HOST_OOM
    # A collective that failed as another rank went away, which is not the cause.
    is_echo = any(sign in message for sign in _PEER_LOST_SIGNS)
    return WORKERS_LOST if is_echo and isinstance(error, RuntimeError | OSError) else TRAINING_ERROR


def evidence_of(error: BaseException) -> dict[str, str]:
    """`exception`: the error and what it came from, outermost first; `where`: its last frame.

    Of the user's own code `traceback` has the lines instead.
    """
    evidence = {"exception": " <- ".join(described(each) for each in _chain(error))}
    if isinstance(error, UserCodeError) and error.lines:
        evidence["traceback"] = "\n".join(error.lines)
    elif frames := traceback.extract_tb(error.__traceback__):
        last = frames[-1]
        evidence["where"] = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    return evidence


def user_lines(error: BaseException, root: Path | None, base: Path | None) -> list[str]:
    """The lines of an error's traceback that lie in `root`, a folder or a file, and what it was.

    Paths are shown from `base`, as the user knows them.
    """
    told = traceback.TracebackException.from_exception(error)
    lines = []
    for frame in told.stack:
        if root and base and Path(frame.filename).is_relative_to(root):
            shown = Path(frame.filename).relative_to(base).as_posix()
            lines += [f'  File "{shown}", line {frame.lineno}, in {frame.name}']
            lines += [f"    {frame.line}"] if frame.line else []
    ending = "".join(told.format_exception_only())
    if base:
        ending = ending.replace(f"{base}/", "")
    told_lines = [*lines, *ending.rstrip().splitlines()][-_MAX_USER_LINES:]
    return [line[:_MAX_LINE_CHARS] for line in told_lines]


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes; the first ones and the root where there are many."""
    chain = [error]
    while True:
        last = chain[-1]
        origin = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if origin is None or origin in chain:
            break
        chain.append(origin)
    return chain if len(chain) <= _MAX_CHAIN else [*chain[: _MAX_CHAIN - 1], chain[-1]]


def described(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:_MAX_LINE_CHARS]}"


def explain(failures: Collection[Failure]) -> Failure:
    """Pick the cause among the ranks' failures.

    A fault that a rank named itself comes first. A dead rank explains whatever its peers ran into,
    best where it is known what killed it, and a lost peer explains nothing.
    """

    def _order(failure: Failure) -> int:
        if failure.is_death:
            return 2 if failure.reason == WORKERS_LOST else 1
        return {TRAINING_ERROR: 3, WORKERS_LOST: 4}.get(failure.reason, 0)

    unexplained = Failure(WORKERS_LOST, "the workers ended without a word")
    return min(failures, key=_order, default=unexplained)


def with_lost_host(failure: Failure, live_hosts: Collection[str]) -> Failure:
    """The same failure, as the loss of the host that it names if that is not there any more."""
    host = failure.evidence.get("host")
    if failure.reason != WORKERS_LOST or host is None or host in live_hosts:
        return failure
    return replace(failure, reason=HOST_LOST, message=f"host {host} is gone: {failure.message}")


def should_restart(failure: Failure, num_paid: int, max_failures: int) -> bool:
    """Whether the workers start again; `num_paid` counts failures that spend the budget, this too.

    What does not spend it is bounded by `restart_delay_s` alone.
    """
    return failure.reason in FREE or (failure.reason in PAID and num_paid <= max_failures)


def should_replace(failure: Failure, num_suspicious: int, max_failures: int) -> bool:
    """Whether a sharding group starts again while the others train on.

    Losing one stops nobody, so it costs nothing; but an error that may lie in the job itself is
    tried `max_failures` times at most (`num_suspicious` counts those, this one too).
    """
    if failure.reason in SUSPICIOUS:
        return num_suspicious <= max_failures
    return failure.reason in RESTARTABLE | {NO_ROOM}


def restart_delay_s(num_in_a_row: int) -> float:
    """Seconds to wait before a restart: none the first time, then doubling up to a minute."""
    if num_in_a_row <= 1:
        return 0.0
    return min(_FIRST_DELAY_S * 2.0 ** (min(num_in_a_row, 30) - 2), _MAX_DELAY_S)
