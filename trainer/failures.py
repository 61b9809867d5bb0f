"""Why a run, an attempt or a job ended, what follows, and which failures lead to a restart.

Losses, hangs, out of memory and divergence may not recur after a restart from the newest
checkpoint; bad data, a bad spec, a NaN loss or an error in training would. Failures that are not
the job's own (a lost host, a preemption) never spend the user's retry budget. Without room, or
while another attempt holds the run folder, the attempt ends and the control plane tries later.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

# Torch's allocator of device memory, and the runtime, which page-locks memory of the host; NCCL
# (in quotes) and cuBLAS, which take memory of their own.
_DEVICE_SIGNS = (
    "torch.outofmemoryerror",
    "cuda out of memory",
    "cuda error: out of memory",
    "hip out of memory",
    "hip error: out of memory",
    "'out of memory'",
    "status_alloc_failed",
)
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
_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0
_MAX_CHAIN = 4
_MAX_USER_LINES = 40
_MAX_LINE_CHARS = 300
# Gloo's and NCCL's words for a rank or a link that is gone.
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
    "remote process exited or there was a network error",
    "connection closed by remote peer",
)
# CUDA's words for a device that is broken, which is as good as lost.
BROKEN_SIGNS = ("uncorrectable ecc error", "uncorrectable nvlink error")


class Budget(StrEnum):
    """Who pays for the next attempt; with `none` there is none."""

    USER = "user"
    FREE = "free"
    NONE = "none"


@dataclass(frozen=True)
class EndRule:
    """What follows an end, and what to change.

    The wait for the next attempt doubles from `first_backoff_s` on. With `restarts_workers` the
    driver restarts them inside the attempt, by the same budget. One that `is_suspicious` may lie in
    the job itself: a sharding group that ended so is started again as often as the budget allows.

    With `blames_job` the fault is one of its spec, data or code, which nobody but its owner mends.
    With `blames_hosts` it counts against the hosts of a group, and with `avoids_host` the next
    attempt has no worker on the host to blame, for a while and if there is room elsewhere. With
    `needs_memory` each of its workers holds less: its sharding groups are larger, where the spec
    leaves that `auto`. `loss` is how the timeline tells the loss of a group.
    """

    reason: str
    advice: str = ""
    budget: Budget = Budget.NONE
    first_backoff_s: float = 2.0
    restarts_workers: bool = False
    is_suspicious: bool = False
    blames_job: bool = False
    blames_hosts: bool = False
    avoids_host: bool = False
    needs_memory: bool = False
    loss: str = ""


class EndReason(StrEnum):
    """Why an attempt, or a job, ended. Stored; the status follows from it."""

    rule: EndRule

    def __new__(cls, rule: Any) -> Self:
        reason = str.__new__(cls, rule.reason)
        reason._value_, reason.rule = rule.reason, rule
        return reason

    COMPLETED = EndRule("completed")
    CANCELLED = EndRule("cancelled")
    # A pause ends in PAUSED; a job that was resumed meanwhile goes on at once.
    PAUSED = EndRule("paused", budget=Budget.FREE, first_backoff_s=0.0)
    WORKERS_LOST = EndRule(
        "workers_lost",
        "Read the end of the lost rank's log. A crash that comes back is not mended by more "
        "retries; if machines come and go, raise retry.max_failures.",
        Budget.USER,
        restarts_workers=True,
        blames_hosts=True,
        loss="its workers ended",
    )
    DRIVER_LOST = EndRule(
        "driver_lost",
        "Read the end of the driver's log and look at the cluster's head node: did it run out "
        "of memory, or was it restarted?",
        Budget.USER,
    )
    # A cluster that was restarted remembers nothing of what it ran.
    FORGOTTEN = EndRule(
        "forgotten", "The cluster was restarted. Nothing in the job needs to change.", Budget.FREE
    )
    SUBMISSION_REFUSED = EndRule(
        "submission_refused",
        "Ask whoever runs the cluster: it refuses this submission, and would again.",
    )
    BAD_SPEC = EndRule(
        "bad_spec",
        "Correct the field that the message names and submit the job again.",
        blames_job=True,
    )
    DATA_ERROR = EndRule(
        "data_error",
        "Correct the data, or the field of the spec, that the message names, and submit the "
        "job again.",
        blames_job=True,
    )
    # A mount or an endpoint that is away is often back in minutes; a full disk is soon given up.
    STORAGE_ERROR = EndRule(
        "storage_error",
        "Check that run storage (SHARDLOOM_RUNS_DIR), checkpoint.path and data.path are "
        "mounted or answer on every host, that credentials are set, and that disks have room.",
        Budget.USER,
        first_backoff_s=30.0,
        is_suspicious=True,
    )
    TRAINING_ERROR = EndRule(
        "training_error",
        "Read the end of the log of the rank that the message names.",
        is_suspicious=True,
        blames_job=True,
    )
    USER_CODE = EndRule(
        "user_code",
        "Mend the code of model.module where the traceback shows it, and submit the job again "
        "with --code.",
        blames_job=True,
    )
    # Code that was upgraded under a driver is that of the next one, too.
    VERSION_MISMATCH = EndRule(
        "version_mismatch",
        "Install the same versions on the service and on every host of the cluster, and "
        "restart Ray where it ran meanwhile (one machine: `shardloom down`, `shardloom up`).",
        Budget.USER,
        is_suspicious=True,
        avoids_host=True,
    )
    # Copies are equal again after a checkpoint is loaded, which only equal copies write.
    DIVERGED = EndRule(
        "diverged",
        "Copies of a shard came out unequal again and again. Look for failing memory on the "
        "host of the ranks that the timeline names.",
        Budget.USER,
        restarts_workers=True,
    )
    HANG = EndRule(
        "hang",
        "Look at the log of the rank that hangs and at its host. If one step may take that "
        "long, raise recovery.min_hang_s or recovery.hang_factor.",
        Budget.USER,
        restarts_workers=True,
        blames_hosts=True,
        avoids_host=True,
    )
    DEVICE_OOM = EndRule(
        "device_oom",
        "Lower data.batch_size, or raise parallelism.shard_group_size (with workers), so that "
        "each device holds less of the tables.",
        Budget.USER,
        restarts_workers=True,
        blames_hosts=True,
        needs_memory=True,
        loss="a device ran out of memory",
    )
    HOST_OOM = EndRule(
        "host_oom",
        "Lower data.batch_size, raise parallelism.shard_group_size (with workers), or place "
        "fewer workers on a host with resources.cpus_per_worker.",
        Budget.USER,
        restarts_workers=True,
        blames_hosts=True,
        needs_memory=True,
        loss="its host ran out of memory",
    )
    HOST_LOST = EndRule(
        "host_lost",
        "Nothing in the job needs to change. To train through the loss of a host, set "
        "parallelism.survive.hosts and checkpoint more often.",
        Budget.FREE,
        restarts_workers=True,
        blames_hosts=True,
        avoids_host=True,
        loss="its host stopped answering",
    )
    PREEMPTED = EndRule(
        "preempted",
        "Nothing in the job needs to change. If machines are often taken away, set "
        "parallelism.survive.hosts and checkpoint more often.",
        Budget.FREE,
        restarts_workers=True,
        loss="its host was taken away",
    )
    NON_FINITE = EndRule(
        "non_finite",
        "Lower optimizer.sparse.lr or optimizer.dense.lr, add a warm-up (optimizer.schedule), "
        "or look for outliers in the data.",
        blames_job=True,
    )
    # Bad rows are left out from then on; too many of them are no accident.
    ROWS_SKIPPED = EndRule(
        "rows_skipped",
        "The loss or a gradient became NaN on ever more rows: lower optimizer.sparse.lr or "
        "optimizer.dense.lr, add a warm-up (optimizer.schedule), or look for outliers in the data.",
        Budget.USER,
        restarts_workers=True,
        blames_job=True,
    )
    NO_ROOM = EndRule(
        "no_room",
        "Add hosts, free some, or lower parallelism.workers.min or parallelism.survive.hosts.",
        Budget.FREE,
        first_backoff_s=10.0,
    )
    # The service took the other attempt for ended; its processes only need longer than it thought.
    RUN_IN_USE = EndRule(
        "run_in_use",
        "Another attempt still writes to this run folder. The job is tried again; should that "
        "attempt not end, stop the process that the message names.",
        Budget.FREE,
        first_backoff_s=30.0,
    )
    RETRIES_EXHAUSTED = EndRule(
        "retries_exhausted",
        "The reason of the last attempt says what to change; raise retry.max_failures only if "
        "such failures are to be expected.",
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
        self,
        reason: EndReason,
        message: str,
        evidence: Mapping[str, str] | None = None,
        blamed_host: str = "",
    ) -> None:
        super().__init__(reason, message, evidence, blamed_host)
        self.reason = EndReason(reason)  # of a worker whose code is older it is a plain string
        self.message = message
        self.evidence = dict(evidence or {})
        self.blamed_host = blamed_host

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class UserCodeError(Exception):
    """The user's own code failed; `lines` is what its traceback says of that code."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


