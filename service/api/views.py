"""Response bodies made from domain objects: exports, queue, projects, jobs and attempts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from service.domain.membership import (
    current_membership,
    membership_of,
    missing,
    num_current,
    num_wanted,
    sizes_of_job,
    workers_held,
)
from service.domain.metrics import compared
from service.domain.models import Attempt, Job, JobStatus, Progress, Project
from service.domain.retries import advice_of
from service.domain.sweeps import Observed, Sweep, best_of, num_of_trials
from service.errors import ExportNotReady
from service.jobs.run_storage import run_dir_of
from service.schemas.admin import ProjectOut
from service.schemas.jobs import (
    AttemptOut,
    ComparedOut,
    ExportOut,
    JobDetail,
    JobSummary,
    MembershipOut,
    ProgressOut,
    QueueOut,
    QueuePlace,
    RunningJob,
    WaitingJob,
)
from service.schemas.sweeps import SweepDetail, SweepSummary, TrialOut
from service.settings import Settings
from trainer.export.artifact import ArtifactError
from trainer.export.requests import ExportFolder, list_exports
from trainer.protocol.run_dir import RunDir
from trainer.spec.parse import set_values

# A job may make any number.
_MAX_EXPORTS = 200


def exports_of(run_dir: RunDir) -> list[ExportOut]:
    """The newest exports of a job, oldest first; one that is being deleted is left out."""
    found = []
    for folder in list_exports(run_dir)[-_MAX_EXPORTS:]:
        with suppress(OSError, ValueError):
            try:
                found.append(describe(folder))
            except ExportNotReady as error:  # it was damaged
                wanted = vars(folder.wanted)
                found.append(ExportOut(**wanted, id=folder.id, status="failed", message=str(error)))
    return found


def describe(folder: ExportFolder) -> ExportOut:
    """The body of an export; raises `ExportNotReady` where it was damaged."""
    facts = {**vars(folder.wanted), "id": folder.id, "status": folder.status}
    facts["message"] = folder.message
    if facts["status"] == "succeeded":
        try:
            manifest = folder.read_manifest()
        except ArtifactError as error:
            raise ExportNotReady(folder.id, "damaged", str(error)) from error
        facts |= {"step": manifest.step, "size_bytes": manifest.size_bytes}
        facts["report"] = folder.read_report()
    return ExportOut(**facts)


def queue_position(job: Job) -> QueuePlace | None:
    """Where a job stands in the queue; None where it does not wait."""
    if job.status is not JobStatus.QUEUED:
        return None
    state = job.queue_note
    return QueuePlace(position=state.position, reason=state.reason)


def queue_view(live: Sequence[Job], visible: Collection[str] | None) -> QueueOut:
    """The queue, as far as its jobs are in `visible` projects (None: all)."""
    shown = [job for job in live if visible is None or job.project in visible]
    waiting = [job for job in shown if job.status is JobStatus.QUEUED]
    running = [job for job in shown if not job.status.is_at_rest]
    return QueueOut(
        waiting=[_waiting(job) for job in sorted(waiting, key=_turn)],
        running=[_running(job) for job in running],
    )


def _turn(job: Job) -> tuple[float, int, float]:
    position = job.queue_note.position
    return math.inf if position is None else position, -job.priority, job.waits_since


def _waiting(job: Job) -> WaitingJob:
    # Of both reasons the body has that of the queue.
    facts = {**vars(job), **vars(sizes_of_job(job)), **vars(job.queue_note)}
    return WaitingJob(**facts, waits_since=job.waits_since)


def _running(job: Job) -> RunningJob:
    return RunningJob(
        **vars(job),
        preemptible=job.spec.preemptible,
        num_workers=workers_held(job),
        is_pausing=job.pause_requested,
        preempted_by=job.queue_note.preempted_by,
    )


def projects_view(live: Iterable[Job], quotas: Iterable[Project]) -> list[ProjectOut]:
    """Every project that has quotas or live jobs, by name, with what its jobs hold now."""
    known = {project.name: project for project in quotas}
    workers, running, queued = Counter[str](), Counter[str](), Counter[str]()
    for job in live:
        workers[job.project] += workers_held(job)
        running[job.project] += not job.status.is_at_rest
        queued[job.project] += job.status is JobStatus.QUEUED
    return [
        ProjectOut(
            **vars(known.get(name) or Project(name)),
            num_workers=workers[name],
            num_running_jobs=running[name],
            num_queued_jobs=queued[name],
        )
        for name in sorted({*known, *workers})
    ]


def summary_of(job: Job) -> JobSummary:
    return JobSummary(**_fields_of(job))


def detail_of(job: Job, settings: Settings) -> JobDetail:
    fields = {**_fields_of(job), "membership": membership_view(job)}
    run_dir = str(run_dir_of(settings, job.id).root)
    return JobDetail(**fields, compared=compared_view(job), run_dir=run_dir)


def attempt_view(attempt: Attempt) -> AttemptOut:
    """An attempt, with what to change if it ended badly."""
    shown = AttemptOut.model_validate(attempt)
    return shown.model_copy(update={"advice": advice_of(attempt.end_reason)})


def compared_view(job: Job) -> list[ComparedOut]:
    """What the plan of a job's newest workers predicts, beside what was measured."""
    membership = current_membership(job)
    if membership is None or membership.prediction is None:
        return []
    found = compared(membership.prediction, job.latest_metrics)
    return [ComparedOut.model_validate(each) for each in found]


