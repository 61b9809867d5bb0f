"""Rich tables and pages: functions from what the service answered to what Rich prints.

Pure but for the time, which callers give as Unix seconds (`now_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.backends.base import cluster_text
from service.cli.common import clock, sparkline
from service.domain.membership import span_text
from service.domain.metrics import goodput_of, phase_shares, watched_names
from service.domain.models import Checkpoint, GoneGroup, JobStatus, Member, TimelineEvent
from service.domain.sharding import (
    DATA_PARALLEL,
    DIVERGENCE,
    STARTED,
    imbalance,
    loads_of,
    newest_workers,
    sync_text,
)
from service.domain.timeline import RESIZE_KINDS, WRITTEN, ServiceEvent, Trace, counted
from service.schemas import wording
from service.schemas.jobs import (
    AttemptOut,
    ComparedOut,
    JobDetail,
    JobSummary,
    MembershipOut,
    MetricSeries,
)
from trainer.protocol.events import TablePlan, WorkersStarted


def groups_table(membership: MembershipOut, now_s: float) -> Table:
    """One row a group, missing ones included."""
    table = plain_table("Group", "Standing", "Life", "Hosts")
    groups: list[Member | GoneGroup] = [*membership.members, *membership.missing]
    for group in sorted(groups, key=lambda each: each.group):
        hosts = ", ".join(dict.fromkeys(group.hosts))
        table.add_row(str(group.group), _standing(group, now_s), str(group.incarnation), hosts)
    return table


def _standing(group: Member | GoneGroup, now_s: float) -> Text:
    if isinstance(group, Member):
        return toned(*wording.standing_of(group.standing))
    reason = group.reason.replace("_", " ")
    return Text(f"gone {wording.age(group.time, now_s)} ({reason})", style="yellow")


# Lines of the timeline that a job's page is made from.
SHOWN_KINDS = (STARTED, DIVERGENCE, WRITTEN, *RESIZE_KINDS)
# Those that tell how far a start is, and what it waits for.
START_KINDS = (
    ServiceEvent.ATTEMPT_CREATED,
    ServiceEvent.ATTEMPT_SUBMITTED,
    "attempt_started",
    "room_asked",
    "note",
)
_STYLES = {"active": "cyan", "good": "green", "warn": "yellow", "bad": "red"}


def toned(text: str, tone: str) -> Text:
    return Text(text, style=_STYLES.get(tone, ""))


def status_text(status: JobStatus) -> Text:
    return toned(status.value, wording.tone_of(status))


def headline_metric(job: JobSummary) -> str:
    """The metric that a job watches, as in `validation/rmse 0.9123`; empty if none is known."""
    known = job.latest_metrics
    names = [name for name in watched_names(job.watched_metric) if name in known]
    return f"{names[0]} {wording.metric(names[0], known[names[0]])}" if names else ""


# Columns of `ps`, and from which width of the terminal on they are shown.
_JOB_COLUMNS = {
    **{"Job": 0, "Name": 0, "Status": 0, ">Progress": 0},
    **{"Metric": 100, ">Workers": 120, "Created": 140, "Time": 90},
}


def jobs_table(jobs: Sequence[JobSummary], now_s: float, width: int) -> Table:
    """One row a job, on `width` characters; its id is whole on the narrowest, to be copied."""
    is_shown = [least <= width for least in _JOB_COLUMNS.values()]
    table = plain_table(*compress(_JOB_COLUMNS, is_shown))
    table.columns[0].no_wrap = True
    for job in jobs:
        aside = wording.aside(job) or wording.groups_text(job)
        cells: tuple[str | Text, ...] = (
            job.id,
            job.name,
            Text.assemble(status_text(job.status), (f" {aside}" if aside else "", "yellow")),
            _progress_text(job),
            headline_metric(job),
            span_text(job.min_workers, job.world_size),
            wording.age(job.created_at, now_s),
            wording.duration_of(job, now_s),
        )
        table.add_row(*compress(cells, is_shown))
    return table


def _progress_text(job: JobSummary) -> str:
    """Share of the steps, rows, and the time that is left, as in `45 %  1.2M rows  3m 20s left`."""
    progress = job.progress
    if not progress.total_steps:
        return ""
    # Truncated, so that 100 % means done.
    parts = [f"{int(progress.percent)} %", f"{wording.compact(progress.rows)} rows"]
    return "  ".join(filter(None, [*parts, wording.eta_text(progress)]))


def job_page(
    job: JobDetail,
    attempts: Sequence[AttemptOut],
    timeline: Sequence[TimelineEvent],
    now_s: float,
) -> RenderableType:
    """All about one job: what `shardloom show` prints.

    Of the timeline `SHOWN_KINDS` suffice, and `START_KINDS` while it starts.
    """
    title = Text.assemble((job.name, "bold"), f"  {job.id}")
    parts: list[RenderableType] = [title, _job_facts(job, timeline, now_s)]
    if job.membership and not job.status.is_terminal and job.membership.changed_at:
        parts += [Text(), groups_table(job.membership, now_s)]
    if job.compared:
        parts += [Text(), compared_table(job.compared)]
    workers = newest_workers(timeline)
    if workers is not None and workers.tables:
        parts += [Text(), plan_table(workers), Text(_loads_line(workers), style="dim")]
    if len(attempts) > 1 or any(attempt.message for attempt in attempts):
        parts += [Text(), attempts_table(attempts, now_s), *_end_lines(job, attempts)]
    return Group(*parts)


def _job_facts(job: JobDetail, timeline: Sequence[TimelineEvent], now_s: float) -> Table:
    """(subject, text) of everything that is said in a line."""
    grid = facts_grid()
    head = Text.assemble(status_text(job.status), f"  {job.message}" if job.message else "")
    grid.add_row("status", head)
    if job.status is JobStatus.STARTING and timeline:
        grid.add_row("start", f"{timeline[-1].message}; {wording.age(timeline[-1].time, now_s)}")
    if job.queue and job.queue.reason:
        place = f"#{job.queue.position}: " if job.queue.position else ""
        grid.add_row("queue", f"{place}{job.queue.reason}")
    grid.add_row("layout", wording.shape_text(job))
    if job.spec.resources.cluster == "own":
        grid.add_row("cluster", cluster_text(job.spec))
    for fact in wording.group_facts(job, job.membership, timeline, now_s):
        grid.add_row(fact.name.lower(), toned(fact.text, fact.tone))
    if goodput := goodput_of(job.latest_metrics):
        lost = ", ".join(f"{cause} {share:.1%}" for cause, share in goodput.lost_shares)
        share = f"{goodput.share:.1%} since the attempt or its coordinator started"
        grid.add_row("goodput", share + (f"; lost: {lost}" if lost else ""))
    grid.add_row("sync", sync_text(job.spec))
    grid.add_row("created", f"{wording.age(job.created_at, now_s)}, at {clock(job.created_at)}")
    if took := wording.duration_of(job, now_s):
        grid.add_row("duration", took)
    if job.progress.total_steps:
        grid.add_row("progress", progress_line(job))
    for part in ("train", "validation"):
        if line := wording.metrics_line(job.latest_metrics, part):
            grid.add_row(part, line)
    if line := phases_line(job.latest_metrics):
        grid.add_row("step", line)
    if alarms := [line for line in timeline if line.kind == DIVERGENCE]:
        times = counted(len(alarms), "time")
        grid.add_row("diverged", Text(f"{times}; {alarms[-1].message}", style="red"))
    if num_traces := sum(line.kind == WRITTEN for line in timeline):
        grid.add_row("traces", f"{num_traces} (`shardloom traces {job.id}`)")
    if job.labels:
        grid.add_row("labels", "  ".join(f"{key}={value}" for key, value in job.labels.items()))
    if job.secret_names:
        grid.add_row("secrets", "  ".join(job.secret_names))
    grid.add_row("data", job.spec.data.path)
    grid.add_row("files", job.run_dir)
    return grid


def _end_lines(job: JobDetail, attempts: Sequence[AttemptOut]) -> list[RenderableType]:
    """What the end of the newest attempt was read from, and what to change."""
    last = attempts[-1]
    grid = facts_grid()
    for name, value in last.evidence.items():
        grid.add_row(name, value)
    lines: list[RenderableType] = [Text(), grid] if last.evidence else []
    if job.status is JobStatus.FAILED and job.advice:
        lines += [Text(), Text(job.advice, style="yellow")]
    return lines


def phases_line(metrics: Mapping[str, float]) -> str:
    """Where a step's time goes, as in `41.2 ms: backward 33 %, dense 21 %, ...`."""
    phases = phase_shares(metrics)
    total_s = sum(seconds for _, seconds in phases)
    shares = ", ".join(
        f"{phase.replace('_', ' ')} {seconds / total_s:.0%}" for phase, seconds in phases
    )
    return f"{wording.latency(total_s)}: {shares}" if phases else ""