class NonFiniteLoss(Exception):
    """The loss or a gradient became NaN or infinite."""


class NonFiniteRows(NonFiniteLoss):
    """It did so on known rows, which are left out after a restart."""


@dataclass(frozen=True)
class Failure:
    """Why a rank, or a whole worker group run, ended.

    `is_death` says that the rank's process itself is gone, which explains its peers' errors.
    `evidence` has what speaks for `reason`: `rank`, `host`, `exit`, `exception`, ... `blamed_host`
    is the one whose fault it is, if that is known: it was lost, hangs, or is set up wrongly.
    """

    reason: EndReason
    message: str
    is_death: bool = False
    evidence: Mapping[str, str] = field(default_factory=dict)
    blamed_host: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """The evidence, with the host to blame."""
        return {**self.evidence, **({"host": self.blamed_host} if self.blamed_host else {})}


def reason_of(error: BaseException) -> EndReason:
    """The reason behind an unexpected error, by its type and text."""
    message = str(error).lower()
    type_names = [f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__]
    text = " ".join([*type_names, message]).lower()
    if any(sign in text for sign in _DEVICE_SIGNS):
        return EndReason.DEVICE_OOM
    if any(sign in text for sign in _HOST_SIGNS):
        return EndReason.HOST_OOM
    is_lost = any(sign in message for sign in _PEER_LOST_SIGNS + BROKEN_SIGNS)
    return (
        EndReason.WORKERS_LOST
        if is_lost and isinstance(error, RuntimeError | OSError)
        else EndReason.TRAINING_ERROR
    )


