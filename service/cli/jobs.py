"""Commands about jobs: reading them, their lifecycle, and the hosts and workers that they have.

With --json a command prints what the service answered; without it a page, or only an id where
scripts take it from standard output (hints go to standard error).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Annotated

import typer
from pydantic_core import to_json

from service.cli.artifacts import moment
from service.cli.common import (
    HERE,
    Client,
    FollowOption,
    JobArgument,
    JsonOption,
    SetOption,
    YesOption,
    console,
    print_answer,
    print_dim,
    print_json,
    print_line,
)
from service.cli.render import (
    SHOWN_KINDS,
    START_KINDS,
    checkpoints_table,
    event_line,
    job_page,
    jobs_table,
    metrics_table,
)
from service.cli.submit import ForceOption, SecretOption, read_secrets
from service.client.client import absolute_data_path
from service.domain.models import JobStatus
from service.domain.timeline import counted
from service.schemas.jobs import JobDetail, ResizeRequestOut
from trainer.spec.parse import parse_document

DEFAULT_NUM_JOBS = 20


def ps(
    client: Client = HERE,
    as_json: JsonOption = False,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="All, not the newest 20.")] = False,
    status: Annotated[
        list[JobStatus] | None,
        typer.Option(
            metavar="STATUS",
            case_sensitive=False,
            help=f"Only jobs in this status, one of {', '.join(JobStatus)}; repeatable.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs of this name.")] = None,
    search: Annotated[
        str, typer.Option(metavar="TEXT", help="Only jobs with this in their name or id.")
    ] = "",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOUND",
            help="Only jobs whose newest value is so, as in 'validation/ne<0.8'; repeatable.",
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only jobs of this project.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Only jobs with this label, KEY=VALUE; repeatable.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only jobs since then: 10m (ago) or 2026-11-21T10:00."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs before; written as --since.")
    ] = None,
) -> None:
    """List jobs, newest first."""
    now_s = time.time()
    found = client.iter_jobs(
        statuses=status or (),
        name=name,
        project=project,
        labels=label or (),
        metrics=metric or (),
        search=search,
        created_after=moment(since, now_s),
        created_before=moment(until, now_s),
    )
    jobs = list(found if show_all else itertools.islice(found, DEFAULT_NUM_JOBS + 1))
    shown = jobs if show_all else jobs[:DEFAULT_NUM_JOBS]
    empty = "no jobs; `shardloom run SPEC` starts one"
    table = jobs_table(shown, now_s, console().width)
    print_answer(shown, table, as_json=as_json, empty=empty)
    if len(shown) < len(jobs) and not as_json:
        print_dim("there are more: shardloom ps --all")


def show(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Show a job: status, progress, metrics, sharding, attempts."""
    found = client.get_job(job)
    if as_json:
        print_json(found)
        return
    start = START_KINDS if found.status is JobStatus.STARTING else ()
    lines = list(client.iter_events(found.id, kinds=(*SHOWN_KINDS, *start)))
    console().print(job_page(found, client.attempts(found.id), lines, time.time()))


