"""View models: what lists, tables and tiles show, computed from domain objects. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from service.dashboard import format
from service.domain.membership import (
    is_degraded,
    membership_of,
    num_current,
    num_wanted,
    sizes_of_job,
    span_text,
)
from service.domain.models import (
    Attempt,
    Checkpoint,
    EndReason,
    Job,
    JobStatus,
    QueueState,
    TimelineEvent,
)
from service.domain.sharding import newest_workers
from service.domain.timeline import Trace
from service.schemas.jobs import ExportOut


@dataclass(frozen=True)
class ExportLine:
    """One export. `href` downloads it, and is empty until it is done."""

    id: str
    href: str
    status: str
    checkpoint: str
    tables: str
    size: str
    age: str
    message: str


def export_lines(job: Job, exports: Sequence[ExportOut], now: float) -> list[ExportLine]:
    """A row for each export, in the order given; `now` is Unix time in seconds."""
    return [_export_line(job, each, now) for each in exports]


def _export_line(job: Job, export: ExportOut, now: float) -> ExportLine:
    is_done = export.status == "succeeded"
    at_step = "" if export.step is None else f" (step {format.grouped(export.step)})"
    return ExportLine(
        id=export.id,
        href=f"/v1/jobs/{job.id}/exports/{export.id}/archive" if is_done else "",
        status=export.status,
        checkpoint=f"{export.checkpoint}{at_step}",
        tables=export.quantize,
        size="" if export.size_bytes is None else format.size(export.size_bytes),
        age=f"{format.duration(now - export.created)} ago",
        message=_errors(export) if is_done else export.message,
    )


def _errors(export: ExportOut) -> str:
    """How far predictions are from the trainer's, by task."""
    tasks = (export.report or {}).get("tasks", {})
    if not tasks:
        return "not compared with the trainer's predictions"
    return "; ".join(
        f"{name}: {each['metric']} {each['trainer_metric']:.4f} as trained, "
        f"{each['export_metric']:.4f} exported"
        for name, each in tasks.items()
    )


# Colour families of the stylesheet; `active` is the accent.
_TONES = {
    JobStatus.STARTING: "active",
    JobStatus.RUNNING: "active",
    JobStatus.PAUSED: "warn",
    JobStatus.STOPPING: "warn",
    JobStatus.SUCCEEDED: "good",
    JobStatus.FAILED: "bad",
}
_EVENT_TONES = {
    "attempt_started": "active",
    "workers_started": "active",
    "checkpoint_committed": "good",
    "workers_lost": "warn",
    "cancel_requested": "warn",
    "pause_requested": "warn",
    "preemption_requested": "warn",
    "group_joined": "active",
    "recovered": "good",
    "resized": "active",
}
_LEVEL_TONES = {"warning": "warn", "error": "bad"}
_GOOD_ENDS = frozenset({EndReason.COMPLETED, EndReason.CANCELLED, EndReason.PAUSED})
NUM_HOST_COLOURS = 8


def tone_of(status: JobStatus) -> str:
    """Colour family of a status: `neutral`, `active`, `good`, `warn` or `bad`."""
    return _TONES.get(status, "neutral")


def quality_metric(job: Job) -> str:
    """Name of the metric that says how good the model is, without its part: `rmse`, `ne`, ..."""
    return job.spec.model.watched_metric


