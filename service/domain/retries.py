"""Retry rule, backoff and advice for each `EndReason`, and what the next attempt changes. Pure.

The *budget* of a reason says whether another attempt counts against `retry.max_failures`, is free,
or is not made. The driver restarts workers inside an attempt by the same budget; what it counted is
added when the attempt ends. Backoffs are in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.domain.models import Attempt, EndReason, Job
from trainer.spec import validate_spec
from trainer.spec.base import MAX_WORKERS, SpecError
from trainer.spec.job import JobSpec

MAX_BACKOFF_S = 300.0
# Share by which waits vary, so that jobs that ended together do not retry together.
_JITTER = 0.2
_ADVICE: dict[EndReason, str] = {
    EndReason.WORKERS_LOST: "Read the end of the lost rank's log. A crash that comes back is not "
    "mended by more retries; if machines come and go, raise retry.max_failures.",
    EndReason.DRIVER_LOST: "Read the end of the driver's log and look at the cluster's head node: "
    "did it run out of memory, or was it restarted?",
    EndReason.FORGOTTEN: "The cluster was restarted. Nothing in the job needs to change.",
    EndReason.SUBMISSION_REFUSED: "Ask whoever runs the cluster: it refuses this submission, and "
    "would again.",
    EndReason.BAD_SPEC: "Correct the field that the message names and submit the job again.",
    EndReason.DATA_ERROR: "Correct the data that the message names, or prepare it again with "
    "`shardloom data prepare`.",
    EndReason.STORAGE_ERROR: "Check that run storage (SHARDLOOM_RUNS_DIR) and data.path are "
    "mounted or answer on every host, that credentials are set, and that disks have room.",
    EndReason.TRAINING_ERROR: "Read the end of the log of the rank that the message names.",
    EndReason.USER_CODE: "Mend the code of model.module where the traceback shows it, and submit "
    "the job again with --code.",
    EndReason.VERSION_MISMATCH: "Install the same versions on the service and on every host of "
    "the cluster.",
    EndReason.DIVERGED: "Copies of a shard came out unequal again and again. Look for failing "
    "memory on the host of the ranks that the timeline names.",
    EndReason.HANG: "Look at the log of the rank that hangs and at its host. If one step may take "
    "that long, raise recovery.min_hang_s or recovery.hang_factor.",
    EndReason.DEVICE_OOM: "Lower data.batch_size, or raise parallelism.shard_group_size (with "
    "workers), so that each device holds less of the tables.",
    EndReason.HOST_OOM: "Lower data.batch_size, raise parallelism.shard_group_size (with workers), "
    "or place fewer workers on a host with resources.cpus_per_worker.",
    EndReason.HOST_LOST: "Nothing in the job needs to change. To train through the loss of a host, "
    "set parallelism.survive.hosts and checkpoint more often.",
    EndReason.PREEMPTED: "Nothing in the job needs to change. If machines are often taken away, "
    "set parallelism.survive.hosts and checkpoint more often.",
    EndReason.NON_FINITE: "Lower optimizer.sparse.lr or optimizer.dense.lr, add a warm-up "
    "(optimizer.schedule), look for outliers in the data, or leave such rows out with "
    "training.on_non_finite: skip.",
    EndReason.ROWS_SKIPPED: "The loss became NaN on ever more rows: lower optimizer.sparse.lr or "
    "optimizer.dense.lr, add a warm-up (optimizer.schedule), or look for outliers in the data.",
    EndReason.NO_ROOM: "Add hosts, free some, or lower parallelism.workers.min or "
    "parallelism.survive.hosts.",
    EndReason.RUN_IN_USE: "Another attempt still writes to this run folder. The job is tried "
    "again; should that attempt not end, stop the process that the message names.",
    EndReason.RETRIES_EXHAUSTED: "The reason of the last attempt says what to change; raise "
    "retry.max_failures only if such failures are to be expected.",
}


def advice_of(reason: EndReason | None, last_attempt: EndReason | None = None) -> str:
    """What to change after a job, or an attempt, ended for `reason`; empty where nothing is.

    Where the budget was spent, the reason of the last attempt is the one that matters.
    """
    if reason is EndReason.RETRIES_EXHAUSTED and last_attempt in _ADVICE:
        reason = last_attempt
    return "" if reason is None else _ADVICE.get(reason, "")


class Budget(StrEnum):
    """Who pays for the next attempt; with `none` there is none."""

    USER = "user"
    FREE = "free"
    NONE = "none"


@dataclass(frozen=True)
class RetryRule:
    """What follows an end; the wait doubles from `first_backoff_s` on."""

    budget: Budget
    first_backoff_s: float = 2.0


# What would come back: the fault of the spec, the data or the code.
_FAULT = RetryRule(Budget.NONE)
# What broke and may not break again.
_LOSS = RetryRule(Budget.USER)
# Resources were taken away, which is no fault of the job.
_INTERRUPTION = RetryRule(Budget.FREE)
RULES: dict[str, RetryRule] = {
    EndReason.COMPLETED: RetryRule(Budget.NONE),
    EndReason.CANCELLED: RetryRule(Budget.NONE),
    # A pause ends in PAUSED; a job that was resumed meanwhile goes on at once.
    EndReason.PAUSED: RetryRule(Budget.FREE, 0.0),
    EndReason.WORKERS_LOST: _LOSS,
    EndReason.DRIVER_LOST: _LOSS,
    # A cluster that was restarted remembers nothing of what it ran.
    EndReason.FORGOTTEN: _INTERRUPTION,
    EndReason.SUBMISSION_REFUSED: _FAULT,
    EndReason.BAD_SPEC: _FAULT,
    EndReason.DATA_ERROR: _FAULT,
    # A mount or an endpoint that is away is often back in minutes; a full disk is soon given up.
    EndReason.STORAGE_ERROR: RetryRule(Budget.USER, 30.0),
    EndReason.TRAINING_ERROR: _FAULT,
    EndReason.USER_CODE: _FAULT,
    EndReason.VERSION_MISMATCH: _FAULT,
    # Copies are equal again after a checkpoint is loaded, which only equal copies write.
    EndReason.DIVERGED: _LOSS,
    # Bad rows are left out from then on; too many of them are no accident.
    EndReason.ROWS_SKIPPED: _LOSS,
    EndReason.HANG: _LOSS,
    EndReason.DEVICE_OOM: _LOSS,
    EndReason.HOST_OOM: _LOSS,
    EndReason.HOST_LOST: _INTERRUPTION,
    EndReason.PREEMPTED: _INTERRUPTION,
    EndReason.NO_ROOM: RetryRule(Budget.FREE, 10.0),
    EndReason.NON_FINITE: _FAULT,
    # The service took the other attempt for ended; its processes only need longer than it thought.
    EndReason.RUN_IN_USE: RetryRule(Budget.FREE, 30.0),
    EndReason.RETRIES_EXHAUSTED: _FAULT,
}
# After these each worker of the next attempt holds less: its sharding groups are larger, where the
# spec leaves that `auto`.
MEMORY_SHORTAGES = (EndReason.DEVICE_OOM, EndReason.HOST_OOM)
# After these it has no worker on the host, for a while and if there is room elsewhere.
HOST_TO_BLAME = (EndReason.HANG, EndReason.HOST_LOST)


def spends_budget(reason: str) -> bool:
    """Whether a loss of workers counts as a failure; a reason that is not known does."""
    rule = RULES.get(reason)
    return rule is None or rule.budget is not Budget.FREE


def backoff_s(rule: RetryRule, num_in_a_row: int, attempt_id: str) -> float:
    """Seconds to wait after failure `num_in_a_row` (from 1); the attempt's id seeds the jitter."""
    doublings = min(max(num_in_a_row, 1) - 1, 30)
    wait_s = min(MAX_BACKOFF_S, rule.first_backoff_s * 2.0**doublings)
    digest = hashlib.sha256(attempt_id.encode()).digest()
    share = int.from_bytes(digest[:4], "big") / 2**32
    return round(wait_s * (1.0 + _JITTER * (2.0 * share - 1.0)), 3)