def compared_table(found: Sequence[ComparedOut]) -> Table:
    table = plain_table("", ">Predicted", ">Measured", ">Ratio")
    for each in found:
        table.add_row(each.name, *wording.compared_texts(each))
    return table


def plan_table(workers: WorkersStarted) -> Table:
    """One row a table: how it is sharded, and which positions of a sharding group hold it."""
    table = plain_table("Table", "Sharding", "Type", ">Rows", ">Columns", ">Size", "Positions")
    for plan in workers.tables:
        table.add_row(
            plan.name,
            plan.sharding_type.replace("_", "-"),
            plan.data_type,
            f"{plan.num_embeddings:,}",
            str(plan.embedding_dim),
            wording.size(plan.size_bytes),
            _positions_text(plan),
        )
    return table


def _positions_text(plan: TablePlan) -> str:
    if plan.sharding_type == DATA_PARALLEL:
        return "all, whole"
    return " ".join(str(position) for position in sorted({s.position for s in plan.shards}))


def _loads_line(workers: WorkersStarted) -> str:
    loads = loads_of(workers.tables, workers.shard_group_size)
    held = ", ".join(f"{at}: {wording.size(sum(load.values()))}" for at, load in enumerate(loads))
    ratio = imbalance(loads)
    return f"per position  {held}" + (f"  (imbalance {ratio:.2f})" if ratio else "")


