"""Numbers, times and facts of a job in words, the same in the terminal and the browser. Pure.

Numbers are short, in a sensible unit. A *tone* is what a word's colour says: `neutral`, `active`,
`good`, `warn` or `bad`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from itertools import pairwise
from typing import Any

from service.domain.membership import SPARE, span_text
from service.domain.metrics import MEMORY_PARTS as PREDICTED_PARTS
from service.domain.metrics import steps_at_risk
from service.domain.models import Checkpoint, Job, JobStatus, TimelineEvent
from service.domain.sweeps import SweepStatus
from service.domain.timeline import counted, latest_resize_request
from service.schemas.jobs import (
    ComparedOut,
    ExportOut,
    JobDetail,
    JobPlan,
    JobSummary,
    MembershipOut,
    ProgressOut,
)
from service.schemas.sweeps import TrialOut
from trainer.layout.cost import MemoryUse, StepTime
from trainer.layout.plans import Calibration
from trainer.protocol.events import Prediction

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
# Jobs estimate their ends themselves, and others in the queue count on these.
_MAX_SPAN_S = 1e10
_SECOND_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def _of_finite(text_of: Callable[[float], str]) -> Callable[[float | None], str]:
    """A format that has words for what is unknown or no finite number, too."""

    @wraps(text_of)
    def shown(value: float | None) -> str:
        if value is None:
            return NOTHING
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
        return text_of(value)

    return shown


@_of_finite
def compact(value: float) -> str:
    """At most four characters of digits and a suffix: `987`, `16.5k`, `1.2M`."""
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}" if abs(value) < limit * 1e3 else f"{value:.2e}"
    return f"{value:.3g}"


@_of_finite
def precise(value: float) -> str:
    """A loss or a quality metric: four decimals, or three digits when tiny or large."""
    return f"{value:.3g}" if value and not 1e-3 <= abs(value) < 1e4 else f"{value:.4f}"


@_of_finite
def ratio(value: float) -> str:
    """How many times the mean the largest share is: `1.08×`."""
    return f"{value:.2f}{TIMES}"


@_of_finite
def latency(seconds: float) -> str:
    """A short time in its natural unit: `840 µs`, `12.3 ms`, `1.25 s`."""
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit_s * 0.9995:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


@_of_finite
def size(num_bytes: float) -> str:
    """Bytes in decimal units: `512 B`, `105 MB`."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_SIZE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_SIZE_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """A span in its two largest units: `45s`, `3m 20s`, `2h 05m`, `4d 03h`."""
    if seconds is None or not abs(seconds) < _MAX_SPAN_S:
        return NOTHING
    rest = max(0, int(seconds))
    for (unit_s, unit), (smaller_s, smaller) in pairwise(_SECOND_UNITS):
        if rest >= unit_s:
            return f"{rest // unit_s}{unit} {rest % unit_s // smaller_s:02d}{smaller}"
    return f"{rest}s"


def age(time_s: float, now_s: float) -> str:
    """How long ago a Unix time was, as in `3m 20s ago`."""
    return f"{duration(now_s - time_s)} ago"


def due(time_s: float | None, now_s: float) -> str:
    """In how long a Unix time comes, as in `in 3m 20s`."""
    return NOTHING if time_s is None else f"in {duration(time_s - now_s)}"


def clock(seconds: float) -> str:
    """Time since the start of a job: `+02:13`, `+1:05:09`."""
    rest = max(0, int(seconds))
    hours, minutes, rest_s = rest // 3600, rest % 3600 // 60, rest % 60
    return f"+{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"+{minutes:02d}:{rest_s:02d}"


def utc(time_s: float) -> str:
    """Unix seconds as a date and time, `2026-11-21 04:31:11 UTC`."""
    return datetime.fromtimestamp(time_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def metric(name: str, value: float | None) -> str:
    """A metric in the unit that its name implies, as in `sync/time_s` or `balance/lookup`."""
    if name.startswith("balance/"):
        return ratio(value)
    if name.startswith("speed/"):
        return compact(value)
    if name.endswith("_s"):
        return latency(value)
    if name.endswith("bytes"):
        return size(value)
    return precise(value)


# ---- plans

_UNCERTAIN = "Steps of few milliseconds are the least certain: Python and latencies make them."


def estimated(calibration: Calibration | None = None) -> str:
    """What the numbers of a plan are."""
    if calibration is None:
        return f"Estimated from the spec; nothing was measured. {_UNCERTAIN}"
    extra = calibration.extra_bytes
    memory = f", and workers {size(abs(extra))} {'more' if extra > 0 else 'less'}" if extra else ""
    jobs = counted(calibration.num_jobs, "job")
    return (
        f"Estimated from the spec, and calibrated by {jobs} of this cluster: steps take "
        f"{calibration.step_ratio:g} times as long as the model says (between a quarter and four "
        f"times is believed){memory}. {_UNCERTAIN}"
    )


MEMORY_PARTS = [
    (part.removesuffix("_buffers").capitalize(), f"{part}_bytes")
    for part in (*PREDICTED_PARTS, "reserve")
]
_USED_PARTS = MEMORY_PARTS[:-1]


def memory_of(rank: MemoryUse) -> list[tuple[str, float]]:
    """(part, bytes) of what a rank needs."""
    return [(name, getattr(rank, field)) for name, field in _USED_PARTS]


def memory_by_position(told: Prediction) -> list[list[tuple[str, float]]]:
    """The same for each position of a sharding group, of as many as all told parts have."""
    sizes_of = told.memory_bytes
    parts = {name: sizes_of.get(field.removesuffix("_bytes"), []) for name, field in _USED_PARTS}
    known = {name: sizes for name, sizes in parts.items() if sizes}
    return [[*zip(known, sizes, strict=True)] for sizes in zip(*known.values(), strict=False)]


# More ranks than these are left out where each has a bar.
MAX_BARS = 16


def step_phases(step: StepTime) -> list[tuple[str, float]]:
    """(phase, seconds) in their order."""
    return [(name.removesuffix("_s").replace("_", " "), time) for name, time in vars(step).items()]


def fullest(ranks: Sequence[MemoryUse]) -> list[tuple[int, MemoryUse]]:
    """(position, memory) of the ranks that take most, by position; all where they are few."""
    order = sorted(enumerate(ranks), key=lambda pair: -pair[1].needed_bytes)
    return sorted(order[:MAX_BARS], key=lambda pair: pair[0])


_UNITS = {"per_s": compact, "s": latency, "steps": compact, "bytes": size, "ratio": ratio}


def compared_texts(each: ComparedOut) -> tuple[str, str, str]:
    """(predicted, measured, measured over predicted), in the unit of the quantity."""
    shown = _UNITS[each.unit]
    times = NOTHING if each.ratio is None else f"{compact(each.ratio)}{TIMES}"
    return shown(each.predicted), shown(each.measured), times


def setting(value: Any) -> str:
    """A value of a searched field."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def of_limit(number: int, limit: int | None) -> str:
    """How much of a quota is in use, as in `3 of 8`."""
    return str(number) if limit is None else f"{number} of {limit}"


