"""View models: what lists, tables and tiles show, computed from domain objects. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    EndReason,
    Job,
    JobStatus,
    QueueState,
    TimelineEvent,
)
from service.domain.sharding import newest_workers
from service.schemas.jobs import ExportOut


def export_errors(export: ExportOut) -> str:
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
    """One rank in the group diagram; `host_index` picks its colour, None where nobody is there."""

    rank: int
    host: str
    host_index: int | None


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


def end_tone(reason: object) -> str:
    """Colour family of the end of an attempt; `active` where there is none."""
    if reason is None:
        return "active"
    return "good" if reason in _GOOD_ENDS else "bad"


def event_tone(job: Job, event: TimelineEvent) -> str:
    """Colour family of an event: by the end or the level that it reports, else by its kind."""
    level = event.data.get("level")
    if event.kind == "job_ended":
        return tone_of(job.status)
    if event.kind == "attempt_ended":
        return end_tone(event.data.get("reason"))
    if isinstance(level, str) and level in _LEVEL_TONES:
        return _LEVEL_TONES[level]
    return _EVENT_TONES.get(event.kind, "neutral")