@dataclass(frozen=True)
class NextAttempt:
    """What an attempt runs: its spec, and hosts that it avoids, each until a time (Unix seconds).

    After a reason in `end_on` the driver ends the attempt rather than restart workers in it,
    because the next attempt differs. `notes` tell users what is different.
    """

    spec: JobSpec
    avoided_hosts: tuple[tuple[str, float], ...] = ()
    end_on: tuple[EndReason, ...] = ()
    notes: tuple[str, ...] = ()


def next_attempt(
    job: Job, ended: Sequence[Attempt], group_sizes: Mapping[str, int], now: float
) -> NextAttempt:
    """What the next attempt of a job does differently from those that `ended`.

    `group_sizes` has the shard_group_size that attempts chose, by attempt id.
    """
    avoided = _avoided_hosts(job, ended, now)
    notes = [f"host {host} is avoided" for host, _ in avoided]
    spec = job.spec
    oom = (group_sizes.get(each.id) for each in ended if each.end_reason in MEMORY_SHORTAGES)
    short = [size for size in oom if size]
    if spec.parallelism.shard_group_size != "auto":
        return NextAttempt(spec, avoided, (), tuple(notes))
    larger = _larger_group_size(spec, max(short)) if short else None
    if larger is not None:
        spec = with_parallelism(spec, shard_group_size=larger) or spec
        notes.append(f"shard_group_size is {larger}, as memory ran out at {max(short)}")
    can_grow = _larger_group_size(job.spec, larger or max(short, default=1)) is not None
    return NextAttempt(spec, avoided, MEMORY_SHORTAGES if can_grow else (), tuple(notes))


def _avoided_hosts(job: Job, ended: Sequence[Attempt], now: float) -> tuple[tuple[str, float], ...]:
    """Hosts that ended an attempt lately, each until its time."""
    until: dict[str, float] = {}
    for attempt in ended:
        host = attempt.evidence.get("host")
        if host and attempt.end_reason in HOST_TO_BLAME:
            until[host] = (attempt.ended_at or now) + job.spec.recovery.exclude_host_s
    return tuple(sorted((host, time) for host, time in until.items() if time > now))


def _larger_group_size(spec: JobSpec, size: int) -> int | None:
    """The next larger shard_group_size that the spec allows; None where there is none.

    Each that is tried costs a check of the whole spec: only those that divide both bounds of the
    workers, as they must.
    """
    sizes = spec.parallelism
    common = math.gcd(sizes.min_workers, sizes.world_size)
    for candidate in range(size + 1, min(common, MAX_WORKERS) + 1):
        if common % candidate == 0 and with_parallelism(spec, shard_group_size=candidate):
            return candidate
    return None


def with_parallelism(spec: JobSpec, **changes: object) -> JobSpec | None:
    """The spec with changes to its `parallelism`; None where they are not legal."""
    document = spec.model_dump(mode="json")
    document["parallelism"] |= changes
    try:
        return validate_spec(document)
    except SpecError:
        return None