def metrics_line(values: Mapping[str, float], part: str = "") -> str:
    """Metrics on one line, `validation/mae 0.67 · validation/rmse 0.88`; of a part without it."""
    prefix = f"{part}/" if part else ""
    names = [name for name in sorted(values) if name.startswith(prefix)]
    return " · ".join(f"{name.removeprefix(prefix)} {metric(name, values[name])}" for name in names)


# ---- a job

_TONES = {
    "STARTING": "active",
    "RUNNING": "active",
    "PAUSED": "warn",
    "STOPPING": "warn",
    "CANCELLING": "warn",
    "SUCCEEDED": "good",
    "COMPLETED": "good",
    "FAILED": "bad",
}
_STANDINGS = {
    "current": ("trains", "good"),
    "listening": ("copies from a peer", "active"),
    "initial": ("starts", "neutral"),
    "spare": ("spare", "neutral"),
    "gone": ("gone", "bad"),
}
_DOMAINS = {
    "replica_group": "a lost host takes down its groups; the others train on",
    "job": "a lost worker restarts all of them from the newest checkpoint",
}


@dataclass(frozen=True)
class Fact:
    """What is said of a subject."""

    name: str
    text: str
    tone: str = "neutral"
    hint: str = ""


def tone_of(status: JobStatus | SweepStatus) -> str:
    return _TONES.get(status, "neutral")


