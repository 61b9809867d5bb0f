"""How long to wait for the next attempt, and what it changes. Pure.

Whether there is one says the rule of the `EndReason`: another attempt counts against
`retry.max_failures`, is free, or is not made. What the driver counted as it restarted workers
inside an attempt is added when the attempt ends. Backoffs are in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.domain.models import Attempt, Job
from trainer.failures import Budget, EndReason
from trainer.spec.base import MAX_WORKERS, SpecError
from trainer.spec.job import JobSpec

MAX_BACKOFF_S = 300.0
# Share by which waits vary, so that jobs that ended together do not retry together.
_JITTER = 0.2
_MEMORY_SHORTAGES = tuple(reason for reason in EndReason if reason.rule.needs_memory)


def advice_of(reason: EndReason | None, last_attempt: EndReason | None = None) -> str:
    """What to change after a job, or an attempt, ended for `reason`; empty where nothing is.

    Where the budget was spent, the reason of the last attempt is the one that matters.
    """
    if reason is EndReason.RETRIES_EXHAUSTED and last_attempt and last_attempt.rule.advice:
        reason = last_attempt
    return reason.rule.advice if reason else ""


def spends_budget(reason: str) -> bool:
    """Whether a loss of workers counts as a failure; a reason that is not known does."""
    return reason not in {each for each in EndReason if each.rule.budget is Budget.FREE}


def backoff_s(first_s: float, num_in_a_row: int, attempt_id: str) -> float:
    """Seconds to wait after failure `num_in_a_row` (from 1); the attempt's id seeds the jitter."""
    doublings = min(max(num_in_a_row, 1) - 1, 30)
    wait_s = min(MAX_BACKOFF_S, first_s * 2.0**doublings)
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
    oom = (group_sizes.get(each.id) for each in ended if each.end_reason in _MEMORY_SHORTAGES)
    short = [size for size in oom if size]
    if spec.parallelism.shard_group_size != "auto":
        return NextAttempt(spec, avoided, (), tuple(notes))
    larger = _larger_group_size(spec, max(short)) if short else None
    if larger is not None:
        spec = with_parallelism(spec, shard_group_size=larger) or spec
        notes.append(f"shard_group_size is {larger}, as memory ran out at {max(short)}")
    can_grow = _larger_group_size(job.spec, larger or max(short, default=1)) is not None
    return NextAttempt(spec, avoided, _MEMORY_SHORTAGES if can_grow else (), tuple(notes))


def _avoided_hosts(job: Job, ended: Sequence[Attempt], now: float) -> tuple[tuple[str, float], ...]:
    """Hosts that ended an attempt lately, each until its time."""
    until: dict[str, float] = {}
    for attempt in ended:
        host = attempt.evidence.get("host")
        if host and attempt.end_reason and attempt.end_reason.rule.avoids_host:
            until[host] = (attempt.ended_at or now) + job.spec.recovery.exclude_host_s
    return tuple(sorted((host, time) for host, time in until.items() if time > now))


def _larger_group_size(spec: JobSpec, size: int) -> int | None:
    """The next larger shard_group_size that the spec allows; None where there is none.

    Each that is tried costs reading the whole spec: only those that divide both bounds of the
    workers, as they must.
    """
    sizes = spec.parallelism
    common = math.gcd(sizes.min_workers, sizes.world_size)
    for candidate in range(size + 1, min(common, MAX_WORKERS) + 1):
        if common % candidate == 0 and with_parallelism(spec, shard_group_size=candidate):
            return candidate
    return None


def with_parallelism(spec: JobSpec, **changes: object) -> JobSpec | None:
    """The spec with changes to its `parallelism`; None where they are not legal.

    Newer checks may refuse what was stored: only the layout is checked anew.
    """
    document = spec.model_dump(mode="json")
    document["parallelism"] |= changes
    try:
        return JobSpec.checked(document, {"stored": True, "laid_out": True})
    except SpecError:
        return None
