"""Commands that read jobs: ps, show, metrics, events, checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import time
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from service.client import ShardloomClient
from service.commands import context
from service.commands.context import JobArgument, JsonOption, UrlOption, console, print_json
from service.commands.render import (
    SHOWN_KINDS,
    checkpoints_table,
    event_line,
    job_page,
    jobs_table,
    metrics_table,
)
from service.domain import JobStatus

DEFAULT_NUM_JOBS = 20

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]


def ps(
    url: UrlOption = None,
    as_json: JsonOption = False,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="All, not the newest 20.")] = False,
    status: Annotated[
        list[JobStatus] | None, typer.Option(help="Only jobs in this status; repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, KEY=VALUE; repeatable.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(help="Only jobs created at or after this local time.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(help="Only jobs created before this local time.")
    ] = None,
) -> None:
    """List jobs, newest first."""
    with context.open_client(url) as client:
        found = client.iter_jobs(
            statuses=status or (),
            name=name,
            project=project,
            labels=dict(_split_label(each) for each in label or ()),
            created_after=since.timestamp() if since else None,
            created_before=until.timestamp() if until else None,
        )
        jobs = list(found if show_all else itertools.islice(found, DEFAULT_NUM_JOBS + 1))
    shown = jobs if show_all else jobs[:DEFAULT_NUM_JOBS]
    if as_json:
        print_json(shown)
    elif not jobs:
        console().print("no jobs; `shardloom run SPEC` starts one")
    else:
        console().print(jobs_table(shown, time.time()))
        if len(shown) < len(jobs):
            console().print(Text("there are more: shardloom ps --all", style="dim"))


def _split_label(label: str) -> tuple[str, str]:
    key, separator, value = label.partition("=")
    if not key or not separator:
        raise typer.BadParameter(f"{label!r} is no label; give KEY=VALUE, as in team=ads")
    return key, value


def show(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show a job: status, progress, metrics, sharding, attempts."""
    with context.open_client(url) as client:
        found = client.get_job(job)
        if as_json:
            print_json(found)
            return
        lines = list(client.iter_events(found.id, kinds=SHOWN_KINDS))
        console().print(job_page(found, client.attempts(found.id), lines, time.time()))


def metrics(
    job: JobArgument,
    url: UrlOption = None,
    name: Annotated[
        list[str] | None, typer.Option(help="One metric, as in train/loss; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the metrics of a job: latest, least, greatest and the curve of each."""
    with context.open_client(url) as client:
        answer = client.metrics(job, names=name or ())
    if as_json:
        print_json(answer)
        return
    missing = sorted(set(name or ()) - set(answer.names))
    if missing:
        known = ", ".join(answer.names) or "none yet"
        raise typer.BadParameter(f"no metric is named {missing[0]!r}; the job has: {known}")
    if not answer.series:
        console().print("no metrics yet")
        return
    console().print(metrics_table(answer.series))


def events(
    job: JobArgument,
    url: UrlOption = None,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the timeline of a job."""
    with context.open_client(url) as client:
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                _follow_events(client, job, as_json=as_json)
            return
        found = list(client.iter_events(job))
    if as_json:
        print_json(found)
    else:
        for event in found:
            console().print(event_line(event))


def checkpoints(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the checkpoints of a job."""
    with context.open_client(url) as client:
        found = client.checkpoints(job)
    if as_json:
        print_json(found)
    elif not found:
        console().print("no checkpoints yet")
    else:
        console().print(checkpoints_table(found, time.time()))


def _follow_events(client: ShardloomClient, job: str, *, as_json: bool) -> None:
    for event in client.follow_events(job):
        if as_json:
            typer.echo(event.model_dump_json())
        else:
            console().print(event_line(event))
