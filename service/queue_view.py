"""The queue and the use of projects as people see them: pure, over the jobs that live."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from service.api.queue_schemas import ProjectOut, QueueOut, QueuePlace, RunningJob, WaitingJob
from service.capacity import workers_held
from service.domain import Job, JobStatus, QueueNote
from service.projects import Project, Usage
from service.sizes import sizes_of_job

_AT_REST = (JobStatus.QUEUED, JobStatus.PAUSED)


def place_of(job: Job) -> QueuePlace | None:
    """Where a job stands in the queue; None where it does not wait."""
    if job.status is not JobStatus.QUEUED:
        return None
    note = QueueNote.of(job)
    return QueuePlace(position=note.position, reason=note.reason)


def queue_view(live: Sequence[Job], visible: Collection[str] | None) -> QueueOut:
    """The queue as somebody sees who may see the jobs of some projects (None: of all)."""
    shown = [job for job in live if visible is None or job.project in visible]
    waiting = [job for job in shown if job.status is JobStatus.QUEUED]
    running = [job for job in shown if job.status not in _AT_REST]
    return QueueOut(
        waiting=[_waiting(job) for job in sorted(waiting, key=_turn)],
        running=[_running(job) for job in running],
    )


def _turn(job: Job) -> tuple[float, int, float]:
    position = QueueNote.of(job).position
    return math.inf if position is None else position, -job.priority, job.waits_since


def _waiting(job: Job) -> WaitingJob:
    sizes, note = sizes_of_job(job), QueueNote.of(job)
    return WaitingJob(
        id=job.id,
        name=job.name,
        project=job.project,
        priority=job.priority,
        min_workers=sizes.min_workers,
        world_size=sizes.world_size,
        waits_since=job.waits_since,
        retry_at=job.retry_at,
        position=note.position,
        reason=note.reason,
    )


def _running(job: Job) -> RunningJob:
    return RunningJob(
        id=job.id,
        name=job.name,
        project=job.project,
        priority=job.priority,
        preemptible=job.spec.preemptible,
        num_workers=workers_held(job),
        is_pausing=job.pause_requested,
        preempted_by=QueueNote.of(job).preempted_by,
    )


def usage_by_project(live: Sequence[Job]) -> dict[str, Usage]:
    """What the jobs of each project hold."""
    workers, running, queued = Counter[str](), Counter[str](), Counter[str]()
    for job in live:
        workers[job.project] += workers_held(job)
        running[job.project] += job.status not in _AT_REST
        queued[job.project] += job.status is JobStatus.QUEUED
    return {name: Usage(workers[name], running[name], queued[name]) for name in workers}


def project_view(project: Project, usage: Usage) -> ProjectOut:
    """A project with what its jobs hold."""
    return ProjectOut(**vars(project), **vars(usage))