def layout_text(job: Job) -> str:
    """World size as replicas times shards, `4 = 2 × 2` (T = M × L); bounds where it may change."""
    sizes = sizes_of_job(job)
    workers = span_text(sizes.min_workers, sizes.world_size)
    if sizes.num_replicas is None or sizes.shard_group_size is None:
        return f"{workers} (auto)"
    replicas = span_text(sizes.min_workers // sizes.shard_group_size, sizes.num_replicas)
    return f"{workers} = {replicas} {format.TIMES} {sizes.shard_group_size}"


def groups_text(job: Job) -> str:
    """How many groups train, as in `2 of 3 groups`; empty unless it is fewer than there should."""
    membership = membership_of(job)
    if membership is None or not is_degraded(job):
        return ""
    return f"{num_current(membership)} of {num_wanted(membership)} groups"


def duration_s(job: Job, now: float) -> float | None:
    """Seconds from the start of training to its end, or to `now`; None before the start."""
    if job.started_at is None:
        return None
    return (job.ended_at or now) - job.started_at


@dataclass(frozen=True)
class ProgressView:
    """A progress bar: `percent` in [0, 100] and the words beside it."""

    percent: float
    percent_text: str
    step_text: str
    eta_text: str


def progress_view(job: Job) -> ProgressView:
    """Progress of a job; an ETA only where there is something left to wait for."""
    done = job.progress
    percent = format.percent_done(done.step, done.total_steps)
    total = format.grouped(done.total_steps) if done.total_steps else "?"
    eta = format.duration(done.eta_s) if job.status is JobStatus.RUNNING else format.NOTHING
    return ProgressView(
        percent=percent,
        # Truncated, so that 100 % means done.
        percent_text=f"{int(percent)}%",
        step_text=f"step {format.grouped(done.step)} of {total}" if done.step else "not started",
        eta_text="" if eta == format.NOTHING else f"{eta} left",
    )


def _aside(job: Job) -> str:
    """Why a job makes no progress: how it failed, or its position in the queue; else empty."""
    if job.status is JobStatus.FAILED:
        return job.reason.value.replace("_", " ") if job.reason else ""
    position = QueueState.of(job).position if job.status is JobStatus.QUEUED else None
    return f"#{position} in the queue" if position else ""


def job_row(job: Job, now: float) -> dict[str, object]:
    """One line of the job list, ready for the table (JSON values only)."""
    progress = progress_view(job)
    quality = quality_metric(job)
    quality_value = job.latest_metrics.get(f"validation/{quality}")
    return {
        "id": job.id,
        "name": job.name,
        "href": f"jobs/{job.id}",
        "status": job.status.value.lower(),
        "tone": tone_of(job.status),
        "groups": groups_text(job),
        "percent": round(progress.percent, 1),
        "percent_text": progress.percent_text,
        "aside": _aside(job) or progress.eta_text,
        "message": job.message,
        "workers": layout_text(job),
        "loss": format.precise(job.latest_metrics.get("train/loss")),
        "quality": format.precise(quality_value),
        "quality_name": "" if quality_value is None else quality.upper(),
        "rows_per_s": format.compact(job.progress.rows_per_s or None),
        "age": format.duration(now - job.created_at),
        "duration": format.duration(duration_s(job, now)),
    }


def count_statuses(jobs: Iterable[Job]) -> dict[JobStatus, int]:
    """How many jobs are in each status, in the order of a job's life; absent ones left out."""
    counts = Counter(job.status for job in jobs)
    return {status: counts[status] for status in JobStatus if counts[status]}


@dataclass(frozen=True)
class Figure:
    """One key figure. `hint` explains it on hover; `tone` is `bad` when it is not finite."""

    name: str
    label: str
    value: str
    hint: str
    tone: str = "neutral"


def key_figures(job: Job) -> list[Figure]:
    """The numbers that tell whether a run is healthy, in reading order."""
    quality = quality_metric(job)
    label = quality.upper()
    return [
        _figure(job, "train/loss", "Train loss", "Mean over the last reporting window"),
        _figure(job, f"train/{quality}", f"Train {label}", "Over the last reporting window"),
        _figure(job, f"validation/{quality}", f"Validation {label}", "Over the validation part"),
        _figure(job, "speed/rows_per_s", "Rows/s", "Rows trained per second by all ranks"),
        _figure(job, "speed/steps_per_s", "Steps/s", "Steps per second"),
        _figure(job, "sync/time_s", "Sync time", "Mean time of one average over replica groups"),
        _figure(
            job,
            "balance/gradient",
            "Gradient imbalance",
            "Distinct rows updated: busiest rank over the mean of all (1 is perfect)",
        ),
        _figure(
            job,
            "balance/lookup",
            "Lookup imbalance",
            "Ids looked up: busiest rank over the mean of all (1 is perfect)",
        ),
    ]


def _figure(job: Job, name: str, label: str, hint: str) -> Figure:
    value = format.metric(name, job.latest_metrics.get(name))
    tone = "bad" if value in ("NaN", "∞", "-∞") else "neutral"
    return Figure(name=name, label=label, value=value, hint=hint, tone=tone)


@dataclass(frozen=True)
class Cell:
    """One rank in the group diagram; `host_index` picks its colour."""

    rank: int
    host: str
    host_index: int


@dataclass(frozen=True)
class GroupGrid:
    """The 2D layout: `rows[g][s]` is the rank that holds shard `s` in sharding group `g`.

    `table_shards` are (table, sharding type) of workers that did not tell their plan.
    """

    rows: tuple[tuple[Cell, ...], ...]
    hosts: tuple[str, ...]
    placement: str
    backend: str
    table_shards: tuple[tuple[str, str], ...]


def group_grid(timeline: Sequence[TimelineEvent]) -> GroupGrid | None:
    """The groups of the newest worker group run on a timeline; None before the first one."""
    workers = newest_workers(timeline)
    if workers is None:
        return None
    hosts = tuple(dict.fromkeys(workers.hosts))
    shard_of = {rank: s for s, group in enumerate(workers.replica_groups) for rank in group}

    def cell(rank: int) -> Cell:
        host = workers.hosts[rank]
        return Cell(rank=rank, host=host, host_index=hosts.index(host) % NUM_HOST_COLOURS)

    return GroupGrid(
        rows=tuple(
            tuple(cell(rank) for rank in sorted(group, key=shard_of.__getitem__))
            for group in workers.sharding_groups
        ),
        hosts=hosts,
        placement=workers.placement.replace("_", "-"),
        backend=workers.backend,
        table_shards=() if workers.tables else tuple(sorted(workers.table_shards.items())),
    )


@dataclass(frozen=True)
class TimelineLine:
    """One line of the timeline; `clock` counts from the creation of the job.

    `evidence` is what a loss of workers was read from, on one line.
    """

    clock: str
    time_utc: str
    kind: str
    message: str
    actor: str
    tone: str
    evidence: str


def timeline_lines(job: Job, timeline: Sequence[TimelineEvent], limit: int) -> list[TimelineLine]:
    """The newest `limit` events, newest first."""
    return [
        TimelineLine(
            clock=format.clock(event.time - job.created_at),
            time_utc=format.utc(event.time),
            kind=event.kind.replace("_", " "),
            message=event.message,
            actor=event.actor,
            tone=event_tone(job, event),
            evidence=_evidence_text(event),
        )
        for event in reversed(timeline[-limit:])
    ]


def _evidence_text(event: TimelineEvent) -> str:
    evidence = event.data.get("evidence")
    found = evidence.items() if isinstance(evidence, dict) else ()
    return ", ".join(f"{name}: {value}" for name, value in found)


def event_tone(job: Job, event: TimelineEvent) -> str:
    """Colour family of an event: by the end or the level that it reports, else by its kind."""
    level = event.data.get("level")
    if event.kind == "job_ended":
        return tone_of(job.status)
    if event.kind == "attempt_ended":
        return "good" if event.data.get("reason") in _GOOD_ENDS else "bad"
    if isinstance(level, str) and level in _LEVEL_TONES:
        return _LEVEL_TONES[level]
    return _EVENT_TONES.get(event.kind, "neutral")


@dataclass(frozen=True)
class CheckpointLine:
    """One row of the checkpoints table."""

    step: str
    is_best: bool
    metrics: str
    size: str
    age: str
    path: str


def checkpoint_lines(checkpoints: Sequence[Checkpoint], now: float) -> list[CheckpointLine]:
    """Checkpoints, newest first."""
    return [
        CheckpointLine(
            step=format.grouped(checkpoint.step),
            is_best=checkpoint.is_best,
            metrics=format.metrics_line(checkpoint.metrics),
            size=format.size(checkpoint.size_bytes),
            age=f"{format.duration(now - checkpoint.created_at)} ago",
            path=checkpoint.path,
        )
        for checkpoint in reversed(checkpoints)
    ]


@dataclass(frozen=True)
class AttemptLine:
    """One row of the attempts table."""

    id: str
    number: int
    outcome: str
    tone: str
    started: str
    duration: str
    num_worker_failures: int
    message: str
    evidence: tuple[tuple[str, str], ...]


def attempt_lines(job: Job, attempts: Sequence[Attempt], now: float) -> list[AttemptLine]:
    """Attempts, newest first; numbered from 1 as people count."""
    return [_attempt_line(job, attempt, now) for attempt in reversed(attempts)]


def _attempt_line(job: Job, attempt: Attempt, now: float) -> AttemptLine:
    began = attempt.started_at or attempt.submitted_at
    if attempt.end_reason is None:
        outcome, tone = "live", "active"
    else:
        outcome = attempt.end_reason.value.replace("_", " ")
        tone = "good" if attempt.end_reason in _GOOD_ENDS else "bad"
    return AttemptLine(
        id=attempt.id,
        number=attempt.index + 1,
        outcome=outcome,
        tone=tone,
        started=format.clock(began - job.created_at) if began else format.NOTHING,
        duration=format.duration((attempt.ended_at or now) - began) if began else format.NOTHING,
        num_worker_failures=attempt.num_worker_failures,
        message=attempt.message,
        evidence=tuple(attempt.evidence.items()),
    )


@dataclass(frozen=True)
class TraceLine:
    """One row of the traces table; `href` downloads the file."""

    name: str
    href: str
    rank: int
    step: str
    num_steps: int
    size: str
    age: str


def trace_lines(job: Job, traces: Sequence[Trace], now: float) -> list[TraceLine]:
    """Traces, newest first."""
    return [
        TraceLine(
            name=trace.name,
            href=f"/v1/jobs/{job.id}/traces/{trace.name}?attempt={quote(trace.attempt_id)}",
            rank=trace.rank,
            step=format.grouped(trace.step),
            num_steps=trace.num_steps,
            size=format.size(trace.size_bytes),
            age=f"{format.duration(now - trace.time)} ago",
        )
        for trace in reversed(traces)
    ]