def progress_line(job: JobSummary) -> str:
    """Progress in a line, as in `step 1,200 of 5,000 (24.0 %), 2.1M rows, 21.3k rows/s`."""
    progress = job.progress
    line = (
        f"step {progress.step:,} of {progress.total_steps:,} ({progress.percent:.1f} %), "
        f"{wording.compact(progress.rows)} rows, {wording.compact(progress.rows_per_s)} rows/s"
    )
    if job.status is JobStatus.RUNNING and progress.eta_s is not None:
        line += f", {wording.duration(progress.eta_s)} to go"
    return line


def attempts_table(attempts: Sequence[AttemptOut], now_s: float) -> Table:
    table = plain_table("Attempt", "Started", "Took", "End", ">Restarts", "Message")
    for attempt in attempts:
        start_s = attempt.started_at or attempt.created_at
        table.add_row(
            attempt.id,
            clock(start_s),
            wording.duration((attempt.ended_at or now_s) - start_s),
            attempt.end_reason.value if attempt.end_reason else "",
            str(attempt.num_worker_failures),
            attempt.message,
        )
    return table


def metrics_table(series: Iterable[MetricSeries]) -> Table:
    """One row a metric: latest, least and greatest value, and its curve."""
    table = plain_table("Metric", ">Latest", ">Min", ">Max", ">Step", "Curve")
    for one in series:
        if not one.points:
            continue
        table.add_row(
            one.name,
            wording.metric(one.name, one.points[-1].value),
            wording.metric(one.name, min(point.min for point in one.points)),
            wording.metric(one.name, max(point.max for point in one.points)),
            f"{one.points[-1].step:,}",
            Text(sparkline([point.value for point in one.points]), style="cyan"),
        )
    return table


def checkpoints_table(checkpoints: Sequence[Checkpoint], now_s: float) -> Table:
    table = plain_table(">Step", "", ">Size", "Written", "Metrics", "Path")
    for checkpoint in checkpoints:
        table.add_row(
            f"{checkpoint.step:,}",
            Text("best", style="green") if checkpoint.is_best else "",
            wording.size(checkpoint.size_bytes),
            wording.age(checkpoint.created_at, now_s),
            wording.metrics_line(checkpoint.metrics),
            Text(checkpoint.path, overflow="fold"),
        )
    return table


def traces_table(traces: Sequence[Trace], now_s: float) -> Table:
    table = plain_table("Trace", ">Rank", ">Steps", ">Up to step", ">Size", "Written", "Attempt")
    for trace in traces:
        table.add_row(
            trace.name,
            str(trace.rank),
            str(trace.num_steps),
            f"{trace.step:,}",
            wording.size(trace.size_bytes),
            wording.age(trace.time, now_s),
            trace.attempt_id,
        )
    return table


def event_line(event: TimelineEvent) -> Text:
    level = event.data.get("level")
    style = {"warning": "yellow", "error": "red"}.get(str(level), "")
    return Text.assemble(
        (clock(event.time), "dim"), "  ", (f"{event.kind:<22}", "cyan"), (event.message, style)
    )


def facts_grid() -> Table:
    """A table without lines: subject and text."""
    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    return grid


def plain_table(*headings: str) -> Table:
    """A plain table; a heading that starts with `>` is of a right-aligned column."""
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(
            heading.removeprefix(">"),
            justify="right" if heading.startswith(">") else "left",
            overflow="fold",
        )
    return table