def trial_state(trial: TrialOut) -> tuple[str, str]:
    """Word and tone of what became of a trial of a sweep."""
    if trial.stopped_at is not None and (trial.status is None or not trial.status.is_terminal):
        return f"stopped at step {trial.stopped_at}", "neutral"
    if trial.status is not None:
        return trial.status.value, tone_of(trial.status)
    if trial.job_id is not None:
        return "deleted", "neutral"
    return ("refused", "warn") if trial.message else ("being made", "neutral")


def standing_of(standing: str) -> tuple[str, str]:
    """Word and tone of what a group does; one without processes is `gone`."""
    return _STANDINGS.get(standing, (standing, "neutral"))


def duration_of(job: Job | JobSummary, now_s: float) -> str:
    """From the first training of a job until its end or now, pauses and restarts included; empty
    before."""
    if job.started_at is None:
        return ""
    return duration((job.ended_at or now_s) - job.started_at)


def eta_text(progress: ProgressOut) -> str:
    """When a job will be done, as in `3m 20s left`; empty where there is nothing to wait for."""
    eta = duration(progress.eta_s)
    return "" if eta == NOTHING else f"{eta} left"


def layout_text(job: JobSummary) -> str:
    """World size as replicas times shards, `4 = 2 × 2` (T = M × L); bounds where it may change.

    What is added are the workers of spares.
    """
    workers, replicas = _spans(job)
    if not replicas:
        return f"{workers} (auto)"
    spares = f" + {job.spare_workers}" if job.spare_workers else ""
    return f"{workers} = {replicas} {TIMES} {job.shard_group_size}{spares}"


def shape_text(job: JobSummary | JobPlan) -> str:
    """The layout in words, as in `4 workers (2 replicas x 2 shards)`."""
    workers, replicas = _spans(job)
    workers += " worker" if workers == "1" else " workers"
    layout = f"{replicas} replicas x {job.shard_group_size} shards" if replicas else "auto"
    spares = f" and {job.spare_workers} in spares" if job.spare_workers else ""
    return f"{workers} ({layout}){spares}"


