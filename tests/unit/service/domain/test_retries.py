"""Which ends are followed by another attempt, at whose expense, when, and what to change."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from service.domain import retries
from service.domain.lifecycle import (
    MAX_ATTEMPTS,
    decide,
    preempt,
    request_pause,
    request_restart,
    start,
)
from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Observation,
    ObservedState,
    QueueState,
    ReportedEnd,
)
from service.domain.retries import advice_of, backoff_s, next_attempt, with_parallelism
from tests.harness.builders import (
    ELASTIC,
    NOW,
    attempt_of,
    live_job,
    queued_job,
    reported,
    spec_document,
)
from trainer.spec import validate_spec
from trainer.spec.base import MAX_WORKERS, SpecError
from trainer.spec.parse import set_values

FAILED = Observation(ObservedState.FAILED, "exit code 1")


def test_backoff_doubles_up_to_a_limit() -> None:
    jitter = backoff_s(2.0, 1, "a") / 2.0
    assert [backoff_s(2.0, n, "a") for n in (2, 3)] == pytest.approx([4 * jitter, 8 * jitter], 1e-3)
    assert backoff_s(2.0, 10_000, "a") == pytest.approx(300.0 * jitter, 1e-3)


def test_jobs_that_ended_together_come_back_apart_and_each_at_the_same_time_again() -> None:
    waits_s = [backoff_s(100.0, 1, f"job-{n}-a0") for n in range(50)]
    assert waits_s[0] == 86.274, "whichever process asks"
    assert min(waits_s) >= 80.0
    assert max(waits_s) <= 120.0
    assert max(waits_s) - min(waits_s) > 20.0


def test_what_is_no_fault_of_the_job_is_tried_again_whatever_the_budget() -> None:
    spent, attempt = live_job(num_failures=99, queue_note=QueueState(num_free=4))
    for reason, wait_s in (
        (EndReason.FORGOTTEN, 2.0),
        (EndReason.HOST_LOST, 2.0),
        (EndReason.PREEMPTED, 2.0),
        (EndReason.NO_ROOM, 10.0),
        # Another attempt has half a minute to leave the run folder.
        (EndReason.RUN_IN_USE, 30.0),
    ):
        assert reason.rule.first_backoff_s == wait_s
        ended = reported(attempt, reason)
        again = decide(spent, ended, FAILED, NOW).job
        assert (again.status, again.num_failures) == (JobStatus.QUEUED, 99), reason
        assert again.retry_at == NOW + backoff_s(wait_s, 5, attempt.id)


def test_storage_that_is_away_gets_minutes_to_come_back_on_the_users_budget() -> None:
    job, attempt = live_job()
    failed = reported(attempt, EndReason.STORAGE_ERROR, "the endpoint does not answer")
    again = decide(job, failed, FAILED, NOW).job
    assert (again.status, again.num_failures) == (JobStatus.QUEUED, 1)
    assert 24.0 <= again.retry_at - NOW <= 36.0
    spent = replace(job, num_failures=job.spec.retry.max_failures)
    given_up = decide(spent, failed, FAILED, NOW).job
    assert (given_up.status, given_up.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert "the endpoint does not answer" in given_up.message


def test_what_never_gets_better_is_given_up_after_many_attempts_since_a_restart() -> None:
    job, attempt = live_job()
    late = replace(reported(attempt, EndReason.NO_ROOM, "2 of 3 hosts"), index=MAX_ATTEMPTS)
    again = decide(job, late, FAILED, NOW).job
    assert again.retry_at == NOW + backoff_s(EndReason.NO_ROOM.rule.first_backoff_s, 1, attempt.id)
    for _ in range(MAX_ATTEMPTS - 1):
        assert again.status is JobStatus.QUEUED
        started = start(again, NOW, again.queue_note)
        again = decide(started.job, replace(late, id=started.attempt.id), FAILED, NOW).job
    assert (again.status, again.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    assert "no_room): 2 of 3 hosts" in again.message
    restarted = request_restart(again, "step-1", 1, NOW).job
    assert restarted.queue_note.num_free is None


def test_a_driver_that_pauses_unasked_is_given_up_and_one_that_was_asked_is_not() -> None:
    job, attempt = live_job(queue_note=QueueState(num_free=MAX_ATTEMPTS - 1))
    paused = reported(attempt, EndReason.PAUSED)
    ended = decide(job, paused, FAILED, NOW).job
    assert (ended.status, ended.reason) == (JobStatus.FAILED, EndReason.RETRIES_EXHAUSTED)
    asked = decide(request_pause(job, NOW, 120).job, paused, FAILED, NOW).job
    assert (asked.status, asked.queue_note.num_free) == (JobStatus.PAUSED, None)
    preempted = decide(preempt(job, queued_job(priority=5), NOW, 120).job, paused, FAILED, NOW).job
    assert (preempted.status, preempted.queue_note.num_free) == (JobStatus.QUEUED, None)


# ---- what the next attempt does otherwise


def _ended(job: Job, index: int, reason: EndReason) -> Attempt:
    report = ReportedEnd(reason, "", NOW, {"host": "10.0.0.7"})
    return attempt_of(job, index=index, ended_at=NOW, end_reason=reason, reported_end=report)


def test_a_host_to_blame_is_avoided_for_a_while() -> None:
    job = queued_job()
    until = NOW + job.spec.recovery.exclude_host_s
    for reason in (EndReason.HANG, EndReason.VERSION_MISMATCH):
        ended = _ended(job, 0, reason)
        assert next_attempt(job, [ended], {}, NOW + 1).avoided_hosts == (("10.0.0.7", until),)
        assert next_attempt(job, [ended], {}, until).avoided_hosts == ()
    lost = _ended(job, 0, EndReason.WORKERS_LOST)
    assert next_attempt(job, [lost], {}, NOW + 1).avoided_hosts == ()


def test_after_a_shortage_of_memory_groups_are_larger_where_the_spec_leaves_it_open() -> None:
    job = queued_job(parallelism={"workers": 8, "shard_group_size": "auto"})
    assert next_attempt(job, [], {}, NOW).end_on == (EndReason.DEVICE_OOM, EndReason.HOST_OOM)
    short, later = _ended(job, 0, EndReason.DEVICE_OOM), _ended(job, 1, EndReason.HOST_LOST)
    sizes = {short.id: 2, later.id: 4}
    following = next_attempt(job, [short, later], sizes, NOW)
    assert following.spec.parallelism.shard_group_size == 4
    assert any("shard_group_size is 4" in note for note in following.notes)


def test_a_stored_job_that_newer_checks_refuse_is_cut_and_grown_as_any_other() -> None:
    job = queued_job(parallelism={"workers": {"min": 4, "max": 8}, "shard_group_size": "auto"})
    recovery = job.spec.recovery.model_copy(update={"exclude_host_s": 1e12})
    stored = replace(job, spec=job.spec.model_copy(update={"recovery": recovery}))
    with pytest.raises(SpecError, match="exclude_host_s"):
        validate_spec(stored.spec.model_dump(mode="json"))
    short = _ended(stored, 0, EndReason.DEVICE_OOM)
    assert next_attempt(stored, [short], {short.id: 2}, NOW).spec.parallelism.group_size == 4
    cut = with_parallelism(stored.spec, workers={"min": 4, "max": 6})
    assert cut is not None and cut.parallelism.world_size == 6
    assert with_parallelism(stored.spec, shard_group_size=3) is None


def test_a_quota_that_leaves_one_copy_holds_whatever_was_asked_of_several() -> None:
    job = queued_job(
        parallelism={
            **{"workers": {"min": 4, "max": 8}, "shard_group_size": 4},
            **{"placement": "inter_host", "spares": 1, "sync": {"every_steps": 4}},
        }
    )
    one_copy = with_parallelism(job.spec, workers={"min": 4, "max": 4})
    assert one_copy is not None and one_copy.parallelism.num_replicas == 1
    assert (job.spec.parallelism.spare_workers, one_copy.parallelism.spare_workers) == (4, 0)


def test_only_groups_that_divide_the_workers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(retries, "with_parallelism", lambda _, **sizes: tried.append(sizes))
    for workers in ({"min": 1, "max": MAX_WORKERS}, {"min": 9000, "max": 16200}, MAX_WORKERS):
        job = queued_job(parallelism={"workers": workers, "shard_group_size": "auto"})
        assert next_attempt(job, [], {}, NOW).end_on == ()
    assert len(tried) == 35 + 14, "divisors of 1800 and of 2^14, but for 1"


def test_where_no_larger_group_is_allowed_or_legal_the_driver_tries_again_by_itself() -> None:
    for sizes, held in (
        ({"workers": 8, "shard_group_size": 2}, 2),
        ({"workers": 4, "shard_group_size": "auto"}, 4),
    ):
        job = queued_job(parallelism=sizes)
        ended = _ended(job, 0, EndReason.DEVICE_OOM)
        following = next_attempt(job, [ended], {f"{job.id}-a0": held}, NOW)
        assert (following.spec, following.end_on) == (job.spec, ())


# ---- advice


def test_every_end_that_somebody_must_mend_has_advice() -> None:
    without = {reason for reason in EndReason if not advice_of(reason)}
    assert without == {EndReason.COMPLETED, EndReason.CANCELLED, EndReason.PAUSED}


def test_a_spent_budget_is_explained_by_the_last_attempt() -> None:
    exhausted = EndReason.RETRIES_EXHAUSTED
    assert advice_of(exhausted, EndReason.HANG) == advice_of(EndReason.HANG)
    assert "retry.max_failures" in advice_of(exhausted, EndReason.COMPLETED)
    assert advice_of(None) == ""


def _is_unknown(path: str) -> bool:
    with pytest.raises(SpecError) as refused:
        validate_spec(set_values(spec_document(parallelism=ELASTIC), {path: [None]}))
    return "extra_forbidden" in {each.code for each in refused.value.problems}


def test_the_fields_that_are_advised_exist() -> None:
    named = {
        path
        for reason in EndReason
        for path in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", advice_of(reason))
    }
    assert len(named) >= 8
    assert not any(map(_is_unknown, named))
    assert _is_unknown("retry.foo")