def membership_view(job: Job) -> MembershipOut | None:
    """Who trains in a job's newest attempt, as far as it has told."""
    membership = current_membership(job)
    if membership is None:
        return None
    now = time.time()
    excluded = [host for host in membership.excluded_hosts if host.until > now]
    return MembershipOut(
        **vars(membership) | {"excluded_hosts": excluded},
        num_current=num_current(membership),
        num_wanted=num_wanted(membership),
        host_copies_needed=job.spec.parallelism.num_hosts_needed,
        missing=list(missing(membership)),
    )


def _fields_of(job: Job) -> dict[str, Any]:
    sizes = sizes_of_job(job)
    return {
        **vars(job),
        **vars(sizes),
        "labels": job.spec.labels,
        "watched_metric": job.spec.model.watched_metric,
        "num_replicas": sizes.num_replicas,
        "num_attempts": job.num_attempts,
        "progress": progress_of(job.progress, job.status),
        "queue": queue_position(job),
        "advice": advice_of(job.reason),
        **_group_counts(job),
    }


def _group_counts(job: Job) -> dict[str, int]:
    membership = membership_of(job)
    if membership is None or job.status is not JobStatus.RUNNING:
        return {}
    return {
        "num_current_groups": num_current(membership),
        "num_wanted_groups": num_wanted(membership),
    }


def progress_of(progress: Progress, status: JobStatus) -> ProgressOut:
    """How far a job has come; only one that runs is known to end at some time."""
    share = progress.step / progress.total_steps if progress.total_steps else 0.0
    rows_left = (progress.eta_s or 0.0) * progress.rows_per_s
    if progress.rows and rows_left > 0 and progress.step < progress.total_steps:
        # By rows, as steps before a resize may have had more or fewer of them.
        share = progress.rows / (progress.rows + rows_left)
    known = {**vars(progress), "percent": min(100.0, max(0.0, 100.0 * share))}
    return ProgressOut(**known if status is JobStatus.RUNNING else {**known, "eta_s": None})


def sweep_summary(sweep: Sweep) -> SweepSummary:
    return SweepSummary(**_sweep_facts(sweep))


def sweep_detail(sweep: Sweep, trials: Sequence[Observed]) -> SweepDetail:
    """A sweep with its trials as they are now."""
    best = best_of(sweep, trials)
    return SweepDetail(
        **_sweep_facts(sweep),
        trials=[_trial_view(sweep, each) for each in trials],
        best=best.trial.number if best else None,
        best_spec=set_values(dict(sweep.spec), best.trial.values) if best else None,
    )


def _sweep_facts(sweep: Sweep) -> dict[str, Any]:
    return {**vars(sweep), "num_trials": num_of_trials(sweep)}


def _trial_view(sweep: Sweep, observed: Observed) -> TrialOut:
    trial, job = observed.trial, observed.job
    return TrialOut(
        **{**vars(trial), "message": trial.message or (job.message if job else "")},
        status=job.status if job else None,
        step=job.progress.step if job else 0,
        value=observed.value(sweep.metric),
    )