def _spans(job: JobSummary | JobPlan) -> tuple[str, str]:
    """Bounds of the workers and of the replicas; the latter empty while `auto` is undecided."""
    workers = span_text(job.min_workers, job.world_size)
    if job.num_replicas is None or job.shard_group_size is None:
        return workers, ""
    return workers, span_text(job.min_workers // job.shard_group_size, job.num_replicas)


def aside(job: JobSummary) -> str:
    """Why a job makes no progress: how it failed, its place in the queue, that it pauses."""
    if job.status is JobStatus.FAILED:
        return job.reason.value.replace("_", " ") if job.reason else ""
    if job.queue and job.queue.position:
        return f"#{job.queue.position} in the queue"
    is_open = job.status is not JobStatus.PAUSED and not job.status.is_terminal
    return "pausing" if job.pause_requested and is_open else ""


def groups_text(job: JobSummary) -> str:
    """How many groups train, as in `2 of 3 groups`; empty while all do or nothing is known."""
    current, wanted = job.num_current_groups, job.num_wanted_groups
    if current is None or wanted is None or current >= wanted:
        return ""
    return f"{current} of {wanted} groups"


def group_facts(
    job: Job | JobDetail,
    membership: MembershipOut | None,
    timeline: Iterable[TimelineEvent],
    now_s: float,
    checkpoints: Sequence[Checkpoint] | None = None,
) -> list[Fact]:
    """What is known of a job's groups, of what is wanted of them, and of work at risk.

    `membership` is that of the newest attempt. With `checkpoints`, all that there are, work at risk
    is told of jobs that do not report it themselves.
    """
    facts = [] if membership is None else _membership_facts(job, membership, now_s)
    if job.status.is_terminal:
        return facts
    wanted = latest_resize_request(timeline)
    parts = [f"{wanted.workers} workers"] if wanted.workers else []
    parts += [f"without {host}" for host in sorted(wanted.drain_hosts)]
    if parts:
        facts.append(Fact("Wanted", ", ".join(parts), "active"))
    if job.status is not JobStatus.RUNNING:
        return facts
    steps = steps_at_risk(job.latest_metrics)
    if steps is None and checkpoints is not None:
        newest = max((checkpoint.step for checkpoint in checkpoints), default=0)
        steps = max(0, job.progress.step - newest)
    if steps is not None:
        hint = "Steps that the newest durable checkpoint does not hold"
        facts.append(Fact("At risk", f"{steps:,} steps since the newest checkpoint", hint=hint))
    return facts


def _membership_facts(job: Job | JobDetail, membership: MembershipOut, now_s: float) -> list[Fact]:
    facts = []
    if membership.changed_at and job.status is JobStatus.RUNNING:
        current, wanted = membership.num_current, membership.num_wanted
        text = f"{current} of {wanted} groups"
        if num_spares := job.spec.parallelism.spares:
            ready = sum(member.standing == SPARE for member in membership.members)
            text += f" and {ready} of {counted(num_spares, 'spare')}"
        text += f", generation {membership.generation}"
        tone = "good" if current >= wanted else "warn"
        least = job.spec.parallelism.min_groups
        if current < least:
            text = f"waits for {least - current} more: {text}, min_groups {least}"
        facts.append(Fact("Training", text, tone))
        facts.append(_copies_fact(membership))
    recovery = membership.last_recovery
    if recovery is not None:
        lost, redo = recovery.syncs_lost, "nothing to redo"
        if lost:
            redo = f"{counted(lost, 'sync interval')} to redo"
        text = f"commit {latency(recovery.pause_s)} late, {redo}, {age(recovery.time, now_s)}"
        so_far = f"{counted(membership.num_losses, 'group')} lost so far"
        hint = f"Cause: {recovery.cause}"
        facts.append(Fact("Last recovery", f"{text}; {so_far}", "good", hint))
    layout = membership.layout
    if layout is not None:
        domain = layout.failure_domain
        facts.append(Fact("Failure domain", f"{domain.replace('_', ' ')}: {_DOMAINS[domain]}"))
        price = f"{size(layout.memory_overhead_bytes)} more memory a worker"
        if layout.sync_latency_s is not None:
            price += f", {latency(layout.sync_latency_s)} a full sync"
        facts.append(Fact("Chosen", f"{layout.reason} ({price})"))
    excluded = [host for host in membership.excluded_hosts if host.until > now_s]
    if excluded and not job.status.is_terminal:
        names = (f"{host.host} for {duration(host.until - now_s)}" for host in excluded)
        facts.append(Fact("Left out", ", ".join(names), "warn", "Failed too often, or too slow"))
    return facts


def _copies_fact(membership: MembershipOut) -> Fact:
    hosts, needed = membership.host_copies_alive, membership.host_copies_needed
    text = f"{membership.copies_alive} of each shard, on {counted(hosts, 'host')}"
    if not needed:
        return Fact("Copies alive", text)
    if hosts < needed:
        return Fact("Copies alive", f"{text}; survive needs {needed}", "warn")
    return Fact("Copies alive", f"{text}; {hosts - 1} more may be lost", "good")


def comparison(export: ExportOut) -> str:
    """How far the predictions of an export are from the trainer's, by task."""
    report = export.report or {}
    tasks = report.get("tasks", {})
    if not tasks:
        why = report.get("not_measured", "it has no report of them")
        return f"not compared with the trainer's predictions: {why}"
    try:
        errors = "; ".join(
            f"{name}: {task['metric']} {precise(task['trainer_metric'])} as trained, "
            f"{precise(task['export_metric'])} exported; predictions differ by "
            f"{precise(task['mean_abs_error'])} on average, {precise(task['max_abs_error'])} at "
            "most"
            for name, task in tasks.items()
        )
        return f"{errors} ({report['num_rows']:,} validation rows)"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # Code of the job may have written anything there.
        return "not known to be like the trainer: its report cannot be read"