def without_statistics(text: str) -> str:
    """What Ray's memory monitor says it did, without pages of statistics and processes."""
    return text.partition("\nOOM kill reason: ")[0]


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
    best where it is known what killed it, as does a broken GPU, and a lost peer explains nothing.
    """

    def _order(failure: Failure) -> int:
        if any(sign in failure.message.lower() for sign in BROKEN_SIGNS):
            return 1
        if failure.is_death:
            return 2 if failure.reason == EndReason.WORKERS_LOST else 1
        return {EndReason.TRAINING_ERROR: 3, EndReason.WORKERS_LOST: 4}.get(failure.reason, 0)

    unexplained = Failure(EndReason.WORKERS_LOST, "the workers ended without a word")
    return min(failures, key=_order, default=unexplained)


def with_lost_host(failure: Failure, live_hosts: Collection[str]) -> Failure:
    """The same failure, as the loss of the host to blame if that is not there any more."""
    host = failure.blamed_host
    if failure.reason != EndReason.WORKERS_LOST or not host or host in live_hosts:
        return failure
    return replace(
        failure, reason=EndReason.HOST_LOST, message=f"host {host} is gone: {failure.message}"
    )


def should_restart(failure: Failure, num_paid: int, max_failures: int) -> bool:
    """Whether the workers start again; `num_paid` counts failures that spend the budget, this too.

    What does not spend it is bounded by `restart_delay_s` alone.
    """
    rule = failure.reason.rule
    may_restart = rule.budget is Budget.FREE or num_paid <= max_failures
    return rule.restarts_workers and may_restart


def should_replace(failure: Failure, num_suspicious: int, max_failures: int) -> bool:
    """Whether a sharding group starts again while the others train on.

    Losing one stops nobody, so it costs nothing; but an error that may lie in the job itself is
    tried `max_failures` times at most (`num_suspicious` counts those, this one too).
    """
    rule = failure.reason.rule
    if rule.is_suspicious:
        return num_suspicious <= max_failures
    return rule.restarts_workers or failure.reason is EndReason.NO_ROOM


def restart_delay_s(num_in_a_row: int) -> float:
    """Seconds to wait before a restart: none the first time, then doubling up to a minute."""
    if num_in_a_row <= 1:
        return 0.0
    return min(_FIRST_DELAY_S * 2.0 ** (min(num_in_a_row, 30) - 2), _MAX_DELAY_S)