def metrics(
    job: JobArgument,
    client: Client = HERE,
    name: Annotated[
        list[str] | None, typer.Option(help="One metric, as in train/loss; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the metrics of a job: latest, least, greatest and the curve of each."""
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
    client: Client = HERE,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the timeline of a job."""
    if as_json and not follow:
        print_json(list(client.iter_events(job)))
        return
    with contextlib.suppress(KeyboardInterrupt):
        for event in client.follow_events(job) if follow else client.iter_events(job):
            if as_json:
                typer.echo(to_json(event).decode())
            else:
                console().print(event_line(event))


def checkpoints(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """List the checkpoints of a job."""
    found = client.checkpoints(job)
    table = checkpoints_table(found, time.time())
    print_answer(found, table, as_json=as_json, empty="no checkpoints yet")


# ---- lifecycle


def pause(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Let a job save a checkpoint and release its workers; it keeps its place in the queue."""
    found = client.pause(job)
    paused = "is paused" if found.status.value == "PAUSED" else "is asked to pause"
    _print_change(found, paused, f"`shardloom resume {found.id}` lets it go on", as_json=as_json)


def resume(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Let a paused job go on, with its old place in the queue."""
    found = client.resume(job)
    _print_change(
        found, "goes on when it is its turn", "`shardloom queue` shows when", as_json=as_json
    )


def clone(
    job: JobArgument,
    overrides: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the new job.")] = None,
    secret: SecretOption = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Makes repeated clones one job.")
    ] = None,
    force: ForceOption = False,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Submit the spec of a job again, with changes, and print the new job's id.

    Its secrets do not come along: name those that the new job needs.
    """
    changes = {}
    for each in overrides or ():
        key, separator, text = each.partition("=")
        if not separator:
            raise typer.BadParameter(f"an override reads KEY=VALUE, not {each!r}")
        changes[key] = parse_document(text)
    made = client.clone(
        job,
        name=name,
        set=absolute_data_path(changes),
        secrets=read_secrets(secret or []),
        idempotency_key=idempotency_key,
        force=force,
    )
    print_line(made, made.id, as_json=as_json)


def restart(
    job: JobArgument,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Its path, as `shardloom checkpoints` prints it.")
    ] = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Let a job that has ended or is paused go on from one of its checkpoints.

    Later checkpoints count no more, and are removed once the new attempt has saved one.
    """
    found = client.restart(job, step=step, path=checkpoint)
    hint = f"`shardloom follow {found.id}` shows it at work"
    _print_change(found, "goes on from its checkpoint", hint, as_json=as_json)


def delete(
    job: JobArgument,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep checkpoints, logs and traces.")
    ] = False,
    yes: YesOption = False,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Delete a job that has ended, with everything it left."""
    found = client.get_job(job)
    if not yes:
        what = "" if keep_files else " with its checkpoints, logs and traces"
        typer.confirm(f"delete {found.id} ({found.name}){what}?", abort=True, err=True)
    deleted = client.delete(found.id, artifacts=not keep_files)
    if as_json:
        print_json({"id": found.id, "deleted": True, "left": deleted.left})
    else:
        typer.echo(f"{found.id} ({found.name}) is deleted")
        for each in deleted.left:
            typer.echo(f"its checkpoints stay at {each.path}: {each.why}", err=True)


def recover(
    believe_all: Annotated[
        bool,
        typer.Option(
            "--believe-all", help="Also what this service's secret key did not sign: jobs could."
        ),
    ] = False,
) -> None:
    """Find jobs again from run storage, after their database was lost; run it where the service is.

    It takes the SHARDLOOM_* settings of the service. A job that still trains trains on.
    """
    # It opens the database, which no other command does.
    from service.reconciler.recover import main

    raise typer.Exit(main(believe_all=believe_all))


def _print_change(job: JobDetail, what: str, hint: str, *, as_json: bool) -> None:
    print_line(job, f"{job.id} ({job.name}) {what}", hint, as_json=as_json)


# ---- workers and hosts of a running job


def resize(
    job: JobArgument,
    workers: Annotated[int, typer.Argument(min=1, metavar="N", help="How many workers.")],
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Grow or shrink a running job to N workers.

    N is a multiple of shard_group_size within parallelism.workers. Groups that stay train on.
    """
    _print_resize(job, client.resize(job, workers), as_json=as_json)


def drain(
    job: JobArgument,
    host: Annotated[str, typer.Argument(metavar="HOST", help="As `shardloom show` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Use the host again.")] = False,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Let a running job leave a host in good order, before its maintenance."""
    _print_resize(job, client.drain(job, host, undo=undo), as_json=as_json)


def _print_resize(job: str, request: ResizeRequestOut, *, as_json: bool) -> None:
    size = counted(request.workers, "worker") if request.workers else "its workers"
    hosts = f" without {', '.join(request.drain_hosts)}" if request.drain_hosts else ""
    hint = f"`shardloom events -f {job}` tells when it is so"
    print_line(request, f"asked for {size}{hosts}", hint, as_json=as_json)
