"""Every decision of `service.lifecycle`, written out.

    python -m service.lifecycle_table [reasons|observations]

Without arguments it prints the table of all decisions, which a test holds against a stored one.
With `reasons` it prints what follows which reason, with `observations` what follows what the
cluster says of an attempt whose driver reported nothing, both as ARCHITECTURE.md shows them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from service.domain import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    QueueNote,
    ReportedEnd,
)
from service.lifecycle import REPORT_GRACE_S, Action, decide
from service.retries import RULES, Budget, Change
from trainer.spec import JobSpec, validate_spec

NOW = 1_000_000.0
REQUESTS = ("nothing", "pause", "preempt", "cancel")
SITUATIONS = ("no attempt", "not sent", "live", "ended")
_STATES = tuple(ObservedState)
_BUDGETS = {
    Budget.USER: "another attempt, on the user's budget",
    Budget.FREE: "another attempt, free",
    Budget.NONE: "the job ends",
}
_CHANGES = {
    Change.LARGER_GROUPS: "a larger shard_group_size, where it is `auto`",
    Change.AVOID_HOST: "not on that host for `recovery.exclude_host_s`",
    Change.WAIT_FOR_ROOM: "waits until its fewest workers fit",
}
_SPECIAL = {
    EndReason.COMPLETED: "the job has succeeded",
    EndReason.CANCELLED: "the job is cancelled",
    EndReason.PAUSED: "the job is PAUSED; after a preemption it waits again",
}


def decisions() -> list[str]:
    """One line for every (status, request, situation, report): what each observation leads to.

    A cell reads `STATUS`, then `-> action`, then why the attempt ended, as far as there is any.
    Lines that say the same for several reports are one.
    """
    rows: list[str] = []
    for status in JobStatus:
        for request in REQUESTS:
            for situation in SITUATIONS:
                rows += _rows(status, request, situation)
    return rows


def _rows(status: JobStatus, request: str, situation: str) -> Iterator[str]:
    reports = (None, *EndReason) if situation == "live" else (None,)
    told = [(each, _cells(status, request, situation, each)) for each in reports]
    head = f"{status} / asked: {request} / {situation}"
    ordered = sorted(told, key=lambda row: str(row[1]))
    for cells, same in groupby(ordered, key=lambda row: row[1]):
        names = ", ".join(sorted("none" if each is None else each for each, _ in same))
        suffix = f" / reported: {names}" if situation == "live" else ""
        yield f"{head}{suffix}"
        yield from (f"    {state:<12}{cell}" for state, cell in cells)


def _cells(
    status: JobStatus, request: str, situation: str, report: EndReason | None
) -> tuple[tuple[str, str], ...]:
    job = job_in(status, request)
    attempt = attempt_in(job, situation, report)
    if attempt is not None:
        job = replace(job, current_attempt_id=attempt.id)
    return tuple((str(state), _cell(job, attempt, state)) for state in _STATES)


def _cell(job: Job, attempt: Attempt | None, state: ObservedState) -> str:
    decision = decide(job, attempt, Observation(state), NOW)
    parts = [str(decision.job.status)]
    if decision.action is not Action.NONE:
        parts.append(f"-> {decision.action}")
    before = attempt.end_reason if attempt else None
    after = decision.attempt.end_reason if decision.attempt else None
    if after is not None and after is not before:
        report = attempt.reported_end if attempt else None
        is_as_told = report is not None and report.reason is after
        parts.append(f"(attempt ended: {'as reported' if is_as_told else after})")
    return " ".join(parts)


def job_in(status: JobStatus, request: str) -> Job:
    """A job in a status of which something was asked, with a budget of one failure."""
    note = {
        "pause": QueueNote(stop_at=NOW + 60.0),
        "preempt": QueueNote(stop_at=NOW + 60.0, preempted_by="job-other"),
    }.get(request, QueueNote())
    return Job(
        id="job-table",
        name="table",
        spec=_spec(),
        status=status,
        created_at=NOW - 500.0,
        cancel_requested=request == "cancel",
        pause_requested=request in ("pause", "preempt"),
        queue_note=note.document,
    )


def attempt_in(job: Job, situation: str, report: EndReason | None) -> Attempt | None:
    """The newest attempt; what its driver reported arrived a good while ago."""
    if situation == "no attempt":
        return None
    fresh = Attempt(id=f"{job.id}-a0", job_id=job.id, index=0, created_at=NOW - 400.0)
    if situation == "not sent":
        return fresh
    sent = replace(fresh, submitted_at=NOW - 300.0, last_submit_at=NOW - 300.0)
    if situation == "ended":
        return replace(sent, ended_at=NOW - 100.0, end_reason=EndReason.HOST_LOST)
    told_at = NOW - 1.5 * REPORT_GRACE_S
    return replace(sent, reported_end=ReportedEnd(report, "", told_at) if report else None)


def _spec() -> JobSpec:
    return validate_spec(
        {
            "name": "table",
            "data": {"path": "/data", "label": {"column": "rating"}},
            "features": [
                {"name": "user", "type": "id", "table": "users"},
                {"name": "age", "type": "dense"},
            ],
            "embedding_tables": [{"name": "users", "num_embeddings": 10, "embedding_dim": 8}],
            "model": {
                "dense_arch": {"layer_sizes": [8]},
                "over_arch": {"layer_sizes": [4, 1]},
                "tasks": [{"loss": "mse"}],
            },
            "parallelism": {"workers": 2, "shard_group_size": 2},
            "retry": {"max_failures": 1},
        }
    )


def reasons() -> list[str]:
    """The Markdown table of what follows which reason."""
    rows = ["| reason | kind | what follows | waits (s) | next attempt |", "|---|---|---|---|---|"]
    for reason, rule in RULES.items():
        waits = f"{rule.first_backoff_s:g} to {rule.max_backoff_s:g}, ±{rule.jitter:.0%}"
        has_wait = rule.is_retried and rule.max_backoff_s > 0
        changes = "; ".join(_CHANGES[change] for change in rule.changes)
        follows = _SPECIAL.get(reason, _BUDGETS[rule.budget])
        rows.append(
            f"| `{reason}` | {rule.kind} | {follows} | {waits if has_wait else ''} | {changes} |"
        )
    return rows


def observations() -> list[str]:
    """The Markdown table of what follows what the cluster says, for a live attempt."""
    rows = [
        "| status | asked | " + " | ".join(f"`{state}`" for state in _STATES) + " |",
        "|---|---|" + "---|" * len(_STATES),
    ]
    for status in (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.STOPPING):
        for request in REQUESTS if status is JobStatus.RUNNING else REQUESTS[:1]:
            cells = (cell for _, cell in _cells(status, request, "live", None))
            rows.append(f"| {status} | {request} | {' | '.join(cells)} |")
    return rows


TABLES = {"decisions": decisions, "reasons": reasons, "observations": observations}


def main(arguments: list[str]) -> int:
    """Print a table."""
    print("\n".join(TABLES[arguments[0] if arguments else "decisions"]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
