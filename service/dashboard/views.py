"""View models: what lists, tables and tiles show, computed from domain objects. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from service.api.views import summary_of
from service.domain.models import EndReason, Job, TimelineEvent
from service.schemas import wording
from service.schemas.jobs import JobSummary
from trainer.protocol.events import METRICS, WorkersStarted

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
_SPEED = "speed/rows_per_s"


@dataclass(frozen=True)
class Column:
    """A column of the job list; one without `text_of` is drawn by `static/jobs_table.js`.

    `text_of` has its text, by job and Unix time in seconds.
    """

    name: str
    title: str
    text_of: Callable[[JobSummary, float], object] | None = None
    is_number: bool = False
    is_default: bool = False


def _latest(name: str) -> Callable[[JobSummary, float], str]:
    return lambda job, _: wording.metric(name, job.latest_metrics.get(name))


_drawn = partial(Column, is_default=True)
_number = partial(Column, is_number=True)
# The first two are always there.
COLUMNS = (
    _drawn("status", "Status"),
    _drawn("name", "Job"),
    _drawn("progress", "Progress"),
    _drawn("spark", "Watched metric"),
    _drawn("quality", "Validation", is_number=True),
    _number("loss", "Train loss", _latest("train/loss")),
    _number("metric", "Filtered metric"),
    _number("rows_per_s", "Rows/s", _latest(_SPEED), is_default=True),
    Column(
        "workers",
        f"Workers T = M {wording.TIMES} L",
        lambda job, _: wording.layout_text(job),
        is_default=True,
    ),
    Column("project", "Project", lambda job, _: job.project),
    Column("labels", "Labels", lambda job, _: " ".join(f"{k}={v}" for k, v in job.labels.items())),
    _number("priority", "Priority", lambda job, _: job.priority),
    _number("attempts", "Attempts", lambda job, _: job.num_attempts),
    _number(
        "duration",
        "Duration",
        lambda job, now: wording.duration_of(job, now) or wording.NOTHING,
        is_default=True,
    ),
    _number("age", "Age", lambda job, now: wording.duration(now - job.created_at), is_default=True),
)


def job_row(job: Job, now: float, metric: str = "") -> dict[str, object]:
    """One line of the job list, ready for the table (JSON values only), with one more `metric`."""
    shown = summary_of(job)
    quality = shown.watched_metric
    quality_value = job.latest_metrics.get(f"validation/{quality}")
    texts = {each.name: each.text_of(shown, now) for each in COLUMNS if each.text_of}
    return texts | {
        "id": job.id,
        "name": job.name,
        "status": job.status.value.lower(),
        "tone": wording.tone_of(job.status),
        "groups": wording.groups_text(shown),
        "percent": round(shown.progress.percent, 1),
        # Truncated, so that 100 % means done.
        "percent_text": f"{int(shown.progress.percent)}%",
        "aside": wording.aside(shown) or wording.eta_text(shown.progress),
        "message": job.message,
        "quality": wording.precise(quality_value),
        "quality_name": "" if quality_value is None else quality.upper(),
        "metric": wording.metric(metric, job.latest_metrics.get(metric)),
    }


def key_figures(job: Job) -> list[tuple[str, str, str]]:
    """(metric, label, meaning) that tell whether a run is healthy, in reading order."""
    quality = job.spec.model.watched_metric
    label = quality.upper()
    found = {
        "train/loss": "Train loss",
        f"train/{quality}": f"Train {label}",
        f"validation/{quality}": f"Validation {label}",
        _SPEED: "Rows/s",
        "speed/steps_per_s": "Steps/s",
        "sync/time_s": "Sync time",
        "balance/gradient": "Gradient imbalance",
        "balance/lookup": "Lookup imbalance",
    }
    return [
        (name, label, METRICS.get(name) or METRICS[f"{name.partition('/')[0]}/METRIC"])
        for name, label in found.items()
    ]


def rank_rows(workers: WorkersStarted) -> list[list[int]]:
    """The 2D layout: `rows[g][s]` is the rank that holds shard `s` in sharding group `g`."""
    shard_of = {rank: s for s, group in enumerate(workers.replica_groups) for rank in group}
    return [sorted(group, key=shard_of.__getitem__) for group in workers.sharding_groups]


def end_tone(reason: object) -> str:
    """Tone of the end of an attempt; `active` where there is none."""
    if reason is None:
        return "active"
    return "good" if reason in _GOOD_ENDS else "bad"


def event_tone(job: Job, event: TimelineEvent) -> str:
    """Tone of an event: by the end or the level that it reports, else by its kind."""
    level = event.data.get("level")
    if event.kind == "job_ended":
        return wording.tone_of(job.status)
    if event.kind == "attempt_ended":
        return end_tone(event.data.get("reason"))
    if isinstance(level, str) and level in _LEVEL_TONES:
        return _LEVEL_TONES[level]
    return _EVENT_TONES.get(event.kind, "neutral")
