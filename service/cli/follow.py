"""Following a job in the terminal: a live display, or plain lines where the output is no terminal.

Events scroll by and stay; below them the live display shows status, progress and metrics.
Following only reads. It ends when the job does, and a service that restarts meanwhile is waited
for; Ctrl-C detaches and the job goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.cli.common import DETACHED, exit_code_of
from service.cli.render import event_line, headline_metric, progress_line, status_text
from service.client.client import ShardloomClient
from service.client.errors import ShardloomError
from service.client.transport import PATIENCE_S, is_transient
from service.domain.models import JobStatus
from service.schemas.jobs import JobDetail
from service.schemas.wording import (
    compact,
    duration,
    duration_of,
    groups_text,
    metrics_line,
    shape_text,
)

# Plain lines end up in logs, where one every few seconds is enough.
PLAIN_LINE_EVERY_S = 10.0


class PlainView:
    """Lines that are printed once: the status, trouble, and the progress now and then."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._status: JobStatus | None = None
        self._message = ""
        self._step = -1
        self._next_line_s = 0.0

    def show(self, job: JobDetail, trouble: str) -> None:
        if job.status is not self._status:
            self._status = job.status
            if not job.status.is_terminal:
                self._console.print(Text.assemble(f"{job.name}  ", status_text(job.status)))
        message = trouble or ("" if job.status.is_terminal else job.message)
        if message != self._message:
            self._message = message
            if message:
                self._console.print(message)
        if job.progress.step != self._step and self._clock() >= self._next_line_s:
            self._step = job.progress.step
            self._next_line_s = self._clock() + PLAIN_LINE_EVERY_S
            if job.progress.total_steps:
                metric = headline_metric(job)
                self._console.print(progress_line(job) + (f", {metric}" if metric else ""))


@contextmanager
def detaching(message: RenderableType, output: Console) -> Iterator[None]:
    """Ctrl-C inside only detaches: says how to come back, and raises `typer.Exit`."""
    try:
        yield
    except KeyboardInterrupt:
        output.print(message)
        raise typer.Exit(DETACHED) from None


def follow(client: ShardloomClient, job_id: str, console: Console) -> int:
    """Show a job until it has ended; returns the exit code that mirrors it.

    Raises `ServiceUnreachable` or `ServerFault` after `PATIENCE_S` without an answer.
    """
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            job = watch(client, job_id, console, partial(show_live, live), poll_s=0.5)
    else:
        job = watch(client, job_id, console, PlainView(console).show)
    console.print(end_page(job))
    return exit_code_of(job.status)


def show_live(live: Live, job: JobDetail, trouble: str) -> None:
    live.update(live_page(job, trouble), refresh=True)


def watch(
    client: ShardloomClient,
    job_id: str,
    console: Console,
    show: Callable[[JobDetail, str], None],
    *,
    poll_s: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> JobDetail:
    """Poll a job until it has ended, and return it: its events are printed, then it is shown.

    `show` is told why the last poll failed, if it did.
    """
    job, last_event_id, answered_s = client.get_job(job_id), 0, clock()
    while True:
        try:
            # Before its events: once it has ended, its last events are seen as well.
            job = client.get_job(job.id)
            for event in client.iter_events(job.id, after=last_event_id):
                console.print(event_line(event))
                last_event_id = event.id
            answered_s, trouble = clock(), ""
        except ShardloomError as error:
            if not is_transient(error) or clock() - answered_s > PATIENCE_S:
                raise
            trouble = f"{error}; trying again"
        show(job, trouble)
        if job.status.is_terminal and not trouble:
            return job
        sleep(poll_s)


def live_page(job: JobDetail, trouble: str) -> RenderableType:
    title = Text.assemble(
        (job.name, "bold"), "  ", status_text(job.status), (f"  {job.id}  {shape_text(job)}", "dim")
    )
    if groups := groups_text(job):
        title.append(f"  {groups}", style="yellow")
    parts: list[RenderableType] = [title, _progress_row(job)]
    parts += _metrics_rows(job)
    if message := trouble or ("" if job.status.is_terminal else job.message):
        parts.append(Text(message, style="yellow"))
    parts.append(Text("Ctrl-C detaches, the job goes on", style="dim"))
    return Group(*parts)


def _progress_row(job: JobDetail) -> RenderableType:
    progress = job.progress
    known = progress.total_steps > 0
    bar = ProgressBar(
        total=progress.total_steps if known else None,
        completed=progress.step,
        width=40,
        pulse=not known,
        style="grey30",
        complete_style="cyan",
        finished_style="green",
    )
    row = Table.grid(padding=(0, 2, 0, 0))
    if not known:
        row.add_row(bar, Text("waiting for the first step", style="dim"))
        return row
    eta = "" if progress.eta_s is None else f"ETA {duration(progress.eta_s)}"
    row.add_row(
        bar,
        f"{progress.step:,}/{progress.total_steps:,}",
        f"{progress.percent:.1f} %",
        f"{compact(progress.rows_per_s)} rows/s",
        eta,
    )
    return row


def _metrics_rows(job: JobDetail) -> list[RenderableType]:
    return [
        Text.assemble((f"{part:<12}", "dim"), line)
        for part in ("train", "validation")
        if (line := metrics_line(job.latest_metrics, part))
    ]


def end_page(job: JobDetail) -> RenderableType:
    head = Text.assemble((job.name, "bold"), "  ", status_text(job.status))
    if job.ended_at is not None and (took := duration_of(job, job.ended_at)):
        head.append(f" after {took}")
    if job.message and job.status is not JobStatus.SUCCEEDED:
        head.append(f": {job.message}")
    parts: list[RenderableType] = [head, *_metrics_rows(job)]
    if job.advice and job.status is JobStatus.FAILED:
        parts.append(Text(job.advice, style="yellow"))
    if job.status is JobStatus.FAILED:
        hint = f"`shardloom show {job.id}` has the evidence, `shardloom logs {job.id}` its logs"
        parts.append(Text(hint, style="dim"))
    return Group(*parts)


def detached_message(job_id: str) -> RenderableType:
    """How to come back to a job that goes on, and how to stop it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for command, purpose in (
        (f"shardloom follow {job_id}", "come back to this display"),
        (f"shardloom logs -f {job_id}", "read its logs"),
        (f"shardloom show {job_id}", "see where it stands"),
        (f"shardloom cancel {job_id}", "stop it"),
    ):
        grid.add_row(f"  {command}", Text(purpose, style="dim"))
    return Group(Text("Detached; the job goes on."), grid)
