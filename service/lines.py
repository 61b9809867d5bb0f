"""Lines of a timeline that the service writes: a sentence for people, and facts for programs."""

from __future__ import annotations

from collections.abc import Mapping

from service.domain import Attempt, Job, TimelineEvent


def line(
    job: Job,
    attempt: Attempt | None,
    now: float,
    kind: str,
    message: str,
    *,
    actor: str = "service",
    data: Mapping[str, object] | None = None,
) -> TimelineEvent:
    """A timeline line; the store gives it its id. `data` says for programs what `message` does."""
    return TimelineEvent(
        id=0,
        job_id=job.id,
        attempt_id=attempt.id if attempt else None,
        time=now,
        kind=kind,
        message=message,
        actor=actor,
        data={"attempt": attempt.index, **(data or {})} if attempt else dict(data or {}),
    )


def end_facts(job: Job, ended: Attempt | None) -> dict[str, object]:
    """What programs want to know of an end: how often the job failed, and what was seen."""
    evidence = dict(ended.evidence) if ended else {}
    facts: dict[str, object] = {
        "num_failures": job.num_failures,
        "max_failures": job.spec.retry.max_failures,
    }
    return {**facts, "evidence": evidence} if evidence else facts


def reason_of(ended: Attempt) -> dict[str, object]:
    """The reason of an attempt's end."""
    return {"reason": ended.end_reason.value} if ended.end_reason else {}
