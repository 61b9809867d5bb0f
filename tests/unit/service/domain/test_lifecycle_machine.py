"""One job on a cluster that loses answers, forgets and dies, under any order of requests.

The model is the cluster: which attempts really run there. Whatever happens, no healthy attempt is
stopped unless somebody asked, no two run at once, what has ended stays so, and budgets hold.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.domain.lifecycle import (
    NOT_FOUND_GRACE_S,
    Action,
    Decision,
    decide,
    preempt,
    request_cancel,
    request_pause,
    request_restart,
    request_resume,
    start,
    submission_accepted,
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
from service.domain.retries import MAX_BACKOFF_S
from tests.harness.builders import NOW, queued_job
from tests.harness.properties import examples
from trainer.failures import Budget

MAX_FAILURES = 2
GRACE_S = 120.0
# Whether the cluster is away, and whether a submission is answered and whether it arrives if not.
_POLLS = st.tuples(st.sampled_from([False, False, True]), st.booleans(), st.booleans())
OTHER = queued_job(name="other", priority=9)
# What a driver may say; it says "paused" or "cancelled" only when it was asked.
_SAID = st.sampled_from(
    [each for each in EndReason if each not in (EndReason.CANCELLED, EndReason.PAUSED)]
)


class Lifecycle(RuleBasedStateMachine):
    """The job as stored, and the cluster as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.job: Job = queued_job(max_failures=MAX_FAILURES)
        self.attempts: dict[str, Attempt] = {}
        self.cluster: dict[str, ObservedState] = {}
        self.is_answering = True
        self.asked_to_pause: set[str] = set()
        self.num_restarts = 0
        self.was_cancelled = False
        self.ended: Job | None = None

    # ---- what happens around

    @rule(seconds=st.sampled_from([0.5, 5.0, NOT_FOUND_GRACE_S, 61.0, 121.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self._running())
    @rule(reason=_SAID, is_told=st.booleans())
    def the_driver_ends(self, reason: EndReason, is_told: bool) -> None:
        self._end(self._running()[0], reason if is_told else None)

    @precondition(lambda self: set(self._running()) & self.asked_to_pause)
    @rule()
    def the_driver_has_saved(self) -> None:
        self._end(self._running()[0], EndReason.PAUSED)

    @precondition(lambda self: self.cluster)
    @rule()
    def the_cluster_restarts_and_forgets(self) -> None:
        self.cluster.clear()

    def _end(self, attempt_id: str, reason: EndReason | None) -> None:
        is_good = reason is EndReason.COMPLETED
        self.cluster[attempt_id] = ObservedState.SUCCEEDED if is_good else ObservedState.FAILED
        attempt = self.attempts[attempt_id]
        if reason is not None and attempt.end_reason is None:
            report = ReportedEnd(reason, "", self.now)
            self.attempts[attempt_id] = replace(attempt, reported_end=report)
        elif is_good:
            self.cluster[attempt_id] = ObservedState.FAILED

    # ---- what is asked

    @precondition(lambda self: self.attempts)
    @rule()
    def somebody_cancels(self) -> None:
        self.was_cancelled = True
        self._store(request_cancel(self.job, self.now).job)

    @rule()
    def somebody_pauses(self) -> None:
        self._store(request_pause(self.job, self.now, GRACE_S).job)

    @rule()
    def somebody_resumes(self) -> None:
        self._store(request_resume(self.job, self.now).job)

    @precondition(lambda self: self._is_live() and not self.job.pause_requested)
    @rule()
    def the_queue_preempts(self) -> None:
        self._store(preempt(self.job, OTHER, self.now, GRACE_S).job)

    @precondition(lambda self: self.num_restarts < 3 and not self._is_live())
    @rule()
    def somebody_goes_back(self) -> None:
        self.num_restarts += 1
        self.was_cancelled, self.ended = False, None
        self._store(request_restart(self.job, "step-00000100-a0-r0", 100, self.now).job)

    # ---- what the service does

    @rule(polls=st.lists(_POLLS, min_size=1, max_size=4))
    def the_service_polls(self, polls: list[tuple[bool, bool, bool]]) -> None:
        for is_away, is_answered, arrives in polls:
            self.is_answering = not is_away
            self._admit()
            self._poll(is_answered, arrives)

    def _admit(self) -> None:
        is_due = (self.job.retry_at or 0.0) <= self.now
        if self.job.status is JobStatus.QUEUED and is_due and self.is_answering:
            decision = start(self.job, self.now, QueueState(workers=4))
            assert decision.attempt.id not in self.attempts, "an attempt's id is never used twice"
            self._store(decision.job, decision.attempt)

    def _poll(self, is_answered: bool, arrives: bool) -> None:
        attempt = self._newest()
        state = self._observe(attempt)
        decision = decide(self.job, attempt, Observation(state), self.now)
        if state is ObservedState.UNREACHABLE:
            assert (decision.action, decision.attempt) == (Action.NONE, attempt)
            assert decision.job.num_failures == self.job.num_failures
        self._store(decision.job, decision.attempt)
        if decision.action is Action.SUBMIT:
            self._submit(is_answered, arrives)
        elif decision.action is Action.STOP:
            self._stop()
        elif decision.action is Action.PAUSE:
            assert self.job.pause_requested
            self.asked_to_pause.add(decision.attempt.id)

    def _submit(self, is_answered: bool, arrives: bool) -> None:
        attempt = self._newest()
        assert attempt is not None
        assert not self.job.pause_requested
        assert not self.job.cancel_requested
        sent = replace(attempt, last_submit_at=self.now)
        self._store(self.job, sent)
        if is_answered or arrives:
            self.cluster.setdefault(attempt.id, ObservedState.RUNNING)
        if is_answered:
            decision = submission_accepted(self.job, sent, self.now)
        else:
            decision = Decision(replace(self.job, message="no answer"), sent)
        self._store(decision.job, decision.attempt)

    def _stop(self) -> None:
        attempt = self._newest()
        was_asked = self.job.cancel_requested or self.job.pause_requested
        assert was_asked or attempt.reported_end is not None, "nobody asked to stop it"
        if self.cluster.get(attempt.id) is ObservedState.RUNNING:
            self.cluster[attempt.id] = ObservedState.STOPPED

    def _observe(self, attempt: Attempt | None) -> ObservedState:
        if not self.is_answering or attempt is None or attempt.end_reason is not None:
            return ObservedState.UNREACHABLE
        return self.cluster.get(attempt.id, ObservedState.NOT_FOUND)

    def _newest(self) -> Attempt | None:
        return self.attempts.get(self.job.current_attempt_id or "")

    def _is_live(self) -> bool:
        return not (self.job.status.is_terminal or self.job.status.is_at_rest)

    def _running(self) -> list[str]:
        return [name for name, state in self.cluster.items() if state is ObservedState.RUNNING]

    def _store(self, job: Job, attempt: Attempt | None = None) -> None:
        self.job = job
        if attempt is not None:
            self.attempts[attempt.id] = attempt
        if job.status.is_terminal and self.ended is None:
            self.ended = job

    # ---- what holds

    @invariant()
    def no_two_attempts_run(self) -> None:
        assert len(self._running()) <= 1

    @invariant()
    def what_runs_is_the_newest_attempt(self) -> None:
        assert set(self._running()) <= {self.job.current_attempt_id}

    @invariant()
    def nothing_runs_for_a_job_that_rests_or_has_ended(self) -> None:
        at_rest = self.job.status in (JobStatus.QUEUED, JobStatus.PAUSED)
        if at_rest or self.job.status.is_terminal:
            assert self._running() == []

    @invariant()
    def what_has_ended_stays_so(self) -> None:
        if self.ended is not None:
            assert self.job == self.ended

    @invariant()
    def only_who_was_cancelled_is(self) -> None:
        assert self.was_cancelled or self.job.status is not JobStatus.CANCELLED

    @invariant()
    def budgets_hold(self) -> None:
        if not self.job.status.is_terminal:
            assert self.job.num_failures <= MAX_FAILURES
        paid = [
            each
            for each in self.attempts.values()
            if each.end_reason is not None and each.end_reason.rule.budget is Budget.USER
        ]
        assert len(paid) <= (MAX_FAILURES + 1) * (1 + self.num_restarts)

    @invariant()
    def a_paused_job_was_asked_to(self) -> None:
        if self.job.status is JobStatus.PAUSED:
            assert not self.job.pause_requested

    def teardown(self) -> None:
        """Whatever happened, the job ends once each attempt is lost soon after it was made."""
        self.is_answering = True
        # One attempt may be left from before, and be ended or forgotten for free.
        for _ in range(MAX_FAILURES + 2):
            self.somebody_resumes()
            self.now += 2 * MAX_BACKOFF_S
            self._admit()
            self._poll(is_answered=True, arrives=True)
            for attempt_id in self._running():
                self._end(attempt_id, None)
            self._poll(is_answered=True, arrives=True)
        assert self.job.status.is_terminal


Lifecycle.TestCase.settings = settings(max_examples=examples(200, fast=40), stateful_step_count=50)
TestLifecycle = Lifecycle.TestCase
