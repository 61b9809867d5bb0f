"""What people, and the queue, ask of a job, as pure functions: cancel, pause, resume, go back.

Each gives the job as it should be stored and the lines that tell of it; asking twice changes
nothing. The reconciler carries out what was asked (`service.lifecycle.decide`).
"""

from __future__ import annotations

from dataclasses import replace

from service.domain import EndReason, Job, JobStatus, QueueNote
from service.lifecycle import Decision, finish
from service.lines import line

# Nothing runs for a job in one of these, so what is asked is done at once.
_AT_REST = frozenset({JobStatus.QUEUED, JobStatus.PAUSED})


def request_cancel(job: Job, now: float, actor: str = "user") -> Decision:
    """Somebody asks a job to stop. A job for which nothing runs ends at once."""
    if job.status.is_terminal or job.cancel_requested:
        return Decision(job, None)
    was = {"was": job.status.value}
    asked = line(job, None, now, "cancel_requested", "cancel requested", actor=actor, data=was)
    cancelling = replace(job, cancel_requested=True)
    if job.status in _AT_REST:
        finished = finish(cancelling, EndReason.CANCELLED, f"cancelled while {_resting(job)}", now)
        return replace(finished, timeline=(asked, *finished.timeline))
    return Decision(replace(cancelling, status=JobStatus.STOPPING), None, timeline=(asked,))


def _resting(job: Job) -> str:
    return "paused" if job.status is JobStatus.PAUSED else "queued"


def request_pause(job: Job, now: float, grace_s: float, actor: str = "user") -> Decision:
    """Somebody asks a job to save, give its workers back and keep its place in the queue.

    Its workers have `grace_s` seconds to save. A queued job pauses at once.
    """
    note = QueueNote.of(job)
    is_asked = job.pause_requested and note.preempted_by is None
    if job.status.is_terminal or job.status is JobStatus.PAUSED or is_asked:
        return Decision(job, None)
    asked = line(
        job,
        None,
        now,
        "pause_requested",
        "pause requested",
        actor=actor,
        data={"was": job.status.value, "grace_s": grace_s},
    )
    if job.status is JobStatus.QUEUED:
        paused = replace(job, status=JobStatus.PAUSED, retry_at=None, queue_note=None, message="")
        return Decision(paused, None, timeline=(asked,))
    stop_at = note.stop_at if job.pause_requested else now + grace_s
    pausing = replace(note, preempted_by=None, stop_at=stop_at)
    job = replace(job, pause_requested=True, queue_note=pausing.document)
    return Decision(job, None, timeline=(asked,))


def preempt(job: Job, by: Job, now: float, grace_s: float) -> Decision:
    """A running job makes way for one of a higher priority; it waits again when it has."""
    if job.status.is_terminal or job.status in _AT_REST or job.pause_requested:
        return Decision(job, None)
    name = by.named_for(job)
    note = replace(QueueNote.of(job), preempted_by=name, stop_at=now + grace_s)
    message = f"makes way for {name} of priority {by.priority}"
    facts = {"preempted_by": name, "priority": by.priority, "grace_s": grace_s}
    told = line(job, None, now, "preemption_requested", message, data=facts)
    pausing = replace(job, pause_requested=True, queue_note=note.document)
    return Decision(pausing, None, timeline=(told,))


def request_resume(job: Job, now: float, actor: str = "user") -> Decision:
    """A paused job waits again, with its old place; one that still pauses goes on."""
    is_preempted = QueueNote.of(job).preempted_by is not None
    is_pausing = job.pause_requested and not is_preempted
    if job.status.is_terminal or not (job.status is JobStatus.PAUSED or is_pausing):
        return Decision(job, None)
    was = {"was": job.status.value}
    asked = line(job, None, now, "resume_requested", "resume requested", actor=actor, data=was)
    if job.status is JobStatus.PAUSED:
        waiting = replace(job, status=JobStatus.QUEUED, pause_requested=False, retry_at=None)
        return Decision(waiting, None, timeline=(asked,))
    # A driver that has seen the request ends all the same, and another attempt follows at once.
    note = replace(QueueNote.of(job), stop_at=None)
    going_on = replace(job, pause_requested=False, queue_note=note.document, message="")
    return Decision(going_on, None, timeline=(asked,))


def request_restart(
    job: Job, checkpoint: str, step: int, now: float, actor: str = "user"
) -> Decision:
    """A job that has ended, or rests, goes on from one of its checkpoints with a new budget."""
    if not (job.status.is_terminal or job.status in _AT_REST):
        return Decision(job, None)
    message = f"restart from step {step} requested"
    facts = {"was": job.status.value, "step": step, "checkpoint": checkpoint}
    asked = line(job, None, now, "restart_requested", message, actor=actor, data=facts)
    waiting = replace(
        job,
        status=JobStatus.QUEUED,
        resume_from=checkpoint,
        queued_at=now,
        reason=None,
        message="",
        ended_at=None,
        retry_at=None,
        num_failures=0,
        cancel_requested=False,
        pause_requested=False,
        queue_note=None,
    )
    return Decision(waiting, None, timeline=(asked,))
